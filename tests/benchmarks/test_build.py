"""Both builders, on both kernels, beside the plain-Python way, the vectorised NumPy way and a copy of what is written.

A way that runs on numba has the name of that on Cython with ", numba" behind it.
"""

import subprocess
import sys
import threading
import time

import baselines
import builders
import numba
import numpy as np
import pytest
import shapes
from shapes import BLOCK_SIZE

ROUNDS, ITERATIONS = 2000, 8  # 16,000 decode steps: within the blocks' headroom
FIRST_BUILD = """
from attncore.builder import InputBatch, MetadataBuilder
batch = InputBatch(max_num_reqs=1, max_model_len=64, block_size=16, kernels="numba")
builder = MetadataBuilder(batch, max_num_batched_tokens=64)
batch.add_request(0, [1], 3)
builder.build()
"""
LAYOUTS = ("common", "flash", "flashinfer", "rocm")


def time_steps(benchmark, step, *arguments):
    """A call that runs one step further each time."""
    benchmark.pedantic(step, arguments, rounds=ROUNDS, iterations=ITERATIONS, warmup_rounds=5)


def named(benchmark, group, way, floor_bytes=None):
    benchmark.group = group
    benchmark.extra_info["way"] = way
    if floor_bytes:
        benchmark.extra_info["bytes"] = floor_bytes


def on(kernels, way):
    return f"{way}, numba" if kernels == "numba" else way


@pytest.mark.parametrize("n", shapes.DECODES)
class TestDecode:
    def test_persistent(self, benchmark, n, kernels):
        _, builder, scheduled = builders.persistent(shapes.decodes(n), kernels=kernels)
        named(benchmark, f"decode {n}", on(kernels, "persistent"))
        time_steps(benchmark, builder.build, scheduled)

    def test_vectorised(self, benchmark, n):
        way = baselines.Vectorised(shapes.decodes(n), BLOCK_SIZE, n)
        named(benchmark, f"decode {n}", "numpy")
        time_steps(benchmark, way.step)

    def test_tuned(self, benchmark, n):
        way = baselines.Tuned(shapes.decodes(n), BLOCK_SIZE, n)
        named(benchmark, f"decode {n}", "numpy, tuned")
        time_steps(benchmark, way.step)

    def test_copy(self, benchmark, n):
        _, builder, scheduled = builders.persistent(shapes.decodes(n))
        size = builders.bytes_written(builder.build(scheduled))
        named(benchmark, f"decode {n}", "copy", size)
        time_steps(benchmark, baselines.copy_of(size))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_lists(self, benchmark, n, layout, kernels):
        build = builders.list_builder(shapes.decodes(n, headroom=0), layout, kernels)
        named(benchmark, f"decode {n} lists", on(kernels, f"lists {layout}"))
        benchmark.pedantic(build, rounds=100, warmup_rounds=5)

    def test_lists_plain_python(self, benchmark, n):
        rows = shapes.decodes(n, headroom=0)
        named(benchmark, f"decode {n} lists", "plain python")
        benchmark.pedantic(baselines.plain_python, (rows, BLOCK_SIZE), rounds=40, warmup_rounds=2)

    def test_page_indices(self, benchmark, n):
        _, builder, scheduled = builders.persistent(shapes.decodes(n))
        host = builder.build(scheduled).host
        named(benchmark, f"decode {n} page indices", "persistent")
        benchmark.pedantic(lambda: host.paged_kv_indices, rounds=100, warmup_rounds=5)


