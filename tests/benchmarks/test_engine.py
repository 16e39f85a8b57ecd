"""What an engine needs beside plain decodes: several KV-cache groups, captured sizes, batches put in order."""

import statistics
import time

import baselines
import builders
import numpy as np
import pytest
import shapes

from attncore.builder import reorder_batch

ROUNDS, ITERATIONS = 1500, 8  # within the blocks' headroom
BLOCK_SIZES = {
    "one group": (16,),
    "eight groups": shapes.SAME_SIZES,
    "eight groups, other sizes": shapes.OTHER_SIZES,
    "eight groups, odd sizes": shapes.ODD_SIZES,
}


def named(benchmark, group, way):
    benchmark.group, benchmark.extra_info["way"] = group, way


def added(benchmark, longer, shorter, rounds, iterations):
    """Times ``longer``; into extra_info, microseconds, the median of what it takes beyond ``shorter``, turn by turn.

    The machine's speed changes from one second to the next, and the difference is small.
    """
    differences = []

    def timed(call):
        start = time.perf_counter_ns()
        for _ in range(iterations):
            call()
        return (time.perf_counter_ns() - start) / iterations / 1000

    def turn():
        before = timed(shorter)
        differences.append(timed(longer) - before)

    benchmark.pedantic(turn, rounds=rounds, warmup_rounds=2)
    benchmark.extra_info["added_us"] = round(statistics.median(differences), 3)


@pytest.mark.parametrize("what", BLOCK_SIZES)
class TestGroups:
    def test_persistent(self, benchmark, what):
        builder = builders.in_groups(shapes.decodes(256), BLOCK_SIZES[what])
        named(benchmark, f"decode 256 in {what}", "persistent")
        benchmark.pedantic(builder.build, rounds=ROUNDS, iterations=ITERATIONS, warmup_rounds=5)

    @pytest.mark.parametrize("way", ["numpy", "numpy, sharing"])
    def test_vectorised(self, benchmark, what, way):
        rows, sizes = shapes.decodes(256), BLOCK_SIZES[what]
        numpy = baselines.VectorisedGroups(rows, shapes.in_groups(rows, sizes), sizes)
        named(benchmark, f"decode 256 in {what}", way)
        benchmark.pedantic(numpy.step if way == "numpy" else numpy.step_sharing, rounds=500, warmup_rounds=5)


@pytest.mark.parametrize(("size", "num_reqs"), [(1, 1), (64, 64), (64, 32), (256, 256), (256, 128)])
def test_graph_preparation(benchmark, size, num_reqs):
    """A padded build, and what it takes beyond a plain one."""
    padded, plain = builders.in_a_bucket(shapes.decodes(num_reqs), size)
    named(benchmark, f"graph of {size} with {num_reqs}", "persistent")
    added(benchmark, lambda: padded.build(bucket=size), plain.build, ROUNDS, ITERATIONS)


@pytest.mark.parametrize("layout", ["common", "flash", "flashinfer", "rocm"])
def test_graph_preparation_of_lists(benchmark, layout):
    named(benchmark, f"graph of 256 lists {layout}", f"lists {layout}")
    added(benchmark, *builders.captured_lists(shapes.decodes(256, headroom=0), layout), 200, 1)


def test_reorder_batch(benchmark):
    query_lens, context_lens = (np.array(lens, np.int32) for lens in shapes.mixed_queries(256))
    named(benchmark, "reorder 256 three ways", "attncore")
    benchmark.pedantic(
        lambda: reorder_batch(query_lens, context_lens, 1, 64), rounds=500, iterations=4, warmup_rounds=5
    )
