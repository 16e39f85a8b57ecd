"""What advance_step refuses, which changes nothing: steps, tables and arguments."""

import copy

import numpy as np
import pytest
import torch
from builder.lists.decodes import decodes, fields

from attncore import select
from attncore.builder import (
    CommonMetadataBuilder,
    InputBatch,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    advance_step,
)
from attncore.errors import CaptureError
from attncore.graphs import StandInGraph, capturing

LAYOUTS = ("common", "flash", "flashinfer", "rocm")


def prompt():
    return SequenceGroup(True, [Sequence(9, 2, 0, [1])])


def refused(metadata, error, text, *arguments, **keywords):
    """That an advance is refused, and changes nothing."""
    held, before = vars(metadata.host._arrays).copy(), copy.deepcopy(fields(metadata))
    with pytest.raises(error, match=text):
        metadata.advance_step(*arguments, **keywords)
    assert fields(metadata) == before
    after = vars(metadata.host._arrays)
    assert {name: id(array) for name, array in held.items()} == {name: id(array) for name, array in after.items()}


def test_steps_that_cannot_advance(kernels):
    builder = CommonMetadataBuilder(4, "flash", max_seq_len_to_capture=8, kernels=kernels)
    refused(builder.build([prompt(), *decodes([(0, [1])])]), ValueError, "metadata: 1 prompt in the step")
    wide = builder.build([SequenceGroup(False, [Sequence(0, 1, 1, [1]), Sequence(1, 3, 1, [2])])])
    refused(wide, ValueError, "metadata: row 1 ran 3 tokens")
    profiled = builder.build([*decodes([(0, [1])]), SequenceGroup(False, [Sequence(1, 1, 3, None)])])
    refused(profiled, ValueError, "metadata: row 1 is of a profiling run")
    refused(builder.build(decodes([(0, [1])])).decode_metadata, ValueError, "metadata: not as CommonMetadataBuilder")
    batch = InputBatch(max_num_reqs=1, max_model_len=8, block_size=4, kernels=kernels)
    batch.add_request("a", [1], num_computed_tokens=1)
    step = MetadataBuilder(batch, max_num_batched_tokens=8).build()
    with pytest.raises(ValueError, match="metadata: not as CommonMetadataBuilder"):
        step.advance_step()


@pytest.mark.parametrize("found", [[1, 2], None])
def test_what_is_no_step_is_refused(found):
    with pytest.raises(TypeError, match=f"^metadata: {type(found).__name__} found; give the metadata of a step"):
        advance_step(found)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 3])
def test_a_token_without_a_block_names_the_row(kernels, layout, window):
    builder = CommonMetadataBuilder(4, layout, sliding_window=window, kernels=kernels)
    metadata = builder.build(decodes([(3, [1, 2]), (6, [3, 4, 5]), (2, [6])]))
    metadata.advance_step()
    refused(metadata, ValueError, r"metadata: row 2 holds 1 block but needs 2 for its 5 tokens \(block_size 4\)")


def test_a_step_that_outgrows_its_graph(kernels):
    builder = CommonMetadataBuilder(4, max_seq_len_to_capture=8, kernels=kernels)
    metadata = builder.build(decodes([(1, [4]), (6, [1, 2])]), 1)
    metadata.advance_step()
    refused(metadata, ValueError, "max_seq_len_to_capture: 8 is below the length 9 of row 1")
    windowed = CommonMetadataBuilder(4, sliding_window=4, max_seq_len_to_capture=6, kernels=kernels)
    metadata = windowed.build(decodes([(4, [1, 2])]), 0)
    metadata.advance_step()
    refused(metadata, ValueError, "max_seq_len_to_capture: 6 is below the length 7 of row 0")