class TestLongDecode:
    """256 requests of 128k tokens: the persistent builder does not see the length."""

    def test_persistent(self, benchmark):
        _, builder, scheduled = builders.persistent(shapes.long_decodes(256))
        named(benchmark, "decode 256 x 128k", "persistent")
        time_steps(benchmark, builder.build, scheduled)

    def test_vectorised(self, benchmark):
        way = baselines.Vectorised(shapes.long_decodes(256), BLOCK_SIZE, 256)
        named(benchmark, "decode 256 x 128k", "numpy")
        time_steps(benchmark, way.step)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_lists(self, benchmark, layout):
        build = builders.list_builder(shapes.long_decodes(256, 0), layout)
        named(benchmark, "decode 256 x 128k lists", f"lists {layout}")
        benchmark.pedantic(build, rounds=10, warmup_rounds=1)

    def test_lists_plain_python(self, benchmark):
        rows = shapes.long_decodes(256, 0)
        named(benchmark, "decode 256 x 128k lists", "plain python")
        benchmark.pedantic(baselines.plain_python, (rows, BLOCK_SIZE), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("what", ["numba alone", "first build"])
def test_start(benchmark, what):
    """A process that imports numba to compile a function that does nothing, and one that builds a step; warm cache."""
    program = {"numba alone": "import numba; numba.njit('int64(int64)')(lambda x: x)", "first build": FIRST_BUILD}[what]
    command = [sys.executable, "-c", program]
    named(benchmark, "start on numba", what)
    benchmark.pedantic(subprocess.run, (command,), {"check": True}, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("arguments", ["one int", "one array", "twelve arrays"])
def test_numba_floor(benchmark, arguments):
    """A compiled function that does nothing: what numba takes to read arguments."""
    array = np.zeros(256, np.int32)
    given = {"one int": (1,), "one array": (array,), "twelve arrays": (array,) * 12}[arguments]

    @numba.njit
    def nothing(*given):
        return 0

    nothing(*given)
    named(benchmark, "numba reads arguments", arguments)
    benchmark.pedantic(nothing, given, rounds=ROUNDS, iterations=ITERATIONS, warmup_rounds=5)


SHAPES = {f"prefill {n}x{tokens}": shapes.prefills(n, tokens) for n, tokens in shapes.PREFILLS}
SHAPES["mixed 128 + 2048"] = shapes.mixed()


@pytest.mark.parametrize("shape", SHAPES)
class TestPrefillAndMixed:
    def test_persistent(self, benchmark, shape, kernels):
        rows = SHAPES[shape]
        batch, builder, scheduled = builders.persistent(rows, kernels=kernels)

        def again():
            for i, row in enumerate(rows):
                batch.rollback(i, batch.num_computed_tokens(i) - row.computed)

        named(benchmark, shape, on(kernels, "persistent"))
        benchmark.pedantic(builder.build, (scheduled,), setup=again, rounds=2000, warmup_rounds=20)

    def test_vectorised(self, benchmark, shape):
        rows = SHAPES[shape]
        way = baselines.Vectorised(rows, BLOCK_SIZE, sum(row.query_len for row in rows))
        start = way.computed.copy()
        named(benchmark, shape, "numpy")
        benchmark.pedantic(way.step, setup=lambda: np.copyto(way.computed, start), rounds=300, warmup_rounds=5)

    def test_copy(self, benchmark, shape):
        _, builder, scheduled = builders.persistent(SHAPES[shape])
        size = builders.bytes_written(builder.build(scheduled))
        named(benchmark, shape, "copy", size)
        benchmark.pedantic(baselines.copy_of(size), rounds=2000, warmup_rounds=20)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_lists(self, benchmark, shape, layout, kernels):
        build = builders.list_builder(SHAPES[shape], layout, kernels)
        named(benchmark, f"{shape} lists", on(kernels, f"lists {layout}"))
        benchmark.pedantic(build, rounds=100, warmup_rounds=5)

    def test_lists_plain_python(self, benchmark, shape):
        named(benchmark, f"{shape} lists", "plain python")
        benchmark.pedantic(baselines.plain_python, (SHAPES[shape], BLOCK_SIZE), rounds=20, warmup_rounds=1)


@pytest.mark.parametrize("n", shapes.DECODES)
def test_cold(benchmark, n):
    """64 MB are touched between steps, as a model's own work on the host would."""
    _, builder, scheduled = builders.persistent(shapes.decodes(n))
    other = np.zeros(64 << 20, np.uint8)

    def touch():
        other[::64] += 1

    named(benchmark, f"decode {n} cold", "persistent")
    benchmark.pedantic(builder.build, (scheduled,), setup=touch, rounds=60, warmup_rounds=2)


def test_busy_thread(benchmark):
    """Another Python thread never rests: percentiles of single builds, microseconds, in extra_info."""
    _, builder, scheduled = builders.persistent(shapes.decodes(256, headroom=20_000))
    stop = threading.Event()

    def spin():
        count = 0
        while not stop.is_set():
            count += 1

    samples = []

    def step():
        start = time.perf_counter_ns()
        builder.build(scheduled)
        samples.append(time.perf_counter_ns() - start)

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        named(benchmark, "decode 256 beside a busy thread", "persistent")
        benchmark.pedantic(step, rounds=10_000, warmup_rounds=5)
    finally:
        stop.set()
        thread.join()
    for name, percent in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)):
        benchmark.extra_info[f"{name}_us"] = round(float(np.percentile(samples, percent)) / 1000, 2)
