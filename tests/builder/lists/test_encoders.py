"""The list builder's encoder fields against the plain-Python oracle, and what it refuses."""

import copy
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch
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


def prompt(encoder_seq_len=6, cross_block_table=(7, 9), block_table=(5,), seq_id=0):
    return SequenceGroup(True, [Sequence(seq_id, 3, 0, block_table)], False, encoder_seq_len, cross_block_table)


def decode(encoder_seq_len=5, cross_block_table=(2, 3), block_table=(5,), seq_id=0):
    return SequenceGroup(False, [Sequence(seq_id, 1, 3, block_table)], False, encoder_seq_len, cross_block_table)


class Odd:
    def __index__(self):
        raise RuntimeError("no index")


BAD = [
    ([decode(None, None)], r"groups\[0\].encoder_seq_len: missing; every group of an encoder/decoder step has one"),
    ([decode(None)], r"groups\[0\].encoder_seq_len: missing, but cross_block_table is given"),
    ([prompt(), decode(None, None)], r"groups\[1\].encoder_seq_len: missing"),
    ([decode()[:3]], r"groups\[0\].encoder_seq_len: missing"),
    ([decode(5, None)], r"groups\[0\].cross_block_table: missing; the 5 encoder tokens need blocks"),
    ([prompt(5, None)], r"groups\[0\].cross_block_table: missing; the 5 encoder tokens need blocks"),
    ([prompt(block_table=None)], r"groups\[0\].cross_block_table: given, but the group's block tables are null"),
    ([prompt(block_table=None, cross_block_table=[])], r"cross_block_table: given, but"),
    (
        [prompt(), decode(9, seq_id=31)],
        r"groups\[1\].cross_block_table: sequence 31 holds 2 blocks but encoder token 8 of 9 needs block 2 "
        r"\(block_size 4\)",
    ),
    ([prompt(1, [])], r"groups\[0\].cross_block_table: sequence 0 holds 0 blocks but encoder token 0 of 1 needs"),
    ([decode(-1)], r"groups\[0\].encoder_seq_len: -1 is outside 0..2147483647"),
    ([decode(2**31)], r"groups\[0\].encoder_seq_len: 2147483648 is outside"),
    ([decode(np.int64(-3))], r"groups\[0\].encoder_seq_len: -3 is outside"),
    ([decode(True)], r"groups\[0\].encoder_seq_len: True is not an integer"),
    ([decode(2.0)], r"groups\[0\].encoder_seq_len: 2.0 is not an integer"),
    ([decode("5")], r"groups\[0\].encoder_seq_len: '5' is not an integer"),
    ([decode(Odd())], r"groups\[0\].encoder_seq_len: .* is not an integer"),
    ([decode(), decode(5, 3)], r"groups\[1\].cross_block_table: 3 is not a sequence of block ids"),
    ([decode(5, np.array(3))], r"groups\[0\].cross_block_table: array\(3\) is not a sequence of block ids"),
    ([decode(5, iter([1, 2]))], r"groups\[0\].cross_block_table: .* is not a sequence of block ids"),
    ([decode(5, [1, -2])], r"groups\[0\].cross_block_table: block id -2 at index 1 is outside 0..2147483647"),
    ([prompt(5, [1, 2**31])], r"groups\[0\].cross_block_table: block id 2147483648 at index 1"),
    ([prompt(), prompt(5, [1, True])], r"groups\[1\].cross_block_table: block id True at index 1 is not an integer"),
    ([decode(5, np.array([1.0, 2.0]))], r"cross_block_table: block id 1.0 at index 0 is not an integer"),
    ([decode(5, np.zeros((2, 2), np.int32))], r"cross_block_table: block id .* is not an integer"),
    ([decode(0, [1, "x"])], r"groups\[0\].cross_block_table: block id 'x' at index 1"),
    ([prompt(0, [-1])], r"groups\[0\].cross_block_table: block id -1"),
    ([decode(block_table=[]), decode(-1)], r"groups\[0\].sequences\[0\].block_table: sequence 0 holds 0 blocks"),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "message"), BAD)
def test_a_bad_step_names_the_field(kernels, groups, message):
    builder = CommonMetadataBuilder(4, encoder_decoder=True, kernels=kernels)
    before = copy.copy(vars(builder))
    with pytest.raises((ValueError, TypeError), match=f"^{message}" if message[0] == "g" else message):
        builder.build(groups)
    assert vars(builder) == before
    assert builder.build([decode()]).cross_block_table.tolist() == [[2, 3]]  # the builder is as good as new


def test_the_bad_group_is_found_behind_one_of_several_sequences(kernels):
    builder = CommonMetadataBuilder(4, encoder_decoder=True, kernels=kernels)
    three = SequenceGroup(False, [Sequence(i, 1, 3, [5]) for i in range(3)], False, 5, [2, 3])
    with pytest.raises(ValueError, match=r"^groups\[1\].cross_block_table: block id -7"):
        builder.build([three, decode(5, [1, -7])])
    assert builder.build([three]).cross_block_table.tolist() == [[2, 3]] * 3


def test_lengths_of_a_step_fit_int32(kernels):
    builder = CommonMetadataBuilder(2**30, encoder_decoder=True, max_seq_len_to_capture=2**31 - 1, kernels=kernels)
    half = SequenceGroup(False, [Sequence(0, 1, 3, [5])], False, 2**30, [1])
    with pytest.raises(ValueError, match=r"^encoder_seq_len: the sum 2147483648 over this step does not fit int32"):
        builder.build([half, half])
    most = half._replace(encoder_seq_len=2**31 - 1, cross_block_table=[1, 2])
    assert builder.build([most]).encoder_seq_start_loc.tolist() == [0, 2**31 - 1]
    with pytest.raises(ValueError, match=r"^encoder_seq_len: the sum 2147483647"):
        builder.build([most], 1)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"layout": "flashinfer", "encoder_decoder": True},
            "layout: flashinfer has no encoder/decoder attention; comm",
        ),
        ({"encoder_decoder": 1}, "encoder_decoder: 1 is not true or false"),
        ({"max_encoder_seq_len_to_capture": 5}, "max_encoder_seq_len_to_capture: given, but encoder_decoder is false"),
        (
            {"encoder_decoder": True, "max_encoder_seq_len_to_capture": 0},
            "max_encoder_seq_len_to_capture: 0 is below 1",
        ),
    ],
)
def test_bad_arguments_name_themselves(arguments, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        CommonMetadataBuilder(4, **arguments)


def test_a_builder_of_decoders_refuses_encoders(kernels):
    with pytest.raises(ValueError, match=r"^groups\[0\].encoder_seq_len: given to a builder that was not made with"):
        CommonMetadataBuilder(4, kernels=kernels).build([decode()])


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
    config = SimpleNamespace(device="cpu")
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
