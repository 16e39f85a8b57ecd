"""The scheduler, step by step: who runs, how many tokens, in which blocks."""

import random

import pytest

from attncore.builder import KVCacheGroup
from attncore.replay.scheduling.draft_model import Draft, DraftModel, Speculation
from attncore.replay.scheduling.kv_cache_manager import CacheBlocks, prefix_keys
from attncore.replay.scheduling.scheduler import Scheduler
from attncore.replay.traces.trace import Request

ONE_GROUP = (KVCacheGroup("decoder", 4),)


def scheduler(
    requests, *, num_blocks=100, groups=ONE_GROUP, max_num_seqs=8, max_num_batched_tokens=8, draft_model=None
):
    return Scheduler(
        requests,
        CacheBlocks(groups, num_blocks),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        draft_model=draft_model,
    )


def steps(schedule, now=0.0):
    """Runs to the end, all arrivals at once: per step (decoding rows, (row, tokens) of prompts, rows finished)."""
    told = []
    while schedule.unfinished:
        step = schedule.schedule(now)
        schedule.complete(step)
        told.append(
            (
                [running.row for running in step.decodes],
                [(running.row, count) for running, count in step.prefills],
                [running.row for running in step.finished],
            )
        )
    return told


def test_a_long_prompt_runs_in_chunks_and_its_last_chunk_gives_the_first_token():
    assert steps(scheduler([Request(1, 0, 19, 3)])) == [
        ([], [(1, 8)], []),
        ([], [(1, 8)], []),
        ([], [(1, 3)], []),
        ([1], [], []),
        ([1], [], [1]),
    ]


def test_one_output_token_needs_no_decode():
    assert steps(scheduler([Request(1, 0, 3, 1)])) == [([], [(1, 3)], [1])]


def test_decodes_go_first_and_prompts_share_what_is_left_in_order_of_arrival():
    requests = [Request(1, 0, 2, 4), Request(2, 0, 9, 1), Request(3, 0, 7, 1)]
    assert steps(scheduler(requests)) == [
        ([], [(1, 2), (2, 6)], []),
        ([1], [(2, 3), (3, 4)], [2]),
        ([1], [(3, 3)], [3]),
        ([1], [], [1]),
    ]


def test_no_more_than_max_num_seqs_run():
    told = steps(scheduler([Request(row, 0, 2, 2) for row in (1, 2, 3)], max_num_seqs=2))
    assert told == [
        ([], [(1, 2), (2, 2)], []),
        ([1, 2], [], [1, 2]),
        ([], [(3, 2)], []),
        ([3], [], [3]),
    ]


def test_requests_wait_for_their_arrival():
    schedule = scheduler([Request(1, 0.0, 2, 1), Request(2, 1.5, 2, 1)])
    schedule.complete(schedule.schedule(0.0))
    assert schedule.schedule(1.4) is None
    assert schedule.next_arrival == 1.5
    assert [running.row for running, _ in schedule.schedule(1.5).prefills] == [2]
    assert schedule.next_arrival is None


def test_a_decode_gets_a_block_when_its_token_begins_one():
    schedule = scheduler([Request(1, 0, 3, 4)])
    appended, tables = [], []
    while schedule.unfinished:
        step = schedule.schedule(0)
        appended.append(dict(step.appended))
        tables.append(list(schedule.running[0].blocks))
        schedule.complete(step)
    assert appended == [{}, {}, {1: [[2]]}, {}]  # tokens 0-2, 3, 4, 5
    assert tables == [[1], [1], [1, 2], [1, 2]]


def test_the_youngest_is_preempted_and_computes_prompt_and_generated_tokens_again():
    # Three blocks of 4: each prompt takes one; row 1 takes the third, then row 2's.
    schedule = scheduler([Request(1, 0, 4, 9), Request(2, 0, 3, 5)], num_blocks=4)
    told, preempted = [], []
    while schedule.unfinished:
        step = schedule.schedule(0)
        preempted.append([(running.row, running.goal) for running in step.preempted])
        told.append(([r.row for r in step.decodes], [(r.row, n) for r, n in step.prefills]))
        schedule.complete(step)
    assert told == [
        ([], [(1, 4), (2, 3)]),
        ([1, 2], []),  # row 1 takes the third block
        ([1], []),  # row 2's fifth token needs a block
        ([1], []),
        ([1], []),
        ([1], []),
        ([1], []),
        ([1], []),
        ([1], []),
        ([], [(2, 5)]),  # 3 of the prompt, 2 generated
        ([2], []),
        ([2], []),
    ]
    assert preempted == [[], [], [(2, 5)]] + [[]] * 9
    assert schedule.preemptions == 1
    assert schedule.cache.pools[0].num_free == 3


