"""Both implementations in lockstep, fed objects that lie: equal answers, equal errors, equal states.

A refused call changes nothing, whatever the object did while it was read, and also where it called the batch again.
"""

import oracles
from fuzz.budget import examples
from fuzz.hostile import Recipe, fixed, integers, mappings, mostly, names, sequences
from fuzz.outcomes import outcome, plain
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder
from attncore.builder.fields import FIELDS
from attncore.kernels import codes

MAX_REQS, MAX_LEN, MAX_TOKENS, NUM_BLOCKS = 4, 24, 48, 50
GROUPS = {
    "one": None,
    "two": [KVCacheGroup("full", 4, num_blocks=NUM_BLOCKS), KVCacheGroup("window", 2, sliding_window=6)],
    "expanded": [KVCacheGroup("a", 8, kernel_block_size=4, num_blocks=NUM_BLOCKS), KVCacheGroup("b", 4)],
}
KNOWN = [f"r{i}" for i in range(MAX_REQS + 1)]
name = mostly(st.sampled_from(KNOWN), names)
count = mostly(st.integers(0, 12), integers)
few = mostly(st.integers(0, 3), integers)
row = mostly(st.integers(0, MAX_REQS), integers)
ids = mostly(st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=7), sequences)
long_ids = mostly(st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=7, max_size=12), sequences)
scheduled = mostly(st.dictionaries(st.sampled_from(KNOWN), st.integers(0, 5)), st.sampled_from(mappings("r0")))
parents = mostly(st.lists(st.integers(-1, 1), max_size=4), sequences)
trees = mostly(
    st.dictionaries(st.sampled_from(KNOWN), st.lists(st.sampled_from([-1, -1, 0]), max_size=2), max_size=2),
    st.sampled_from(mappings("r0")),
)
pairs = st.tuples(st.integers(0, 9), st.integers(1, 6)).map(lambda one: (one[0], one[0] + one[1]))
spans = mostly(st.one_of(st.lists(pairs, max_size=1), st.just([(0, 2), (2, 5)]), st.just([(1, 4), (6, 8)])), sequences)
FIELD_NAMES = ("num_reqs", "num_tokens", "num_decodes", "max_seq_len", "max_query_len", "req_ids", "moves")


class Side:
    """One implementation: its batch, its builder, and what it holds as plain values."""

    def __init__(self, kernels, groups, block_size, draft_trees, spans):
        own = {"groups": groups} if groups else {"block_size": block_size, "num_blocks": NUM_BLOCKS}
        self.batch = InputBatch(max_num_reqs=MAX_REQS, max_model_len=MAX_LEN, spans=spans, kernels=kernels, **own)
        self.builder = MetadataBuilder(
            self.batch, max_num_batched_tokens=MAX_TOKENS, decode_threshold=3, draft_trees=draft_trees
        )
        self.groups, self.changed_inside = groups, False

    def state(self):
        core = self.batch._core
        tables = [(table._lengths[codes.NUM_BLOCKS].tobytes(), table.array.tobytes()) for table in core.tables.values()]
        order = core.order
        rows = [*map(repr, order.req_ids)], sorted(order.holes), sorted(order.paused), sorted(order.row_of.values())
        trees = self.builder._trees
        ran = {} if trees is None else {name: plain(tuple(tree)) for name, tree in trees._ran.items()}
        spans = core.spans and (
            repr(sorted(core.spans._of.items(), key=lambda one: one[0])),
            core.spans._last.tobytes(),
        )
        kept = repr(ran), trees and repr(trees._given), spans
        return core.lengths.tobytes(), tables, rows, core.state.num_rows, *kept

    def again(self):
        """Called by an object while it is read: the batch refuses to be changed, unless it was not entered yet."""
        before = self.state()
        outcome(self.batch.remove_request, "r1")
        outcome(self.batch.append_blocks, "r0", [1])
        outcome(self.builder.build)
        self.changed_inside |= self.state() != before

    def step(self, **given):
        """A step's fields as plain values, checked against the oracle where it has one group and is not padded."""
        before = {one: (self.batch.block_ids(one), self.batch.num_computed_tokens(one)) for one in self.batch.req_ids}
        self.changed_inside = False
        metadata = self.builder.build(**given)
        fields = {field.name: plain(getattr(metadata.host, field.name, None)) for field in FIELDS.values()}
        if self.groups is None and not given.get("bucket") and not self.changed_inside:
            runs = [self.batch.num_computed_tokens(one) - before[one][1] for one in metadata.req_ids]
            rows = [(*before[one], run) for one, run in zip(metadata.req_ids, runs, strict=True)]
            whole = oracles.persistent_step(rows, self.batch.block_size, 3)
            if given.get("trees") is not None:
                del whole["positions"]  # by depth; tests/batches_trees.py looks at them
            for field, expected in whole.items():
                value = getattr(metadata, field)
                assert (value.tolist() if hasattr(value, "tolist") else value) == expected, field
        if not self.changed_inside:
            self.check_spans(metadata)
        return fields | {field: repr(getattr(metadata, field)) for field in FIELD_NAMES}

    def check_spans(self, metadata):
        """Each token has the end of its request's span, all of which the step runs."""
        host, wanted = metadata.host, []
        for row, one in enumerate(metadata.req_ids):
            first, stop = int(host.context_lens[row]), int(host.context_lens[row] + host.query_lens[row])
            held = [(a, b) for a, b in self.batch.spans(one) if a < stop and b > first]
            assert all(first <= a and b <= stop for a, b in held), (held, first, stop)
            wanted += [next((b for a, b in held if a <= token < b), 0) for token in range(first, stop)]
        ends = getattr(host, "span_ends", None)
        assert (ends is None) == (not any(wanted))
        assert ends is None or ends.tolist() == wanted


