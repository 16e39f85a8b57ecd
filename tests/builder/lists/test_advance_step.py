"""Decodes moved on in place, against the plain-Python oracle and a build of the longer batch."""

import copy

import numpy as np
import oracles
import pytest
import torch
from builder.lists.decodes import backend, decodes, fields, plain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attncore import BackendConfig
from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.reference import ReferenceBackend

LAYOUTS = ("common", "flash", "flashinfer", "rocm")
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def views(metadata):
    return fields(metadata.decode_metadata), metadata.prefill_metadata


@st.composite
def batches(draw):
    """(rows, block_size, layout, window, pad, capture, steps): every table holds what the steps need, or more."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    window = draw(st.none() | st.integers(1, 20))
    steps = draw(st.integers(1, 9))
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        context = draw(st.integers(0, 30))
        blocks = oracles.cdiv(context + 1 + steps, block_size) + draw(st.integers(0, 2))
        rows.append((context, draw(st.lists(st.integers(0, 2**31 - 1), min_size=blocks, max_size=blocks))))
    graph = draw(st.booleans())
    capture = 31 + steps + 3 * block_size
    return (
        rows,
        block_size,
        draw(st.sampled_from(LAYOUTS)),
        window,
        draw(st.integers(0, 3)) if graph else -1,
        capture,
        steps,
    )


@quick
@given(batch=batches(), on_torch=st.booleans(), kind=st.sampled_from([list, tuple, np.array]))
def test_every_field_is_that_of_the_longer_batch(kernels, batch, on_torch, kind):
    rows, block_size, layout, window, pad, capture, steps = batch
    builder = CommonMetadataBuilder(
        block_size, layout, sliding_window=window, max_seq_len_to_capture=capture, kernels=kernels,
        backend=backend(block_size) if on_torch else None,
    )  # fmt: skip
    metadata = builder.build(decodes([(context, kind(table)) for context, table in rows]), pad)
    views(metadata)
    fields(metadata)  # wrapped, all of them
    tokens, sampled = np.full(metadata.num_reqs, 7), np.arange(100, 100 + len(rows))
    for step in range(1, steps + 1):
        before = vars(metadata.host._arrays).copy()
        metadata.advance_step(tokens, sampled + step)
        longer = [(context + step, table) for context, table in rows]
        groups = [(False, False, [(1, context, table)]) for context, table in longer]
        expected = oracles.list_step(groups, block_size, layout, window, pad=pad, capture=capture)
        assert {name: plain(getattr(metadata, name)) for name in expected} == expected
        fresh = builder.build(decodes(longer), pad)
        assert fields(metadata) == fields(fresh)
        assert views(metadata) == views(fresh)
        assert tokens.tolist() == [*(sampled + step), *[0] * (metadata.num_reqs - len(rows))]
        for name, array in before.items():
            held = metadata.host._own(name)
            assert held.dtype == array.dtype
            assert held is array or held.shape != array.shape or name == "paged_kv_indices", name
        assert metadata.advanced == step


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pad", [-1, 2])
def test_blocks_that_were_appended_since_the_build(kernels, layout, pad):
    """A build gives a decode its whole table, lookahead blocks too, and so does a step that is moved on."""
    builder = CommonMetadataBuilder(2, layout, max_seq_len_to_capture=16, kernels=kernels)
    tables = [[5, 6], [7], [8, 9, 10]]
    metadata = builder.build(decodes(zip((2, 0, 1), tables, strict=True)), pad)
    for step, appended in enumerate([(), (0, 0, 1, 2), (1,), (1, 1, 1), (2, 0)], 1):
        for row in appended:
            tables[row].append(100 * step + len(tables[row]))
        if step == 2:  # a row of a token that starts a block, which has just been appended
            assert len(tables[0]) == 4
        metadata.advance_step()
        fresh = builder.build(decodes(zip((2 + step, step, 1 + step), tables, strict=True)), pad)
        assert fields(metadata) == fields(fresh)


def test_appended_blocks_beyond_a_captured_table(kernels):
    tables = [[5, 6]]
    metadata = CommonMetadataBuilder(2, max_seq_len_to_capture=4, kernels=kernels).build(decodes([(1, tables[0])]), 0)
    before = fields(metadata)
    tables[0].append(7)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"block_table: 3 blocks exceed the 2 columns"):
            metadata.advance_step()
        assert fields(metadata) == before
    tables[0][2] = 2.5
    tables[0].pop()
    metadata.advance_step()
    assert metadata.seq_lens.tolist() == [3]


def test_an_encoders_fields_stay(kernels):
    builder = CommonMetadataBuilder(4, encoder_decoder=True, max_seq_len_to_capture=16, kernels=kernels)

    def build(step):
        rows = [(2 + step, [5, 6, 7]), (4 + step, [8, 9])]
        return builder.build([SequenceGroup(False, [Sequence(0, 1, *row)], False, 5, [2, 3]) for row in rows], 1)

    metadata = build(0)
    for step in range(1, 4):
        metadata.advance_step()
        assert fields(metadata) == fields(build(step))


def test_page_bounds(kernels):
    builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=16, kernels=kernels)
    metadata = builder.build(decodes([(3, [1, 2]), (1, [3])]), 1)
    assert metadata.block_table_bound.tolist() == [0, 0, 0]
    metadata.advance_step()
    assert metadata.block_table_bound.tolist() == [2, 1, 0]
    assert metadata.block_table_bound.dtype == np.int32
    assert not hasattr(CommonMetadataBuilder(4).build(decodes([(0, [1])])), "block_table_bound")


def test_the_worked_window(kernels):
    """The worked numbers of the rules, one token earlier: window 8, block size 4, length 14, table [1, 2, 3, 4]."""
    builder = CommonMetadataBuilder(4, sliding_window=8, kernels=kernels)
    metadata = builder.build(decodes([(12, [1, 2, 3, 4])]))
    metadata.advance_step()
    found = metadata.seq_lens, metadata.block_table, metadata.slot_mapping, metadata.positions
    assert [plain(one) for one in found] == [[10], [[2, 3, 4]], [17], [13]]


@pytest.mark.parametrize("window", [None, 5])
def test_blocks_appended_since_the_build(kernels, window):
    """To a row in the middle, whose table was not the longest; and one that makes the table wider."""
    builder = CommonMetadataBuilder(4, "flashinfer", sliding_window=window, kernels=kernels)
    tables = [[1, 2, 3], [4], [5, 6]]
    rows = list(zip([8, 2, 6], tables, strict=True))
    metadata = builder.build(decodes(rows))
    for step in range(1, 9):
        for i, (context, table) in enumerate(rows):
            if context + step >= 4 * len(table):
                table.append(10 * step + i)
        metadata.advance_step()
        fresh = builder.build(decodes([(context + step, table) for context, table in rows]))
        assert fields(metadata) == fields(fresh)


def test_tokens_on_tensors():
    metadata = CommonMetadataBuilder(4, max_seq_len_to_capture=8).build(decodes([(0, [1]), (1, [2])]), 1)
    tokens = torch.full((5,), 9)
    metadata.advance_step(tokens, torch.tensor([[3], [4]]), num_queries=2)
    assert tokens.tolist() == [3, 4, 0, 9, 9]  # beyond num_reqs is not this step's
    metadata.advance_step(tokens, np.array([5, 6], np.int32))
    assert tokens.tolist() == [5, 6, 0, 9, 9]


def test_a_backends_name_for_it():
    one = backend()
    metadata = CommonMetadataBuilder(4, backend=one).build(decodes([(0, [1])]))
    one.advance_step(metadata, torch.zeros(1, dtype=torch.int64), torch.tensor([8]))
    assert metadata.positions.tolist() == [1]


class Planning(ReferenceBackend):
    def plan(self, metadata):
        self.planned.append(metadata.host.seq_lens.tolist())
        metadata.kept["planned"] = self.planned[-1]
        if len(self.planned) == self.fails_at:
            raise RuntimeError("no workspace")


@pytest.mark.parametrize(("layout", "window"), [("common", None), ("flashinfer", None), ("flashinfer", 4)])
def test_a_plan_is_made_anew_and_undone_where_it_fails(layout, window):
    one = Planning(BackendConfig(2, 1, 8, "float32", 4))
    one.planned, one.fails_at = [], 4
    builder = CommonMetadataBuilder(4, layout, sliding_window=window, backend=one)
    rows = [(5, [1, 2, 3]), (1, [4, 6])]
    metadata = builder.build(decodes(rows))
    metadata.advance_step()
    metadata.advance_step()
    before, tokens, kept = copy.deepcopy(fields(metadata)), torch.full((2,), 9), metadata.kept
    with pytest.raises(RuntimeError, match="no workspace"):
        metadata.advance_step(tokens, torch.tensor([1, 2]))  # a third block for the first row
    assert (fields(metadata), metadata.advanced, tokens.tolist()) == (before, 2, [9, 9])
    assert metadata.kept is kept  # the plan of the step, which its layers still run by
    assert kept == {"planned": before["seq_lens"]}
    metadata.advance_step()
    fresh = builder.build(decodes([(context + 3, table) for context, table in rows]))
    assert fields(metadata) == fields(fresh)
