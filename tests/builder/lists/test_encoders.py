"""The list builder's encoder fields against the plain-Python oracle, and what slices and attention read of them."""

from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch
from builder.lists.encoder_groups import decode, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attncore import AttentionType, BackendConfig
from attncore.builder import (
    BatchSlice,
    CommonMetadataBuilder,
    InputBatch,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    metadata_from_fields,
    slice_metadata,
    token_counts,
)
from attncore.builder.fields import ENCODER_ARRAYS
from attncore.builder.persistent.kv_cache_group import KVCacheGroup
from attncore.dense import dense_attention
from attncore.reference import ReferenceBackend

LAYOUTS = ("common", "flash", "rocm")
NAMES = (*ENCODER_ARRAYS, "num_encoder_tokens", "max_encoder_seq_len")
quick = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray) else value


def fields(metadata):
    return {name: plain(getattr(metadata, name)) for name in NAMES}


@st.composite
def steps(draw):
    """A legal step: (groups as the oracle has them, an encoder a group, block_size, pad, capture)."""
    block_size = draw(st.sampled_from([1, 3, 4, 16, 2**30]))
    graph = draw(st.booleans())
    groups, encoders = [], []
    for is_prompt in sorted(draw(st.lists(st.booleans(), min_size=1, max_size=5)), reverse=True):
        is_prompt = is_prompt and not graph
        profiled = draw(st.integers(0, 6)) == 0
        ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=3, max_size=3))
        table = None if profiled else ids[: oracles.cdiv(3, block_size)]
        sequences = [(3 if is_prompt else 1, 0, table)] * draw(st.integers(1, 3))
        length = draw(st.integers(0, 40))
        blocks = oracles.cdiv(length, block_size) + (draw(st.integers(0, 2)) if block_size <= 16 else 0)
        cross = None if profiled else draw(st.lists(st.integers(0, 2**31 - 1), min_size=blocks, max_size=blocks))
        groups.append((is_prompt, False, sequences))
        encoders.append((length, cross))
    pad, capture = (draw(st.integers(0, 3)), min(40 + 2 * block_size, 2**31 - 1)) if graph else (-1, None)
    return groups, encoders, block_size, pad, capture


def to_groups(groups, encoders, kind=list):
    made = []
    for (is_prompt, hit, seqs), (length, ids) in zip(groups, encoders, strict=True):
        table = None if ids is None else kind(ids)
        made.append(SequenceGroup(is_prompt, [Sequence(i, *one) for i, one in enumerate(seqs)], hit, length, table))
    return made


@quick
@given(
    step=steps(),
    layout=st.sampled_from(LAYOUTS),
    kind=st.sampled_from([list, tuple, lambda ids: np.array(ids, np.int64), lambda ids: np.array(ids, np.int32)]),
)
def test_every_field_is_the_oracles(kernels, step, layout, kind):
    groups, encoders, block_size, pad, capture = step
    builder = CommonMetadataBuilder(
        block_size, layout, encoder_decoder=True, max_seq_len_to_capture=16,
        max_encoder_seq_len_to_capture=capture, kernels=kernels,
    )  # fmt: skip
    metadata = builder.build(to_groups(groups, encoders, kind), pad)
    expected = oracles.encoder_step(groups, encoders, block_size, pad, capture)
    assert fields(metadata) == expected
    decoder = oracles.list_step(groups, block_size, layout, pad=pad, capture=16)
    assert {name: plain(getattr(metadata, name)) for name in decoder} == decoder  # the decoder's are as ever
    for view in (metadata.prefill_metadata, metadata.decode_metadata):
        assert view is None or fields(view) == expected


def test_dtypes_and_shapes(kernels):
    metadata = CommonMetadataBuilder(4, encoder_decoder=True, kernels=kernels).build([prompt(), decode()])
    for name in ENCODER_ARRAYS:
        field = getattr(metadata, name)
        assert field.dtype == (np.int64 if name == "cross_slot_mapping" else np.int32), name
        assert field.flags.c_contiguous, name
    assert CommonMetadataBuilder(4, encoder_decoder=True).build([prompt()]).cross_block_table.shape == (1, 0)


def test_slots_beyond_int32(kernels):
    builder = CommonMetadataBuilder(2**30, encoder_decoder=True, kernels=kernels)
    assert builder.build([prompt(2, [2**31 - 1])]).cross_slot_mapping.tolist() == [2**61 - 2**30, 2**61 - 2**30 + 1]


