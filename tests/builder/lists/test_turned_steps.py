"""Steps with prompts that turn into decodes, against a build of the longer sequences as decodes."""

import numpy as np
import pytest
import torch
from builder.lists.decodes import backend, fields
from builder.lists.test_advance_step import Planning
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attncore import BackendConfig
from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup, advance_step

TURN = {"turn_prefills_into_decodes": True}
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def groups_of(rows):
    """rows: (query_len of a prompt or None, context, table)."""
    return [
        SequenceGroup(query is not None, [Sequence(i, query or 1, context, table)])
        for i, (query, context, table) in enumerate(rows)
    ]


@st.composite
def batches(draw):
    block_size, steps = draw(st.sampled_from([1, 3, 4, 16])), draw(st.integers(1, 5))
    rows = []
    for i in range(draw(st.integers(1, 5))):
        query = draw(st.integers(1, 20)) if i < 2 else None
        context = draw(st.integers(0, 20))
        blocks = -(-(context + (query or 1) + steps) // block_size) + draw(st.integers(0, 2))
        rows.append((query, context, draw(st.lists(st.integers(0, 2**31 - 1), min_size=blocks, max_size=blocks))))
    layout = draw(st.sampled_from(["common", "flash", "flashinfer", "rocm"]))
    return rows, block_size, layout, draw(st.none() | st.integers(1, 20)), steps


@quick
@given(batch=batches(), on_torch=st.booleans(), kind=st.sampled_from([list, np.array]))
def test_every_field_is_that_of_the_longer_sequences(kernels, batch, on_torch, kind):
    rows, block_size, layout, window, steps = batch
    builder = CommonMetadataBuilder(
        block_size, layout, sliding_window=window, chunked_prefill=True, kernels=kernels,
        backend=backend(block_size) if on_torch else None,
    )  # fmt: skip
    rows = [(query, context, kind(table)) for query, context, table in rows]
    metadata = builder.build(groups_of(rows))
    assert metadata.prefill_metadata is not None
    fields(metadata)  # wrapped, all of them
    tokens = np.full(len(rows), 7)
    for step in range(1, steps + 1):
        metadata.advance_step(tokens, np.arange(len(rows)) + 100 * step, len(rows), step == 1)
        longer = [(None, context + (query or 1) + step - 1, table) for query, context, table in rows]
        assert fields(metadata) == fields(builder.build(groups_of(longer)))
        assert metadata.prefill_metadata is None
        assert fields(metadata.decode_metadata) == fields(metadata)
        assert (tokens.tolist(), metadata.advanced) == ([100 * step + i for i in range(len(rows))], step)


def test_blocks_are_those_that_the_tables_have_now(kernels):
    table = [5, 6]
    metadata = CommonMetadataBuilder(4, kernels=kernels).build(groups_of([(8, 0, table), (None, 2, [9])]))
    with pytest.raises(ValueError, match=r"sequence 0 holds 2 blocks but needs 3 for its 9 tokens"):
        metadata.advance_step(**TURN)
    table.append(7)
    metadata.advance_step(**TURN)
    assert metadata.slot_mapping.tolist() == [28, 39]
    assert metadata.block_table.tolist() == [[5, 6, 7], [9, 0, 0]]


def test_an_encoders_fields_are_those_of_decodes(kernels):
    builder = CommonMetadataBuilder(4, encoder_decoder=True, kernels=kernels)

    def build(is_prompt, query_len, context_len):
        return builder.build(
            [SequenceGroup(is_prompt, [Sequence(0, query_len, context_len, [5, 6])], False, 5, [2, 3])]
        )

    metadata = build(True, 4, 0)
    assert len(metadata.cross_slot_mapping) == 5
    metadata.advance_step(**TURN)
    assert fields(metadata) == fields(build(False, 1, 4))


def test_a_hit_and_siblings_turn_too(kernels):
    builder = CommonMetadataBuilder(4, "flash", kernels=kernels)
    metadata = builder.build([SequenceGroup(True, [Sequence(0, 2, 4, [5, 6]), Sequence(1, 3, 4, [5, 7])], True)])
    metadata.priority = 3  # an engine's own
    metadata.advance_step(**TURN)
    longer = [SequenceGroup(False, [Sequence(0, 1, 6, [5, 6]), Sequence(1, 1, 7, [5, 7])])]
    assert fields(metadata) == fields(builder.build(longer))
    assert metadata.priority == 3


def test_steps_of_decodes_are_moved_on_in_place(kernels):
    metadata = CommonMetadataBuilder(4, kernels=kernels).build(groups_of([(None, 2, [5])]))
    slots = metadata.host._own("slot_mapping")
    metadata.advance_step(**TURN)
    assert metadata.host._own("slot_mapping") is slots


@pytest.mark.parametrize(
    ("layout", "groups", "message"),
    [
        ("common", groups_of([(3, 0, None)]), "metadata: of a profiling run"),
        ("flash", [*groups_of([(3, 0, [1])]), SequenceGroup(False, [Sequence(1, 2, 3, [2, 3])])],
         "metadata: row 1 ran 2 tokens; decodes of one token advance"),
    ],
)  # fmt: skip
def test_what_does_not_turn(kernels, layout, groups, message):
    metadata = CommonMetadataBuilder(4, layout, kernels=kernels).build(groups)
    before = fields(metadata)
    with pytest.raises(ValueError, match=f"^{message}"):
        metadata.advance_step(**TURN)
    assert fields(metadata) == before


def test_without_asking_prompts_do_not_advance():
    metadata = CommonMetadataBuilder(4).build(groups_of([(3, 0, [1])]))
    with pytest.raises(ValueError, match=r"1 prompt in the step; .* turn_prefills_into_decodes=True"):
        metadata.advance_step()
    with pytest.raises(TypeError, match="turn_prefills_into_decodes: 1"):
        metadata.advance_step(turn_prefills_into_decodes=1)


@pytest.mark.parametrize("layout", ["common", "flashinfer"])
def test_a_turn_is_planned_once_and_undone_where_the_plan_fails(layout):
    one = Planning(BackendConfig(2, 1, 8, "float32", 4))
    one.planned, one.fails_at = [], 2
    builder = CommonMetadataBuilder(4, layout, backend=one)
    metadata = builder.build(groups_of([(4, 0, [1, 2]), (None, 2, [3])]))
    before, tokens = fields(metadata), torch.full((2,), 9)
    with pytest.raises(RuntimeError, match="no workspace"):
        advance_step(metadata, tokens, torch.tensor([1, 2]), **TURN)
    assert (fields(metadata), metadata.advanced, tokens.tolist()) == (before, 0, [9, 9])
    assert metadata.kept == {"planned": [4, 3]}
    advance_step(metadata, tokens, torch.tensor([1, 2]), **TURN)
    assert one.planned == [[4, 3], [5, 4], [5, 4]]
    assert tokens.tolist() == [1, 2]