def test_a_preempted_request_comes_before_those_that_never_ran():
    requests = [Request(1, 0, 4, 9), Request(2, 0, 3, 5), Request(3, 0, 3, 1)]
    schedule = scheduler(requests, num_blocks=4, max_num_seqs=2)
    order = []
    while schedule.unfinished:
        step = schedule.schedule(0)
        order += [running.row for running in step.admitted]
        schedule.complete(step)
    assert order == [1, 2, 2, 3]


def test_equal_prompts_share_their_full_blocks():
    ids = (7,)
    schedule = scheduler([Request(1, 0.0, 10, 1, ids), Request(2, 1.0, 10, 1, ids)], max_num_batched_tokens=64)
    first = schedule.schedule(0.0)
    blocks = list(first.prefills[0][0].blocks)
    schedule.complete(first)
    second = schedule.schedule(1.0)
    running, count = second.prefills[0]
    assert running.blocks[:2] == blocks[:2]
    assert (running.computed, count) == (8, 2)
    assert schedule.prefix_hit_tokens == 8


def test_a_prompt_found_whole_still_computes_its_last_block():
    schedule = scheduler([Request(1, 0.0, 8, 1, (7,)), Request(2, 1.0, 8, 1, (7,))])
    schedule.complete(schedule.schedule(0.0))
    step = schedule.schedule(1.0)
    assert [(running.computed, count) for running, count in step.prefills] == [(4, 4)]


def test_a_prompt_that_waits_for_blocks_is_admitted_when_others_have_computed_its_beginning():
    # Six blocks: row 1 takes four; row 2 needs four, then, three being found, one.
    requests = [Request(1, 0, 16, 3, (7,)), Request(2, 0, 16, 1, (7,))]
    schedule = scheduler(requests, num_blocks=7, max_num_batched_tokens=64)
    first = schedule.schedule(0)
    assert [running.row for running in first.admitted] == [1]
    schedule.complete(first)
    assert [(running.row, running.computed) for running in schedule.schedule(0).admitted] == [(2, 12)]


@pytest.mark.parametrize(("prompt", "together"), [(197 * 4, True), (198 * 4, False)])
def test_admission_leaves_one_block_in_a_hundred_free(prompt, together):
    requests = [Request(1, 0, 4, 2), Request(2, 0, prompt, 1)]
    schedule = scheduler(requests, num_blocks=201, max_num_batched_tokens=1000)
    assert len(schedule.schedule(0).admitted) == (2 if together else 1)


def test_nothing_is_shared_where_the_trace_says_nothing():
    schedule = scheduler([Request(1, 0.0, 8, 1), Request(2, 1.0, 8, 1)])
    schedule.complete(schedule.schedule(0.0))
    assert schedule.schedule(1.0).prefills[0][0].computed == 0


def test_a_preempted_prompt_finds_its_own_blocks_again():
    # Four blocks: row 1's ninth token takes one of row 2's, the one without a whole prompt block in it.
    schedule = scheduler([Request(1, 0, 4, 9), Request(2, 0, 5, 5, (3,))], num_blocks=5)
    computed = []
    while schedule.unfinished:
        step = schedule.schedule(0)
        computed += [(running.row, running.computed) for running in step.admitted]
        schedule.complete(step)
    assert schedule.preemptions == 1
    assert computed == [(1, 0), (2, 0), (2, 4)]


def test_keys_name_every_id_that_a_block_touches():
    request = Request(1, 0, 1100, 1, (5, 6, 9))
    assert len(prefix_keys(request, 16)) == 68
    assert prefix_keys(request, 16)[31:33] == [(31, 5), (32, 6)]
    assert prefix_keys(request, 300) == [(0, 5), (1, 5, 6), (2, 6)]
    assert prefix_keys(request, 1024) == [(0, 5, 6)]
    assert prefix_keys(Request(1, 0, 1100, 1), 16) == []


def test_a_request_that_can_never_run_is_named():
    requests = [Request(1, 0, 4, 1), Request(2, 0, 10, 4)]
    with pytest.raises(
        ValueError, match=r"^num_blocks: row 2 .* 10 \+ 4 tokens .* 4 blocks of 4; --num-blocks 4 has 3"
    ):
        scheduler(requests, num_blocks=4)
    scheduler(requests, num_blocks=5)
    # The last token generated is never written: 13 tokens are 4 blocks, 12 are 3.
    scheduler([Request(2, 0, 10, 3)], num_blocks=4)


