"""What benchmarks/gpu.py times: batches that go on for ever, stepped eagerly or by a captured graph, and clocks.

Everything also runs with ``device="cpu"`` and transport ``copy``, where a graph is a function that is called again: to
try the code, not to measure.
"""

import gc
import statistics
from time import perf_counter_ns

import numpy as np
import torch

from attncore import AttentionBackend, AttentionImpl, BackendConfig, BackendSpec, InputBatch, MetadataBuilder

BLOCK_SIZE = 16
HEADROOM = 4096  # tokens that a decode may run before its row is full
CONTEXTS = {"8k": (1024, 8191), "128k": (131_072 - 1024, 131_071)}
LONG_PREFILL = {"8k": 0, "128k": 122_880}  # tokens that are there before the chunk of a prefill
FIELDS = (
    "slot_mapping", "positions", "seq_lens", "query_start_loc", "block_table", "paged_kv_indptr",
    "paged_kv_last_page_len", "paged_kv_indices",
)  # fmt: skip


class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None):
        return query


class Backend(AttentionBackend):
    """Reads page lists, plans nothing."""

    name = "bench"
    impl_class = Impl
    plan_staging = "shared"

    def __init__(self, device, block_size=BLOCK_SIZE, needs=()):
        spec = BackendSpec(
            name=self.name, api=1, factory="bench:Backend", devices={"cuda": 1, "cpu": 1}, dtypes={"bfloat16"},
            head_sizes={128}, block_sizes={block_size}, cuda_graph="always", plan_staging=self.plan_staging,
            device_needs={"block_table", "paged_kv_indices", "seq_lens", *needs},
        )  # fmt: skip
        super().__init__(
            BackendConfig(
                num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", block_size=block_size, device=device,
                spec=spec,
            )
        )  # fmt: skip

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (num_blocks, 2, block_size, num_kv_heads, head_size)


class DummyPlan(Backend):
    """A plan that does nothing: what the hook itself costs, the wait for the last step's receipt included."""

    def plan(self, metadata):
        pass


