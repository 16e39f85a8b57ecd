"""What a step costs beyond its arrays: the host's part of sending it (commit), and its backend's plan.

On the CPU, where the copy is a copy within memory; ``make bench-gpu`` has a device.
"""

import statistics
import time

import builders
import numpy as np
import pytest
import shapes
import torch
from test_engine import named

from attncore.abstract import BackendConfig
from attncore.builder import InputBatch, MetadataBuilder
from attncore.reference import ReferenceBackend

ROUNDS, ITERATIONS = 1000, 4  # within the blocks' headroom
DECODES = (1, 32, 256, 1024)


class Planless(ReferenceBackend):
    """Called for a plan, and does nothing: what the call costs."""

    def plan(self, metadata):
        pass


class Chunking(ReferenceBackend):
    """Plans as libraries do: shares out the keys of a step, 32 pages to a worker."""

    def plan(self, metadata):
        indptr = metadata.host.paged_kv_indptr
        chunks = -(-np.diff(indptr) // 32)
        self.request_of_chunk = np.repeat(np.arange(len(chunks), dtype=np.int32), chunks)
        self.chunk_indptr = np.concatenate(([0], np.cumsum(chunks, dtype=np.int32)))


@pytest.fixture(autouse=True)
def one_thread():
    """A second thread of torch's would wait for a core that other work has: a copy then takes milliseconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def builder_of(rows, backend=None, transport="auto"):
    if backend is not None:
        backend = backend(BackendConfig(32, 8, 128, "bfloat16", shapes.BLOCK_SIZE))
    longest = max(len(row.blocks) for row in rows) * shapes.BLOCK_SIZE
    batch = InputBatch(max_num_reqs=len(rows), max_model_len=longest, block_size=shapes.BLOCK_SIZE)
    for i, row in enumerate(rows):
        batch.add_request(i, row.blocks, row.computed)
    return MetadataBuilder(batch, backend, max_num_batched_tokens=8192, transport=transport)


def timed(call):
    """Microseconds a call."""
    start = time.perf_counter_ns()
    for _ in range(ITERATIONS):
        call()
    return (time.perf_counter_ns() - start) / ITERATIONS / 1000


@pytest.mark.parametrize("n", DECODES)
class TestDecode:
    """``added_us`` of extra_info is what a step takes beyond a plain builder's, the two timed turn by turn."""

    def against_plain(self, benchmark, n, way, **options):
        rows = shapes.decodes(n)
        builder, plain = builder_of(rows, **options), builder_of(rows)
        named(benchmark, f"decode {n}, {way}", "persistent")
        benchmark.pedantic(builder.build, rounds=ROUNDS, iterations=ITERATIONS, warmup_rounds=5)
        differences = [timed(builder.build) - timed(plain.build) for _ in range(1 if benchmark.disabled else ROUNDS)]
        benchmark.extra_info["added_us"] = round(statistics.median(differences), 3)

    def test_commit(self, benchmark, n):
        self.against_plain(benchmark, n, "commit", transport="copy")

    def test_plan_call(self, benchmark, n):
        self.against_plain(benchmark, n, "call of a plan", backend=Planless)

    def test_plan(self, benchmark, n):
        self.against_plain(benchmark, n, "plan", backend=Chunking)

    def test_commit_and_plan(self, benchmark, n):
        self.against_plain(benchmark, n, "commit and plan", backend=Chunking, transport="copy")


def test_commit_of_a_mixed_batch(benchmark):
    rows = shapes.mixed()
    builder = builder_of(rows, transport="copy")
    scheduled = builders.persistent(rows)[2]

    def again():
        builder.batch.rollback_many(
            {i: builder.batch.num_computed_tokens(i) - row.computed for i, row in enumerate(rows)}
        )

    named(benchmark, "mixed 128 + 2048, commit", "persistent")
    benchmark.pedantic(builder.build, (scheduled,), setup=again, rounds=500, warmup_rounds=10)