def test_lengths_that_fit_no_int32(kernels):
    most = 2**31 - 1
    builder = CommonMetadataBuilder(2**30, kernels=kernels)
    refused(builder.build(decodes([(most - 1, [1, 2])])), ValueError, "metadata: row 0 cannot grow beyond 2147483647")
    metadata = builder.build(decodes([(most - 10, [1, 2]), (7, [1])]))
    refused(metadata, ValueError, "metadata: lengths or pages of this step, 2147483648 in all, do not fit")


def test_tables_that_changed_since_the_build(kernels):
    builder = CommonMetadataBuilder(4, kernels=kernels)
    table = [1, 2]
    metadata = builder.build(decodes([(3, table)]))
    table[0] = 7
    refused(metadata, ValueError, "metadata: row 0 was built from another table than its group has now")
    table[:] = [1, -2]
    refused(metadata, ValueError, "metadata: row 0: block id -2 is no integer")
    table[:] = [1, "x"]
    refused(metadata, ValueError, "metadata: row 0: block id 'x' is no integer")
    table[:] = [1, 9]
    metadata.advance_step()
    assert metadata.slot_mapping.tolist() == [36]
    groups = decodes([(3, [1, 2])])
    metadata = builder.build(groups)
    groups[0].sequences.clear()
    refused(metadata, ValueError, "metadata: its groups have 0 sequences now, not 1")
    groups[0].sequences.append((1, 2))
    refused(metadata, ValueError, "groups: changed while they were read")


def test_windowed_lengths_beyond_the_table(kernels):
    """A tensor on a CPU shares the step's memory, and can be written to."""
    backend = select(
        backend="reference", num_heads=1, num_kv_heads=1, head_size=8, dtype="float32", block_size=4
    ).create()
    builder = CommonMetadataBuilder(4, sliding_window=4, backend=backend, kernels=kernels)
    metadata = builder.build(decodes([(3, [1, 2])]))
    metadata.seq_lens[:] = 1000
    refused(metadata, ValueError, "metadata: its seq_lens was changed since the build")


READ_ONLY = np.zeros(3, int)
READ_ONLY.flags.writeable = False

THREE, TWO = torch.zeros(3, dtype=torch.int64), torch.ones(2, dtype=torch.int64)

BAD = [
    ((np.zeros(3, int), None), {}, TypeError, "sampled_token_ids: missing"),
    ((None, np.zeros(2, int)), {}, TypeError, "input_tokens: missing"),
    ((np.zeros(2, int), np.zeros(2, int)), {}, ValueError, "input_tokens: 2 tokens for the 3 rows"),
    ((np.zeros(3, int), np.zeros(1, int)), {}, ValueError, "sampled_token_ids: 1 token for the 2 rows"),
    ((np.zeros(3, int), np.zeros(2)), {}, TypeError, "sampled_token_ids: ndarray is not an array or tensor of int"),
    ((np.zeros(3, int), [1, 2]), {}, TypeError, "sampled_token_ids: list is not"),
    ((np.zeros((3, 1), int), np.zeros(2, int)), {}, ValueError, r"input_tokens: \[3, 1\]; it must have one dimension"),
    ((np.zeros(3, "i4,i4"), np.zeros(2, int)), {}, TypeError, "input_tokens: ndarray is not an array or tensor of int"),
    ((READ_ONLY, np.zeros(2, int)), {}, ValueError, "input_tokens: a read-only array"),
    (
        (np.zeros(3, np.int32), np.array([1, 2**40])),
        {},
        ValueError,
        "sampled_token_ids: 1099511627776 does not fit inp",
    ),
    ((np.zeros(3, np.int8), np.array([1, 300])), {}, ValueError, "sampled_token_ids: 300 does not fit input_tokens"),
    ((np.zeros(3, np.uint8), np.array([1, -1])), {}, ValueError, "sampled_token_ids: -1 does not fit input_tokens"),
    ((torch.zeros(3, dtype=torch.int32), torch.tensor([1, 2**40])), {}, ValueError, "sampled_token_ids: 1099511627776"),
    ((torch.zeros(3, dtype=torch.int8), np.array([1, 300])), {}, ValueError, "sampled_token_ids: 300 does not fit"),
    ((THREE.to_sparse(), TWO), {}, ValueError, "input_tokens: of layout torch.sparse_coo"),
    ((THREE, TWO.to_sparse()), {}, ValueError, "sampled_token_ids: of layout torch.sparse_coo"),
    ((THREE, TWO.to("meta")), {}, ValueError, "sampled_token_ids: on meta, which holds no numbers"),
    ((THREE[:1].expand(3), TWO), {}, ValueError, "input_tokens: its elements share memory"),
    (
        (np.lib.stride_tricks.as_strided(np.zeros(1, int), (3,), (0,)), TWO),
        {},
        ValueError,
        "input_tokens: its elements",
    ),
    ((), {"num_queries": 3}, ValueError, "num_queries: 3, but the step has 2 rows"),
    ((), {"num_queries": True}, TypeError, "num_queries: True is not an integer"),
]


