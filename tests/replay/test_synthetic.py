"""The synthetic workload: seeded, and as it is described."""

import itertools
import statistics

from attncore.replay.traces import synthetic
from attncore.replay.traces.synthetic import synthetic_trace
from attncore.replay.traces.trace import HASH_BLOCK


def test_the_seed_settles_it():
    assert synthetic_trace(50, 3) == synthetic_trace(50, 3)
    assert synthetic_trace(50, 3) != synthetic_trace(50, 4)


def test_it_is_as_described():
    requests = synthetic_trace(4000, 0).requests
    outputs = [request.output_tokens for request in requests]
    alone = [request.prompt_tokens for request in requests if request.hash_ids[0] >= synthetic.SYSTEM_PROMPTS]
    assert abs(statistics.median(outputs) / synthetic.OUTPUT_MEDIAN - 1) < 0.05
    assert max(outputs) <= synthetic.OUTPUT_MAX
    assert abs(statistics.median(alone) / synthetic.PROMPT_MEDIAN - 1) < 0.1
    assert abs(len(alone) / 4000 - 0.5) < 0.03
    assert abs(requests[-1].arrival / 4000 * synthetic.ARRIVALS_PER_SECOND - 1) < 0.05


def test_rows_are_in_order_and_ids_fit_the_prompts():
    requests = synthetic_trace(300, 1).requests
    assert requests[0].arrival == 0
    assert [request.row for request in requests] == list(range(1, 301))
    assert all(a.arrival <= b.arrival for a, b in itertools.pairwise(requests))
    assert all(len(request.hash_ids) == -(-request.prompt_tokens // HASH_BLOCK) for request in requests)


def test_only_system_prompts_are_shared():
    requests = synthetic_trace(300, 1).requests
    ids = [identity for request in requests for identity in request.hash_ids]
    shared = {identity for identity in ids if ids.count(identity) > 1}
    assert shared == set(range(synthetic.SYSTEM_PROMPTS))
