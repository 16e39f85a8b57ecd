"""Random sequences of calls on a batch: after every build, every field is compared with the plain-Python oracle.

Batches of one KV-cache group and of several (windowed, of other block sizes, expanded to kernel blocks, cross), with
drafts, steps padded for captured sizes, and ranks of a context-parallel group. The model knows its requests by id, and
by an engine's own per-row list, which follows ``add_request``, ``swap_rows`` and ``metadata.moves`` only. A refused
call must leave every byte as it was.
"""

from batches_model import MAX_ENCODER, MAX_LEN, MAX_REQS, MAX_TOKENS
from batches_requests import RequestRules
from batches_steps import StepRules
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from attncore.builder import ContextParallel, InputBatch, KVCacheGroup, MetadataBuilder
from attncore.builder.device import by_copy, tables

ENTRIES = ((by_copy, "JOURNAL_ENTRIES", 5), (tables, "SURPLUS_ENTRIES", 3))
"""Small, so that steps often have more to send than fits; other tests have the usual sizes."""

GROUPS = {
    "one": None,
    "full and sliding": [KVCacheGroup("full", 4), KVCacheGroup("window", 4, sliding_window=6)],
    "other sizes": [KVCacheGroup("a", 3), KVCacheGroup("b", 16), KVCacheGroup("c", 3), KVCacheGroup("d", 1)],
    "expanded": [KVCacheGroup("small", 8), KVCacheGroup("large", 12, kernel_block_size=4, sliding_window=5)],
    "cross": [KVCacheGroup("decoder", 4), KVCacheGroup("encoder", 8, kernel_block_size=4, cross=True)],
}


class Batches(RequestRules, StepRules, RuleBasedStateMachine):
    kernels = "cython"
    more_drafts = None
    """Drafts beyond those of ``threshold``, of a builder that takes draft trees; None: it takes none."""

    @initialize(
        groups_of=st.sampled_from(["one", "ranks of groups", *GROUPS]), block_size=st.sampled_from([1, 3, 4, 16]),
        depth=st.integers(1, 3),
        planned=st.booleans(), threshold=st.integers(1, 3), world=st.integers(1, 3), data=st.data(),
        transport=st.integers(0, 1), pad_seq_len=st.integers(0, 1),
    )  # fmt: skip
    def start(self, groups_of, block_size, depth, planned, threshold, world, transport, pad_seq_len, data):
        if self.more_drafts is not None:
            threshold, world = threshold + self.more_drafts, 1
        self.usual = [(module, name, getattr(module, name)) for module, name, _ in ENTRIES]
        for module, name, few in ENTRIES:
            setattr(module, name, few)
        if groups_of == "one":
            own = {"block_size": block_size * world}
            self.groups = [KVCacheGroup("decoder", block_size * world)]
        elif groups_of == "ranks of groups":
            size = block_size * world
            own = {"groups": [KVCacheGroup("plain", size), KVCacheGroup("expanded", 2 * size, kernel_block_size=size)]}
            self.groups = own["groups"]
        else:
            world = 1
            own = {"groups": GROUPS[groups_of], "max_encoder_len": MAX_ENCODER if groups_of == "cross" else None}
            self.groups = GROUPS[groups_of]
        self.one_group = groups_of == "one"
        self.ranks = None
        if world > 1:
            interleave = data.draw(st.sampled_from([n for n in (1, 2, 4) if block_size % n == 0]))
            self.ranks = ContextParallel(world, data.draw(st.integers(0, world - 1)), block_size, interleave)
        self.batch = InputBatch(max_num_reqs=MAX_REQS, max_model_len=MAX_LEN, kernels=self.kernels, **own)
        self.threshold = threshold
        self.builder = MetadataBuilder(
            self.batch, self.backend(), max_num_batched_tokens=MAX_TOKENS, depth=depth,
            transport=self.transports[transport],
            max_num_encoder_tokens=MAX_REQS * MAX_ENCODER, decode_threshold=threshold, context_parallel=self.ranks,
            draft_trees=self.more_drafts is not None,
        )  # fmt: skip
        self.builder._backends.pad_seq_len = self.pad_seq_len = pad_seq_len
        self.plan_fails, self.planned = False, planned
        if planned:  # as the builder does for a backend with a plan
            self.builder._backends.plans = ((self.groups[0].name, self.plan),)
            self.builder._longer, self.builder._decode_step = True, lambda: None
            self.builder._padded_step = lambda bucket: None
        self.requests = {}
        self.rows = [None] * MAX_REQS  # what an engine keeps beside the batch
        self.next_id = 0
        self.next_block = 1
        self.captured, self.of_tokens = {}, []
        self.addresses = {}
        for size in sorted(data.draw(st.sets(st.sampled_from([1, 3, MAX_REQS]))), reverse=True):
            self.capture(size, data.draw(st.integers(1, min(threshold, MAX_TOKENS // size))))
        for _ in range(data.draw(st.integers(0, MAX_REQS))):
            self.add(data, data.draw(st.integers(0, MAX_LEN - 8)), 1, data.draw(st.integers(0, 20)))

    def teardown(self):
        for module, name, usual in getattr(self, "usual", ()):
            setattr(module, name, usual)

    def backend(self):
        """What the builder builds for; None: NumPy arrays."""

    transports = ("auto", "copy")

    def captured_now(self, size, metadata):
        """What an engine does after ``capture``: capture its model."""

    def run(self, size, metadata):
        """What an engine does with a step built for a graph: replay it."""

    @invariant()
    def agrees(self):
        if not hasattr(self, "batch"):
            return
        assert self.batch.num_reqs == len(self.requests)
        needy = set()
        for name, request in self.requests.items():
            assert self.batch.block_ids(name) == self.as_given(request.blocks)
            assert self.batch.num_computed_tokens(name) == request.computed
            for group in self.groups:
                if group.cross or request.paused:
                    continue
                if len(request.blocks[group.name]) <= request.computed // group.block_size < self.width(group):
                    needy.add(name)
        assert set(self.batch.needs_block()) == needy
        held = {row for row, name in enumerate(self.rows) if name is not None}
        for table in self.batch._core.tables.values():
            for row in set(range(MAX_REQS)) - held:
                assert not table.array[row].any()