def test_a_graph_has_a_width_and_a_longest_encoder_of_its_own(kernels):
    builder = CommonMetadataBuilder(
        4, encoder_decoder=True, max_seq_len_to_capture=32, max_encoder_seq_len_to_capture=6, kernels=kernels
    )
    assert builder.build([decode()], 1).cross_block_table.tolist() == [[2, 3], [0, 0]]
    with pytest.raises(
        ValueError, match=r"^max_encoder_seq_len_to_capture: 6 is below the encoder_seq_len 7 of gr.*1\]"
    ):
        builder.build([decode(), decode(7)], 0)
    with pytest.raises(ValueError, match=r"^groups\[1\].cross_block_table: 3 blocks exceed the 2 columns of max_enc"):
        builder.build([decode(), decode(5, [1, 2, 3])], 0)
    assert builder.build([decode(7)]).encoder_seq_lens.tolist() == [7]  # without a graph nothing is too long


def test_without_a_length_of_its_own_the_graph_takes_the_decoders(kernels):
    builder = CommonMetadataBuilder(4, "flash", encoder_decoder=True, max_seq_len_to_capture=8, kernels=kernels)
    metadata = builder.build([decode(5, [1, 2, 3])], 0)
    assert metadata.cross_block_table.tolist() == [[1, 2]]  # flash cuts blocks beyond the captured length
    with pytest.raises(ValueError, match=r"^max_seq_len_to_capture: 8 is below the encoder_seq_len 9"):
        builder.build([decode(9, [1, 2, 3])], 0)


def test_a_graph_of_requests_without_encoder_input(kernels):
    """The padded rows are one token long, and the kernel's bound says so."""
    builder = CommonMetadataBuilder(4, encoder_decoder=True, max_seq_len_to_capture=8, kernels=kernels)
    metadata = builder.build([decode(0, None)], 1)
    assert metadata.encoder_seq_lens.tolist() == [0, 1]
    assert (metadata.num_encoder_tokens, metadata.max_encoder_seq_len) == (0, 1)
    assert metadata.cross_block_table.tolist() == [[0, 0], [0, 0]]


def test_a_step_without_encoder_input_has_no_encoder_fields(kernels):
    metadata = CommonMetadataBuilder(4, kernels=kernels).build([decode(None, None)])
    for name in (*ENCODER_ARRAYS, "cross_block_tables"):
        with pytest.raises(AttributeError, match=name.removesuffix("s")):
            getattr(metadata, name)
    assert (metadata.num_encoder_tokens, metadata.max_encoder_seq_len) == (0, 0)


def test_a_table_that_shrinks_while_it_is_read_is_not_read_past_its_end(kernels):
    table = [5] * 100

    class Shrinks:
        def __index__(self):
            del table[2:]
            return 1

    table[1] = Shrinks()
    builder = CommonMetadataBuilder(4, encoder_decoder=True, kernels=kernels)
    slot_mapping = builder.build([prompt(400, table)]).cross_slot_mapping
    assert slot_mapping[:8].tolist() == [20, 21, 22, 23, 4, 5, 6, 7]  # what was read before it shrank
    assert len(slot_mapping) == 400


def test_a_plan_sees_the_encoder_fields(kernels):
    planned = []
    config = SimpleNamespace(device="cpu", block_size=4)
    backend = SimpleNamespace(config=config, from_host=torch.from_numpy, has_plan=True, plan=planned.append)
    builder = CommonMetadataBuilder(4, encoder_decoder=True, backend=backend, kernels=kernels)
    metadata = builder.build([prompt()])
    assert planned == [metadata]
    assert isinstance(planned[0].cross_slot_mapping, torch.Tensor)
    with pytest.raises(ValueError):
        builder.build([prompt(-1)])
    assert planned == [metadata]


def test_there_and_back():
    metadata = CommonMetadataBuilder(4, encoder_decoder=True).build([prompt(), decode()])
    sent = metadata.asdict_zerocopy({"block_table"})
    assert all(sent[name] is getattr(metadata, name) for name in NAMES)
    copied = {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value for name, value in sent.items()
    }
    arrived = metadata_from_fields(copied)
    assert fields(arrived) == fields(metadata)
    assert "encoder_seq_lens" not in CommonMetadataBuilder(4).build([decode(None, None)]).asdict_zerocopy()


def test_a_slice_has_the_encoders_of_its_rows(kernels):
    builder = CommonMetadataBuilder(4, encoder_decoder=True, kernels=kernels)
    metadata = builder.build([prompt(6, [7, 9]), prompt(3, [4]), decode(), decode(0, [])])
    part = slice_metadata(metadata, BatchSlice(1, 3, 3, 7))
    assert fields(part) == {
        "encoder_seq_lens": [3, 5],
        "encoder_query_lens": [3, 0],
        "encoder_seq_start_loc": [0, 3, 8],
        "encoder_query_start_loc": [0, 3, 3],
        "cross_slot_mapping": [16, 17, 18],
        "cross_block_table": [[0, 0], [2, 3]],
        "num_encoder_tokens": 8,
        "max_encoder_seq_len": 5,
    }