class Twins(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(sorted(GROUPS)), block_size=st.sampled_from([1, 3, 4]), trees=st.booleans(),
        spans=st.booleans(),
    )  # fmt: skip
    def start(self, groups, block_size, trees, spans):
        self.sides = [Side(kernels, GROUPS[groups], block_size, trees, spans) for kernels in ("cython", "numba")]
        self.groups = [group.name for group in GROUPS[groups] or ()]

    def both(self, method, *recipes, **named):
        """The call on both sides, each with objects of its own; equal outcomes, and nothing changed by a refusal."""
        outcomes = []
        for side in self.sides:
            side.changed_inside, before = False, side.state()
            args = [one(side.again) if isinstance(one, Recipe) else one for one in recipes]
            kwargs = {key: one(side.again) if isinstance(one, Recipe) else one for key, one in named.items()}
            found = outcome(getattr(side, method, None) or getattr(side.batch, method, None), *args, **kwargs)
            if found[0] != "answer" and not side.changed_inside:
                assert side.state() == before, f"{method} was refused ({found}) and changed the batch"
            outcomes.append(plain(found) if found[0] != "answer" else ("answer", repr(plain(found[1]))))
        assert outcomes[0] == outcomes[1]

    def of_groups(self, blocks):
        """Ids, or ids by group where the batch has groups."""
        if not self.groups:
            return blocks
        return Recipe(f"by group {blocks}", lambda call: {group: blocks(call) for group in self.groups})

    @rule(name=name, blocks=long_ids, computed=count)
    def add_request(self, name, blocks, computed):
        self.both("add_request", name, self.of_groups(blocks), computed)

    @rule(name=name, blocks=ids)
    def append_blocks(self, name, blocks):
        self.both("append_blocks", name, self.of_groups(blocks))

    @rule(given=st.sampled_from(mappings("r0")))
    def append_blocks_many(self, given):
        self.both("append_blocks_many", given)

    @rule(name=name, index=few, block=count, group=st.sampled_from([None, "full", "a", 1, "?"]))
    def replace_block(self, name, index, block, group):
        self.both("replace_block", name, index, block, group)

    @rule(name=name, blocks=count, group=st.sampled_from([None, "window", "b", [], "?"]))
    def truncate_blocks(self, name, blocks, group):
        self.both("truncate_blocks", name, blocks, group)

    @rule(name=name, method=st.sampled_from(["remove_request", "preempt", "block_ids", "num_computed_tokens"]))
    def one_request(self, name, method):
        self.both(method, name)

    @rule(name=name, given=spans)
    def set_spans(self, name, given):
        self.both("set_spans", name, given)
        self.both("spans", name)

    @rule(
        name=st.sampled_from(KNOWN),
        given=st.lists(pairs, max_size=3, unique=True).map(sorted),
        tokens=st.integers(1, 16),
    )
    def run_spans(self, name, given, tokens):
        """A request of its own, whose spans are run as far as these tokens go."""
        first = 1 + 7 * KNOWN.index(name)
        self.both("add_request", name, self.of_groups(fixed(list(range(first, first + 7)))))
        self.both("set_spans", name, given)
        held = self.sides[0].batch.req_ids
        if all(isinstance(other, str) for other in held):  # an object of one side is no request of the other
            self.both("step", scheduled={**dict.fromkeys(held, 0), name: tokens})

    @rule(name=name, tokens=few)
    def rollback(self, name, tokens):
        self.both("rollback", name, tokens)

    @rule(given=st.sampled_from(mappings("r1")))
    def rollback_many(self, given):
        self.both("rollback_many", given)

    @rule(i=row, j=row)
    def swap_rows(self, i, j):
        self.both("swap_rows", i, j)

    @rule(tokens=few)
    def release_passed_blocks(self, tokens):
        self.both("release_passed_blocks", tokens)

    @rule()
    def needs_block(self):
        self.both("needs_block")

    @rule(given=scheduled)
    def build(self, given):
        self.both("step", scheduled=given)

    @rule(query_len=few)
    def build_all(self, query_len):
        self.both("step", query_len=query_len)

    @rule(given=trees, scheduled=st.one_of(st.just(fixed({})), scheduled))
    def build_trees(self, given, scheduled):
        self.both("step", scheduled=scheduled, trees=given)

    @rule(name=st.sampled_from(KNOWN), parents=parents)
    def build_a_tree(self, name, parents):
        given = Recipe(f"{{{name}: {parents}}}", lambda call: {name: parents(call)})
        self.both("step", trees=given)

    @rule(given=trees)
    def keep_paths(self, given):
        for side in self.sides:
            side.keep = side.builder.keep_paths
        self.both("keep", given)

    @rule(name=st.sampled_from(KNOWN), path=parents)
    def keep_a_path(self, name, path):
        for side in self.sides:
            side.keep = side.builder.keep_paths
        self.both("keep", Recipe(f"{{{name}: {path}}}", lambda call: {name: path(call)}))

    @rule(size=few, query_len=few)
    def capture(self, size, query_len):
        for side in self.sides:
            side.capture = lambda *args, side=side: side.builder.capture(*args).num_reqs
        self.both("capture", size, query_len)

    @rule(given=scheduled, size=few)
    def build_in_a_captured_size(self, given, size):
        self.both("step", scheduled=given, bucket=size)

    @rule(lens=sequences)
    def build_profile(self, lens):
        for side in self.sides:
            side.profile = lambda given, side=side: side.builder.build_profile(given).num_tokens
        self.both("profile", lens)

    @invariant()
    def agree(self):
        if not hasattr(self, "sides"):
            return
        left, right = self.sides
        assert left.state() == right.state()
        core = left.batch._core
        computed = core.lengths[codes.COMPUTED]
        assert ((computed >= 0) & (computed <= MAX_LEN)).all()
        for table in core.tables.values():
            held = table._lengths[codes.NUM_BLOCKS]
            assert ((held >= 0) & (held <= table.array.shape[1])).all()
            for row, blocks in enumerate(held):
                assert not table.array[row, blocks:].any()
                assert (table.array[row] >= 0).all()
                assert (table.array[row] < table.limit * table.group.kernel_blocks).all()


TestTwins = Twins.TestCase
TestTwins.settings = examples(60, steps=30)