class FlashInferPlan(Backend):
    """FlashInfer's own plan of a decode, from views of the pinned arena."""

    def __init__(self, device, num_reqs, pages):
        import flashinfer

        super().__init__(device)
        self.none = torch.empty(0, dtype=torch.int32, device=device)
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD", use_cuda_graph=True,
            use_tensor_cores=True, backend="fa2",
            paged_kv_indptr_buffer=torch.zeros(num_reqs + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=torch.zeros(pages, dtype=torch.int32, device=device),
            paged_kv_last_page_len_buffer=torch.zeros(num_reqs, dtype=torch.int32, device=device),
        )  # fmt: skip

    def plan(self, metadata):
        host = metadata.host
        self.wrapper.plan(
            torch.tensor(host.paged_kv_indptr), self.none, torch.tensor(host.paged_kv_last_page_len),
            32, 8, 128, BLOCK_SIZE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip


class CalledAgain:
    """A graph where there are none."""

    def __init__(self, function):
        self.replay = function


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def captured(function, device):
    """A graph of what ``function`` launches."""
    if device == "cpu":
        return CalledAgain(function)
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()  # a graph of an earlier batch that is destroyed during a capture spoils it
    try:
        with torch.cuda.graph(graph):
            function()
    finally:
        gc.enable()
    return graph


def transports(device):
    """The transports that a device has."""
    return ("copy",) if device == "cpu" else ("graph", "copy")


class Shape:
    """``decodes`` of one token beside ``prefills`` chunks of ``chunk`` tokens, at a ``context`` of CONTEXTS."""

    def __init__(self, name, context, decodes, prefills=0, chunk=0):
        self.name, self.context, self.decodes, self.prefills, self.chunk = name, context, decodes, prefills, chunk

    def __str__(self):
        return f"{self.name}, {self.context}"


def shapes():
    for context in CONTEXTS:
        for n in (1, 8, 64, 256, 1024):
            yield Shape(f"decode {n}", context, n)
        yield Shape("prefill 1x8192", context, 0, 1, 8192)
        yield Shape("128 decodes + a chunk of 2048", context, 128, 1, 2048)


class Work:
    """A batch of one shape and its builder. ``prepare`` is what an engine does between steps; ``step`` is timed.

    Decodes cross a block boundary in turn: decode 256 needs exactly 16 new blocks a step. A prefill is a request that
    has just joined, so that all of its new blocks go out with the step.
    """

    def __init__(self, shape, device, transport, backend=None, *, graph=False, depth=2):
        self.shape, self.device, self.transport = shape, device, transport
        low, high = CONTEXTS[shape.context]
        self.first = LONG_PREFILL[shape.context]
        longest = max(high if shape.decodes else 0, self.first + shape.chunk) + HEADROOM
        self.batch = InputBatch(
            max_num_reqs=shape.decodes + shape.prefills, max_model_len=longest, block_size=BLOCK_SIZE
        )
        options = {} if transport == "none" else {"transport": transport}
        self.builder = MetadataBuilder(
            self.batch, backend, max_num_batched_tokens=max(shape.decodes + shape.prefills * shape.chunk, 256),
            depth=depth, **options,
        )  # fmt: skip
        if self.builder.transport != transport:
            raise SystemExit(f"transport: {self.builder.transport}, not {transport}: {self.builder.why_transport}")
        self.next_block = 1
        rng = np.random.default_rng(20261121)
        for i in range(shape.decodes):
            context = int(rng.integers(low // 16, high // 16)) * 16 + i % 16
            self.batch.add_request(i, self.blocks(context // BLOCK_SIZE + 1), context)
        self.scheduled = {("prompt", i): shape.chunk for i in range(shape.prefills)}
        self.graph, self.model = graph, None
        if graph:
            self.capture()
            self.step = self.replayed
        else:
            self.step = self.eager
        self.prepare()
        self.step()  # all blocks go out once
        synchronize()

    def capture(self):
        metadata = self.builder.capture(self.shape.decodes)
        self.seen = torch.zeros_like(metadata.seq_lens)

        def model():
            metadata.record()
            self.seen.copy_(metadata.seq_lens)

        self.seen.copy_(metadata.seq_lens)
        synchronize()
        self.model = captured(model, self.device)

    def blocks(self, count):
        self.next_block += count
        return np.arange(self.next_block - count, self.next_block, dtype=np.int32)

    def prepare(self):
        for req_id in self.batch.needs_block():
            if self.batch.num_computed_tokens(req_id) % BLOCK_SIZE == 0:
                self.batch.append_blocks(req_id, self.blocks(1))
        for req_id in self.scheduled:
            if req_id in self.batch:
                self.batch.remove_request(req_id)
            self.batch.add_request(req_id, self.blocks((self.first + self.shape.chunk) // BLOCK_SIZE), self.first)

    def eager(self):
        self.metadata = self.builder.build(self.scheduled)

    def replayed(self):
        self.metadata = metadata = self.builder.build(bucket=self.shape.decodes)
        metadata.replay(self.model)


class Flush:
    """Call it: the caches hold nothing that was there."""

    def __init__(self, nbytes=320 << 20):
        self.memory = np.zeros(nbytes // 8, np.int64)

    def __call__(self):
        self.memory += 1


class Stopwatch:
    """In place of ``owner.name``: notes how long each call took, nanoseconds."""

    def __init__(self, owner, name):
        self.function, self.taken = getattr(owner, name), []
        setattr(owner, name, self)

    def __call__(self, *args, **kwargs):
        start = perf_counter_ns()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.taken.append(perf_counter_ns() - start)


def us(nanoseconds):
    return round(statistics.median(nanoseconds) / 1000, 3) if nanoseconds else None


def p99(nanoseconds):
    return round(float(np.percentile(nanoseconds, 99)) / 1000, 3)


def step_times(work, count, before=None):
    """Host nanoseconds of so many steps, the device idle before each: nothing waits for a receipt."""
    taken = []
    for _ in range(count):
        work.prepare()
        synchronize()
        if before is not None:
            before()
        start = perf_counter_ns()
        work.step()
        taken.append(perf_counter_ns() - start)
    synchronize()
    return taken


def calls(function, count=2000):
    """Median host microseconds of one call, among runs of ten."""
    taken = []
    for _ in range(count // 10):
        start = perf_counter_ns()
        for _ in range(10):
            function()
        taken.append((perf_counter_ns() - start) / 10)
    return us(taken)