def test_views_have_the_encoders_of_all_rows_and_so_have_theirs(kernels):
    builder = CommonMetadataBuilder(4, encoder_decoder=True, kernels=kernels)
    metadata = builder.build([prompt(6, [7, 9]), prompt(3, [4]), decode(), decode(0, [])])
    for part in ("prefill_metadata", "decode_metadata"):
        view = getattr(metadata, part)
        assert fields(view) == fields(getattr(view, part)) == fields(metadata)


def test_views_of_the_persistent_builder_have_the_encoders_of_their_rows(kernels):
    groups = [KVCacheGroup("full", 4), KVCacheGroup("cross", 4, cross=True)]
    batch = InputBatch(max_num_reqs=2, max_model_len=32, groups=groups, max_encoder_len=16, kernels=kernels)
    batch.add_request("a", {"full": [3, 4], "cross": [7, 9]}, 4, encoder_seq_len=6, encoder_computed=True)
    batch.add_request("b", {"full": [5], "cross": [8]}, encoder_seq_len=3)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=8).build({"b": 3})
    decodes, prefills = metadata.decode_metadata, metadata.prefill_metadata
    assert (decodes.encoder_seq_lens.tolist(), decodes.cross_slot_mapping.tolist()) == ([6], [])
    assert (prefills.encoder_seq_lens.tolist(), prefills.cross_slot_mapping.tolist()) == ([3], [32, 33, 34])
    assert prefills.encoder_query_start_loc.tolist() == prefills.encoder_seq_start_loc.tolist() == [0, 3]
    assert (prefills.cross_block_table[:, :1].tolist(), prefills.num_encoder_tokens) == ([[8]], 3)


def test_token_counts():
    builder = CommonMetadataBuilder(4, encoder_decoder=True)
    prompts, decodes = builder.build([prompt(), prompt(3, [4])]), builder.build([decode(), decode(1, [4])])
    expected = {
        "decoder": ((6, 6, 0), (0, 0, 2)), "encoder_only": ((6, 6, 0), (0, 0, 2)),
        "encoder": ((9, 9, 0), (6, 6, 0)), "encoder_decoder": ((6, 9, 0), (0, 6, 2)),
    }  # fmt: skip
    for kind in AttentionType:
        assert (token_counts(prompts, kind), token_counts(decodes, kind.value)) == expected[kind]
    with pytest.raises(
        ValueError, match=r"^attn_type: 'cross' is not one of decoder, encoder, encoder_only, encoder_dec"
    ):
        token_counts(prompts, "cross")
    without = CommonMetadataBuilder(4).build([decode(None, None)])
    assert token_counts(without, "decoder") == (0, 0, 1)
    for kind in ("encoder", "encoder_decoder"):
        with pytest.raises(ValueError, match=f"^metadata: attention of type {kind} needs encoder_seq_lens, which"):
            token_counts(without, kind)


@pytest.mark.parametrize("pad", [-1, 2])
def test_cross_attention_reads_what_the_prompt_wrote(kernels, pad):
    """Prompts of a, then a's decodes beside the prompt of b; every query sees its request's whole encoder."""
    torch.manual_seed(1)
    config = BackendConfig(num_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=4)
    backend = ReferenceBackend(config)
    builder = CommonMetadataBuilder(
        4, encoder_decoder=True, max_seq_len_to_capture=16, backend=backend, kernels=kernels
    )
    impl = backend.impl("cross", scale=0.3, attn_type=AttentionType.ENCODER_DECODER)
    cache = backend.allocate_kv_cache(12)
    keys, values = ({"a": torch.randn(9, 2, 8), "b": torch.randn(4, 2, 8)} for _ in range(2))
    tables = {"a": [7, 2, 5], "b": [3]}

    def group(name, is_prompt, query_len):
        return SequenceGroup(is_prompt, [Sequence(0, query_len, 0, [1])], False, len(keys[name]), tables[name])

    def run(rows, pad=-1):
        metadata = builder.build([group(*row) for row in rows], pad)
        query = torch.randn(metadata.num_tokens, 4, 8)
        fresh = [name for name, is_prompt, _ in rows if is_prompt]
        key, value = (torch.cat([torch.empty(0, 2, 8), *(part[name] for name in fresh)]) for part in (keys, values))
        output = impl.forward(query, key, value, cache, metadata)
        start = 0
        for name, _, query_len in rows:
            part = slice(start, start + query_len)
            dense = dense_attention(query[part], keys[name], values[name], scale=0.3, causal=False)
            torch.testing.assert_close(output[part], dense, atol=2e-5, rtol=2e-5)
            start += query_len

    run([("a", True, 3)])
    run([("b", True, 2), ("a", False, 1)])
    run([("a", False, 1), ("b", False, 1)], pad)