@pytest.mark.parametrize(("arguments", "keywords", "error", "text"), BAD)
def test_bad_arguments_name_themselves(arguments, keywords, error, text):
    metadata = CommonMetadataBuilder(4, max_seq_len_to_capture=8).build(decodes([(0, [1]), (1, [2])]), 1)
    refused(metadata, error, text, *arguments, **keywords)


def test_tokens_from_back_to_front_are_no_shared_ones():
    metadata = CommonMetadataBuilder(4).build(decodes([(0, [1]), (1, [2])]))
    tokens = np.zeros(4, np.int64)
    metadata.advance_step(tokens[::-2], np.array([1, 2]))
    assert tokens.tolist() == [0, 2, 0, 1]


class GivesNumbers(np.ndarray):
    """Tokens whose parts are plain numbers."""

    def __getitem__(self, key):
        return int(np.asarray(self)[key].reshape(-1)[0])


def test_tokens_of_a_subclass_are_read_as_a_plain_array():
    metadata = CommonMetadataBuilder(4).build(decodes([(0, [1]), (1, [2])]))
    tokens = np.zeros(2, np.int64)
    metadata.advance_step(tokens, np.array([5, 6]).view(GivesNumbers))
    assert tokens.tolist() == [5, 6]
    given = np.array([7, 8]).view(GivesNumbers)
    refused(metadata, RuntimeError, "not returning array", given, np.array([1, 2]))  # NumPy's own, for a slice of it
    assert given.tolist() == [7, 8]


class FailsAtTheSecond(np.ndarray):
    """Input tokens that refuse every assignment but the first."""

    written = 0

    def __setitem__(self, key, value):
        self.written += 1
        if self.written > 1:
            raise RuntimeError("no more")
        super().__setitem__(key, value)


def test_tokens_are_taken_back_with_the_step():
    metadata = CommonMetadataBuilder(4, max_seq_len_to_capture=8).build(decodes([(0, [1]), (1, [2])]), 1)
    tokens = np.array([7, 8, 9, 10]).view(FailsAtTheSecond)
    refused(metadata, RuntimeError, "no more", tokens, np.array([1, 2]))
    assert tokens.tolist() == [7, 8, 9, 10]
    metadata.advance_step(np.zeros(3, np.int32), np.array([1, 2]))  # int64 that fit
    assert metadata.advanced == 1


def test_tokens_that_cannot_be_written_to_leave_a_step_that_advances():
    metadata = CommonMetadataBuilder(4, max_seq_len_to_capture=8).build(decodes([(0, [1]), (1, [2])]), 1)
    with torch.inference_mode():
        tokens = torch.zeros(3, dtype=torch.int64)
    refused(metadata, RuntimeError, "nference", tokens, torch.tensor([1, 2]))
    metadata.advance_step()
    assert metadata.advanced == 1


def test_not_while_a_graph_is_captured():
    metadata = CommonMetadataBuilder(4).build(decodes([(0, [1])]))
    with capturing(StandInGraph()):
        refused(metadata, CaptureError, "advance_step: a stream is capturing")