def test_a_budget_below_the_decodes_is_refused():
    with pytest.raises(ValueError, match=r"^max_num_batched_tokens: 7 is less than max_num_seqs 8"):
        scheduler([], max_num_batched_tokens=7)


@pytest.mark.parametrize("seed", range(8))
def test_any_workload_finishes_with_every_token_computed_once_written_and_no_block_lost(seed):
    draw = random.Random(seed)
    requests, now = [], 0.0
    for row in range(1, 60):
        prompt = draw.randint(1, 60)
        ids = (draw.randint(0, 3),) if draw.random() < 0.5 else None
        requests.append(Request(row, now, prompt, draw.randint(1, 30), ids))
        now += draw.choice([0, 0.01, 0.1])
    num_blocks = draw.choice([24, 40, 200])
    schedule = scheduler(requests, num_blocks=num_blocks, max_num_seqs=6, max_num_batched_tokens=draw.choice([6, 20]))
    finished, now = [], 0.0
    while schedule.unfinished:
        step = schedule.schedule(now)
        if step is None:
            now = schedule.next_arrival
            continue
        assert 1 <= step.tokens <= schedule.max_num_batched_tokens
        assert {*step.decodes, *(running for running, _ in step.prefills)} == set(schedule.running)
        assert len(schedule.running) <= 6
        held = {}
        for running in schedule.running:
            assert 0 not in running.blocks
            for index, block in enumerate(running.blocks):
                assert held.setdefault(block, index) == index  # shared blocks stand at one place in all tables
        for running, count in [(running, 1) for running in step.decodes] + step.prefills:
            assert running.computed + count <= 4 * len(running.blocks)
            # What is written lies in blocks that nobody else holds.
            for index in range(running.computed // 4, (running.computed + count - 1) // 4 + 1):
                others = [other for other in schedule.running if other is not running]
                assert all(running.blocks[index] not in other.blocks for other in others)
        schedule.complete(step)
        finished += step.finished
        now += 0.02
    assert sorted(running.row for running in finished) == list(range(1, 60))
    assert all(running.computed == running.request.prompt_tokens + running.request.output_tokens - 1
               for running in finished)  # fmt: skip
    assert schedule.cache.pools[0].num_free == num_blocks - 1
    if num_blocks == 24:
        assert schedule.preemptions


class Scripted:
    """A draft model whose every draw is said: drafts accepted, of as many as may run."""

    def __init__(self, num_drafts, *accepted):
        self.speculation, self.accepted, self.most = Speculation(num_drafts), list(accepted), []

    def draw(self, most):
        self.most.append(most)
        drafted = min(self.speculation.num_drafts, most)
        return Draft(drafted, min(self.accepted.pop(0), drafted))


def test_drafts_that_are_accepted_save_steps_and_the_last_ones_are_fewer():
    # Tokens 3 .. 9 are to be decoded: 1 and 2 accepted, 1, 1 and 1 of two, and the last one, which has no draft.
    model = Scripted(3, 2, 0, 1, 0)
    schedule = scheduler([Request(1, 0, 3, 8)], max_num_batched_tokens=32, draft_model=model)
    told = []
    while schedule.unfinished:
        step = schedule.schedule(0)
        told.append((step.decode_tokens, step.draft(schedule.running[0]), schedule.running[0].computed))
        assert schedule.running[0].room >= schedule.running[0].computed + step.tokens
        schedule.complete(step)
    assert told == [(0, (0, 0), 0), (4, (3, 2), 3), (4, (3, 0), 6), (3, (2, 1), 7), (1, (0, 0), 9)]
    assert model.most == [6, 3, 2, 0]


def test_drafts_are_drawn_as_often_accepted_as_asked():
    model = DraftModel(Speculation(4, 0.5), seed=1)
    draws = [model.draw(9) for _ in range(4000)]
    assert {draft.drafted for draft in draws} == {4}
    share = [sum(draft.accepted >= count for draft in draws) / len(draws) for count in (1, 2, 3, 4)]
    assert share == pytest.approx([0.5, 0.25, 0.125, 0.0625], abs=0.03)
    assert {DraftModel(Speculation(3, 1.0), 0).draw(most) for most in (0, 2, 5)} == {(0, 0), (2, 2), (3, 3)}
    assert DraftModel(Speculation(3, 0.0), 0).draw(9) == (3, 0)


def test_a_budget_below_the_drafts_is_refused():
    with pytest.raises(ValueError, match=r"^max_num_batched_tokens: 31 is less than max_num_seqs 8 times 4"):
        scheduler([], max_num_batched_tokens=31, draft_model=Scripted(3))
