"""Groups of states: one slot a request, which follows its request through rows, padding, devices and interruptions."""

import random

import numpy as np
import pytest

from attncore.builder import (
    BatchSlice,
    ContextParallel,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    StateGroup,
    slice_metadata,
)

GROUPS = (KVCacheGroup("full", 4), StateGroup("mamba", 9), StateGroup("delta"))


def new_batch(kernels=None, groups=GROUPS, **given):
    return InputBatch(**{"max_num_reqs": 8, "max_model_len": 64, "groups": groups, "kernels": kernels} | given)


def add(batch, name, slots, computed=0, first=None):
    first = 16 * slots[0] if first is None else first
    blocks = {"full": list(range(first, first + 16))}
    batch.add_request(name, blocks | dict(zip(("mamba", "delta"), ([slot] for slot in slots), strict=True)), computed)


def of_step(metadata, group="mamba"):
    """What the layers of a group of states see: slots, initial states and starts, on the host."""
    states = metadata.states[group]
    for field in ("state_slot", "has_initial_state", "query_start_loc"):
        there, host = getattr(states, field), getattr(states.host, field)
        assert there.tolist() == host.tolist(), field
    return states.state_slot.tolist(), states.has_initial_state.tolist(), states.query_start_loc.tolist()


def test_a_step_has_the_slot_of_each_row(kernels):
    batch = new_batch(kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    add(batch, "prompt", (3, 30))
    add(batch, "chat", (7, 1), computed=5)
    metadata = builder.build({"prompt": 6})
    assert metadata.req_ids == ("chat", "prompt")
    assert of_step(metadata) == ([7, 3], [True, False], [0, 1, 7])
    assert of_step(metadata, "delta")[0] == [1, 30]
    assert metadata.states["mamba"].state_slot.dtype == np.int32
    assert not metadata.states["mamba"].state_slot.flags.writeable
    assert of_step(builder.build({"prompt": 2}))[1] == [True, True]  # the second chunk continues the first
    assert batch.block_ids("chat") == {"full": list(range(112, 128)), "mamba": [7], "delta": [1]}
    assert batch.state_groups == GROUPS[1:]
    assert batch.groups == GROUPS[:1]
    assert [*metadata.groups] == ["full"]


def test_parts_of_a_step_have_the_slots_of_their_rows(kernels):
    batch = new_batch(kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    add(batch, "prompt", (3, 30))
    add(batch, "chat", (7, 1), computed=5)
    metadata = builder.build({"prompt": 6})
    assert of_step(metadata.decode_metadata) == ([7], [True], [0, 1])
    assert of_step(metadata.prefill_metadata, "delta") == ([30], [False], [0, 6])
    part = slice_metadata(metadata, BatchSlice(1, 2, 4, 7), block_size=4)  # the prompt's last three tokens
    assert of_step(part) == ([3], [True], [0, 3])
    assert of_step(slice_metadata(part, BatchSlice(0, 1, 0, 3))) == ([3], [True], [0, 3])
    plain = InputBatch(max_num_reqs=2, max_model_len=8, block_size=4)
    plain.add_request("a", [1])
    step = MetadataBuilder(plain, max_num_batched_tokens=8).build()
    assert not step.states
    assert not step.decode_metadata.states


def test_slots_follow_their_requests(kernels):
    """Random steps, arrivals, departures and preemptions, with rows that move: each row has its own request's slot."""
    rng, batch = random.Random(5), new_batch(kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, transport="copy")
    builder.capture(8)
    held, free, paused, computed, moved = {}, list(range(1, 9)), set(), {}, 0
    for number in range(300):
        if free and rng.random() < 0.4 and len(held) < 8:
            name = f"r{number}"
            held[name], computed[name] = free.pop(rng.randrange(len(free))), 0
            add(batch, name, (held[name], 100 + held[name]))
        if held and rng.random() < 0.2:
            name = rng.choice(sorted(held))
            answered = batch.remove_request(name)
            assert answered["mamba"] == ([] if name in paused else [held[name]])
            if name not in paused:
                free.append(held[name])
            paused.discard(name)
            del held[name], computed[name]
        running = sorted(held.keys() - paused)
        if running and rng.random() < 0.15:
            name = rng.choice(running)
            assert batch.preempt(name)["delta"] == [100 + held[name]]
            free.append(held[name])
            paused.add(name)
            computed[name] = 0
        elif paused and free and rng.random() < 0.5:
            name = rng.choice(sorted(paused))
            held[name] = free.pop(rng.randrange(len(free)))
            batch.append_blocks(name, {"full": list(range(16 * held[name], 16 * held[name] + 16))})
            batch.append_blocks(name, {"mamba": [held[name]]})
            assert name not in builder.build(dict.fromkeys(held, 0)).req_ids  # one group's slot is not enough
            batch.append_blocks(name, {"delta": [100 + held[name]]})
            paused.discard(name)
        counts = {name: rng.choice((0, 1, 1, 1, 5)) for name in held.keys() - paused}
        if rng.random() < 0.5:
            counts = {name: min(count, 1) for name, count in counts.items()}
        counts = {name: count if computed[name] + count <= 64 else 0 for name, count in counts.items()}
        bucket = 8 if max(counts.values(), default=0) < 2 and rng.random() < 0.7 else None
        metadata = builder.build(counts, bucket=bucket)
        moved += len(metadata.moves)
        slots, initial, _ = of_step(metadata)
        n = metadata.num_actual_reqs
        assert slots[:n] == [held[name] for name in metadata.req_ids]
        assert initial[:n] == [computed[name] > 0 for name in metadata.req_ids]
        assert of_step(metadata, "delta")[0][:n] == [100 + slot for slot in slots[:n]]
        assert (slots[n:], initial[n:]) == ([0] * (metadata.num_reqs - n), [False] * (metadata.num_reqs - n))
        for name, count in counts.items():
            computed[name] += count
    assert moved > 20


def test_a_refused_call_changes_nothing(kernels):
    batch = new_batch(kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    add(batch, "a", (3, 1), computed=6)
    full = list(range(64, 80))
    mistakes = [
        (lambda: add(batch, "b", (3, 2), first=64), "slot 3 is that of request 'a'"),
        (lambda: add(batch, "b", (4, 1), first=64), "slot 1 is that of request 'a'"),
        (lambda: add(batch, "b", (0, 2), first=64), "slot 0, the null slot"),
        (lambda: add(batch, "b", (9, 2), first=64), r"slot 9 is outside 1\.\.8"),
        (lambda: batch.add_request("b", {"full": full, "mamba": [4], "delta": []}), "no slot given"),
        (lambda: batch.add_request("b", {"full": full, "mamba": [4, 5], "delta": [2]}), "more than one slot given"),
        (lambda: batch.add_request("b", {"full": full, "mamba": [4]}), "has none for group 'delta'"),
        (lambda: batch.add_request("b", {"full": [-1], "mamba": [4], "delta": [2]}), "block_ids"),
        (lambda: batch.append_blocks("a", {"mamba": [4]}), "a slot given beside slot 3, which it holds"),
        (lambda: batch.rollback("a", 2), "num_tokens: 2 of request 'a', whose state in group 'mamba'"),
        (lambda: batch.truncate_blocks("a", 0, "mamba"), "'mamba' holds states"),
        (lambda: batch.needs_block("delta"), "'delta' holds states"),
        (lambda: batch.replace_block("a", 1, 4, "mamba"), "holds 1 slot"),
        (lambda: batch.replace_block("a", 0, 0, "mamba"), "null slot"),
    ]
    for call, text in mistakes:
        with pytest.raises(ValueError, match=text):
            call()
        assert (batch.req_ids, batch.num_computed_tokens("a")) == (("a",), 6)
        assert batch.block_ids("a") == {"full": list(range(48, 64)), "mamba": [3], "delta": [1]}
    with pytest.raises(TypeError, match="not an integer"):
        batch.add_request("b", {"full": full, "mamba": ["x"], "delta": [2]})
    add(batch, "b", (4, 2))  # the slots that the refused calls named are free
    assert of_step(builder.build())[0] == [3, 4]


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_a_request_that_rests_is_not_run_by_its_name(kernels, transport):
    """It would run over the null slot, and from then on in steps that do not name it."""
    batch = new_batch(kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, transport=transport)
    builder.capture(4)
    add(batch, "a", (1, 4))
    add(batch, "b", (2, 5))
    batch.preempt("a")
    batch.append_blocks("a", {"full": [1, 2], "delta": [4]})
    for run in (
        lambda: builder.build({"a": 2}),
        lambda: builder.build({"a": 1}, bucket=4),
        lambda: builder.run_ahead(2, bucket=4, scheduled={"a": 1}),
    ):
        if transport == "auto" and run.__code__.co_names == ("run_ahead",):
            continue  # it takes a transport
        with pytest.raises(ValueError, match=r"^scheduled: row 0 \(request 'a'\) .* it has no slot in group 'mamba'"):
            run()
        assert builder.last_step == 0
        assert batch.num_computed_tokens("a") == 0
    assert builder.build({"a": 0}).req_ids == ("b",)
    assert builder.build().req_ids == ("b",)
    batch.append_blocks("a", {"mamba": [3]})
    metadata = builder.build({"a": 2})
    assert dict(zip(metadata.req_ids, of_step(metadata)[0], strict=True)) == {"a": 3, "b": 2}


def test_several_requests_are_given_blocks_together_or_not_at_all(kernels):
    batch = new_batch(kernels)
    for name, slot in (("a", 1), ("b", 2)):
        add(batch, name, (slot, slot))
        batch.preempt(name)
    given = {"a": {"full": [16], "mamba": [5], "delta": [5]}, "b": {"full": [17], "mamba": [5], "delta": [6]}}
    with pytest.raises(ValueError, match="slot 5 is that of request 'a'"):
        batch.append_blocks_many(given)
    assert batch.block_ids("a") == batch.block_ids("b") == {"full": [], "mamba": [], "delta": []}
    assert MetadataBuilder(batch, max_num_batched_tokens=8).build().num_reqs == 0


def test_a_state_moves_to_another_slot(kernels):
    batch = new_batch(kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    add(batch, "a", (3, 1), computed=6)
    assert batch.replace_block("a", 0, 8, "mamba") == 3
    assert of_step(builder.build())[0] == [8]


def test_a_request_that_takes_back_all_tokens_begins_again(kernels):
    batch = new_batch(kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    add(batch, "a", (3, 1))
    builder.build({"a": 4})
    batch.rollback("a", 4)
    assert of_step(builder.build({"a": 4})) == ([3], [False], [0, 4])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"decode_threshold": 2}, "decode_threshold: 2 given for drafts, but group 'mamba' holds states"),
        ({"context_parallel": ContextParallel(2, 0, block_size=2)}, "context_parallel: group 'mamba' holds states"),
    ],
)
def test_a_builder_refuses_what_states_cannot_follow(given, text):
    with pytest.raises(ValueError, match=text):
        MetadataBuilder(new_batch(), max_num_batched_tokens=64, **given)


@pytest.mark.parametrize(
    ("groups", "error", "text"),
    [
        ([StateGroup("mamba")], ValueError, "none holds the decoder's own keys; for a model without attention"),
        ([KVCacheGroup("x", 4), StateGroup("x")], ValueError, r"groups\[1\].name: 'x' stands twice"),
        ([KVCacheGroup("x", 4), StateGroup("")], TypeError, r"groups\[1\].name"),
        ([KVCacheGroup("x", 4), StateGroup("y", 1)], ValueError, r"groups\[1\].num_slots: 1 is below 2"),
        ([KVCacheGroup("x", 4), *(StateGroup(f"s{k}") for k in range(9))], ValueError, "a batch takes 8"),
    ],
)
def test_groups_are_checked(groups, error, text):
    with pytest.raises(error, match=text):
        InputBatch(max_num_reqs=2, max_model_len=8, groups=groups)


def test_a_model_without_attention_has_a_table_of_one_column(kernels):
    groups = [KVCacheGroup("tokens", 64, num_blocks=9), StateGroup("mamba", 9)]
    batch = new_batch(kernels, groups)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    batch.add_request("a", {"tokens": [4], "mamba": [4]})
    assert of_step(builder.build({"a": 40})) == ([4], [False], [0, 40])
    assert (of_step(builder.build()), batch.needs_block()) == (([4], [True], [0, 1]), [])


def test_a_stale_step_says_so(kernels, monkeypatch):
    monkeypatch.setenv("ATTNCORE_POISON", "1")
    from attncore.errors import AttncoreError

    batch = new_batch(kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, depth=1)
    add(batch, "a", (3, 1))
    states = builder.build({"a": 4}).states["mamba"]
    assert states.state_slot.tolist() == [3]
    builder.build()
    with pytest.raises(AttncoreError, match="after its arena was taken"):
        _ = states.state_slot
    with pytest.raises(AttncoreError, match="after its arena was taken"):
        _ = states.host


def test_a_batch_without_states_has_none(kernels):
    batch = InputBatch(max_num_reqs=2, max_model_len=8, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8)
    batch.add_request("a", [1])
    assert dict(builder.build().states) == {} == batch._core.states
    assert batch.state_groups == ()
    assert builder._assembly.columns == []
    assert not builder._longer


@pytest.mark.parametrize("call", ["add", "append", "preempt", "remove", "replace"])
def test_an_interrupted_call_has_happened_or_not(call, kernels):
    """Interrupted before each opcode in turn: blocks and slots are those of before or those of after."""
    from interrupted_calls import AtOpcode

    full, more = list(range(48, 52)), {"full": [64], "mamba": [4], "delta": [2]}
    calls = {
        "add": lambda batch: batch.add_request("b", more),
        "append": lambda batch: batch.append_blocks("p", more),
        "preempt": lambda batch: batch.preempt("a"),
        "remove": lambda batch: batch.remove_request("a"),
        "replace": lambda batch: batch.replace_block("a", 0, 5, "mamba"),
    }

    def made():
        batch = new_batch(kernels)
        batch.add_request("a", {"full": full, "mamba": [3], "delta": [1]}, 6)
        batch.add_request("p", {"full": [70], "mamba": [7], "delta": [7]})
        batch.preempt("p")
        return batch

    def seen(batch):
        return {name: (batch.block_ids(name), batch.num_computed_tokens(name)) for name in batch}

    before, done = seen(made()), made()
    calls[call](done)
    found = []
    for count in range(0, 4000, 3):
        batch = made()
        at = AtOpcode(count)
        with at:
            calls[call](batch)
        found.append(seen(batch))
        assert found[-1] in (before, seen(done)), count
        if not at.fired:
            break
    assert before in found
    assert found[-1] == seen(done) != before
