"""Metadata from fields that another rank sent."""

import dataclasses

import numpy as np
import pytest
import torch

from attncore import BackendConfig, CommonAttentionMetadata
from attncore.builder import (
    BatchSlice,
    CommonMetadataBuilder,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    slice_metadata,
)
from attncore.builder import metadata_from_fields as received
from attncore.builder.fields import ARRAYS, COUNTS, DERIVED, ENCODER_ARRAYS, FIELDS, Length
from attncore.builder.received_metadata import received as metadata_of
from attncore.reference import ReferenceBackend, attncore_backend

SPEC = dataclasses.replace(attncore_backend(), cuda_graph="uniform_decode")


def persistent():
    batch = InputBatch(max_num_reqs=4, max_model_len=32, block_size=4)
    batch.add_request("a", [3, 5, 7], 2)
    batch.add_request("b", [9], 1)
    return MetadataBuilder(batch, max_num_batched_tokens=32).build({"a": 6})


def list_step():
    groups = [
        SequenceGroup(True, [Sequence(0, 6, 2, [3, 5])]),
        SequenceGroup(False, [Sequence(0, 1, 1, [9])]),
    ]
    return CommonMetadataBuilder(4, "flashinfer", chunked_prefill=True).build(groups)


@pytest.mark.parametrize("build", [persistent, list_step])
@pytest.mark.parametrize("send", [np.copy, lambda array: torch.from_numpy(array.copy())])
def test_fields_there_and_back(build, send):
    metadata = build()
    fields = metadata.asdict_zerocopy()
    copy = received({name: send(value) if name in ARRAYS else value for name, value in fields.items()})
    for mine, its in (
        (metadata, copy),
        (metadata.prefill_metadata, copy.prefill_metadata),
        (metadata.decode_metadata, copy.decode_metadata),
    ):
        for name in COUNTS:
            assert getattr(mine, name) == getattr(its, name), name
        for name in ARRAYS:
            assert hasattr(mine, name) == hasattr(its, name)
            if hasattr(mine, name):
                assert np.array_equal(getattr(mine, name), getattr(its, name)), name
    assert (copy.decodes_first, copy.from_groups) == (metadata.decodes_first, metadata.from_groups)


def test_what_was_skipped_is_missing():
    copy = received(persistent().asdict_zerocopy({"block_table"}))
    with pytest.raises(AttributeError):
        copy.block_table  # noqa: B018


@pytest.mark.parametrize("build", [persistent, list_step])
@pytest.mark.parametrize("half", ["prefill_metadata", "decode_metadata"])
def test_a_half_of_the_step_needs_no_field_that_was_skipped(build, half):
    metadata = build()
    for skipped, longest in (({"query_lens"}, getattr(metadata, half)), ({"query_lens", "query_start_loc"}, metadata)):
        arrived = getattr(received(metadata.asdict_zerocopy(skipped)), half)
        assert arrived.max_query_len == longest.max_query_len
        assert not skipped & set(dir(arrived.host))


def test_only_fields_are_skipped():
    class Extended(CommonAttentionMetadata):
        scale: float
        own_field = 1

    metadata = persistent()
    known = {"slot_mapping", "num_reqs", "cross_slot_mapping", "max_query_len", "decode_metadata"}
    assert not known & metadata.asdict_zerocopy(known).keys()
    with pytest.raises(ValueError, match=r"skip_fields: 'slot_maping' is no field of .*; did you mean slot_mapping\?"):
        metadata.asdict_zerocopy(["slot_maping"])
    with pytest.raises(ValueError, match="skip_fields: 3 is no field of metadata"):
        metadata.asdict_zerocopy([3])
    with pytest.raises(ValueError, match="skip_fields: an integer of 16610 bits is no field of metadata"):
        metadata.asdict_zerocopy([10**5000])  # whose digits Python does not print
    with pytest.raises(TypeError, match="skip_fields: 5 is no collection of names"):
        metadata.asdict_zerocopy(skip_fields=5)
    with pytest.raises(ValueError, match=r"skip_fields: .* is no field of metadata"):
        metadata.asdict_zerocopy(skip_fields=np.array(["a", "b"]))
    with pytest.raises(TypeError, match="skip_fields: 'slot_mapping' is a str; give a collection of names"):
        metadata.asdict_zerocopy("slot_mapping")
    extended = metadata_of(metadata.asdict_zerocopy(), None, Extended)
    extended.set_later = 1
    assert extended.asdict_zerocopy({"scale", "own_field", "set_later"}).keys() == extended.asdict_zerocopy().keys()
    with pytest.raises(ValueError, match="skip_fields: 'own_feild' is no field of metadata; did you mean own_field"):
        extended.asdict_zerocopy({"own_feild"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots": [1]}, "fields: 'slots' is no field of metadata"),
        ({"slots": [1], 3: 5}, "fields: 3 is no field of metadata"),
        ({"slot_maping": [1]}, r"fields: 'slot_maping' is no field of metadata; did you mean slot_mapping\?"),
        ({"num_reqs": 1}, "fields: 'num_tokens' is missing; only arrays may be skipped"),
    ],
)
def test_other_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        received(fields)


def test_a_padded_step_says_what_of_it_is_real():
    batch = InputBatch(max_num_reqs=4, max_model_len=16, block_size=4)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8)
    batch.add_request("a", [1, 2], 4)
    builder.capture(4)
    arrived = received(builder.build(bucket=4).asdict_zerocopy())
    assert (arrived.num_reqs, arrived.num_actual_reqs, arrived.num_actual_tokens) == (4, 1, 1)


def test_a_slice_of_a_step_of_the_list_builder_that_is_padded_is_sent():
    """It is of no captured size, and has padded rows that are neither decodes nor prefills."""
    decode = SequenceGroup(False, [Sequence(0, 1, 1, [9])])
    step = CommonMetadataBuilder(4, max_seq_len_to_capture=16).build([decode], 2)
    part = slice_metadata(step, BatchSlice(0, 2, 0, 2))
    arrived = received(part.asdict_zerocopy())
    assert (arrived.num_reqs, arrived.num_decodes, arrived.num_decode_tokens) == (2, 1, 2)
    assert arrived.slot_mapping.tolist() == [37, -1]


def test_the_decodes_of_a_padded_step_are_the_step():
    """As of the step that was sent: a view of it would count the encoder tokens of padded rows."""
    groups = [KVCacheGroup("decoder", 4), KVCacheGroup("encoder", 4, cross=True)]
    batch = InputBatch(max_num_reqs=4, max_model_len=16, max_encoder_len=8, groups=groups)
    config = BackendConfig(num_heads=1, num_kv_heads=1, head_size=8, dtype="float32", block_size=4)
    backend = ReferenceBackend(dataclasses.replace(config, spec=dataclasses.replace(SPEC, pad_seq_len=1)))
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8)
    batch.add_request("a", {"decoder": [1, 2], "encoder": [3]}, 4, encoder_seq_len=3, encoder_computed=True)
    builder.capture(4)
    arrived = received(builder.build(bucket=4).asdict_zerocopy())
    decodes = arrived.decode_metadata
    assert (decodes.num_encoder_tokens, decodes.num_actual_reqs) == (3, 1)


@pytest.mark.parametrize("build", [persistent, list_step])
@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("num_reqs", 2**40, ValueError),
        ("num_reqs", 1, ValueError),
        ("num_tokens", 2**20, ValueError),
        ("num_decodes", -1, ValueError),
        ("num_decodes", 1.0, TypeError),
        ("use_cuda_graph", "no", TypeError),
        ("from_groups", 1, TypeError),
        ("positions", np.zeros(1, np.int64), ValueError),
        ("query_start_loc", np.zeros(9, np.int32), ValueError),
        ("block_table", np.zeros((9, 2), np.int32), ValueError),
        ("num_decodes", 2, ValueError),
        ("num_prefills", 0, ValueError),
        ("num_prefills", 9, ValueError),
        ("num_decode_tokens", 9, ValueError),
        ("num_prefill_tokens", 1, ValueError),
    ],
)
def test_counts_and_arrays_that_disagree_are_refused(build, name, value, error):
    with pytest.raises(error, match=r"^fields\["):
        received(build().asdict_zerocopy() | {name: value})


def test_a_step_of_the_list_builder_with_prompts_has_no_padded_rows():
    """Captured sizes are of decodes: counts that leave rows or tokens over beside a prompt are wrong."""
    fields = list_step().asdict_zerocopy()
    with pytest.raises(ValueError, match=r"^fields\['num_reqs'\]: 2 found, but"):
        received(fields | {"num_decodes": 0})
    with pytest.raises(ValueError, match=r"^fields\['num_tokens'\]: 7 found, but"):
        received(fields | {"num_decode_tokens": 0})


def graph_step():
    builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=16)
    return builder.build([SequenceGroup(False, [Sequence(0, 1, 1, [9])], False)] * 2, 2)


def plain_prompts():
    return CommonMetadataBuilder(4).build([SequenceGroup(True, [Sequence(0, 6, 0, [3, 5])])] * 2)


CUT = [
    name
    for name, field in FIELDS.items()
    if name in ARRAYS - ENCODER_ARRAYS - DERIVED and field.length is not Length.PAGE
]


@pytest.mark.parametrize("build", [persistent, list_step, graph_step, plain_prompts])
@pytest.mark.parametrize("name", CUT)
def test_arrays_that_are_cut_are_refused(build, name):
    fields = build().asdict_zerocopy()
    received(fields)
    if name not in fields:
        return
    missing = build is plain_prompts and name == "block_table"  # such prompts may come without a table
    for length in range(missing, len(fields[name])):
        with pytest.raises(ValueError, match=rf"^fields\['{name}'\]: {length} long, but \d+ tokens and \d requests"):
            received(fields | {name: fields[name][:length]})


def decodes():
    return CommonMetadataBuilder(4).build([SequenceGroup(False, [Sequence(0, 1, 1, [9])])] * 2)


def test_plain_prompts_alone_may_come_without_a_table():
    no_table = {"block_table": np.zeros((0, 0), np.int32)}
    assert received(plain_prompts().asdict_zerocopy() | no_table).block_table.shape == (0, 0)
    with pytest.raises(ValueError, match=r"^fields\['block_table'\]: 0 long, but 2 tokens and 2 requests make 2"):
        received(decodes().asdict_zerocopy() | no_table)
    fields = plain_prompts().asdict_zerocopy() | no_table
    del fields["context_lens"]
    with pytest.raises(ValueError, match=r"^fields\['block_table'\]: 0 long"):
        received(fields)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("query_start_loc", [0, 3, 1], "starts begin with 0 and never descend"),
        ("query_start_loc", [1, 2, 3], "starts begin with 0 and never descend"),
        ("query_start_loc", [0, 1, 2**31 - 1], "it ends with 2147483647, but there are 7 tokens"),
        ("paged_kv_indptr", [0, 2, 99], r"it ends with 99, but there are \d+ paged_kv_indices"),
        ("paged_kv_indices", [], "but there are 0 paged_kv_indices"),
    ],
)
def test_starts_that_lead_beyond_what_they_count_are_refused(name, value, message):
    with pytest.raises(ValueError, match=rf"^fields\['\w+'\]: .*{message}"):
        received(persistent().asdict_zerocopy() | {name: np.array(value, np.int32)})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("query_lens", [2, 6], r"fields\['query_lens'\]: \[2, 6\] found beside query_start_loc \[0, 1, 7\]"),
        ("query_start_loc", [0, 2, 7], r"fields\['query_lens'\]: \[1, 6\] found beside query_start_loc \[0, 2, 7\]"),
        ("decodes_first", False, r"fields\['num_prefill_tokens'\]: 6 found, but query_start_loc counts 1"),
    ],
)
def test_starts_that_say_other_rows_than_the_step_has_are_refused(name, value, message):
    """Views of its decodes and prefills would have starts beyond their tokens."""
    fields = persistent().asdict_zerocopy()
    with pytest.raises(ValueError, match=message):
        received(fields | {name: value if name == "decodes_first" else np.array(value, np.int32)})


def test_tokens_of_encoders_are_left_out_of_views_where_their_starts_were_skipped():
    group = SequenceGroup(True, [Sequence(0, 2, 0, [3])], encoder_seq_len=3, cross_block_table=[4])
    step = CommonMetadataBuilder(4, encoder_decoder=True).build([group])
    view = received(step.asdict_zerocopy({"encoder_query_start_loc"})).prefill_metadata
    assert "cross_slot_mapping" not in dir(view.host)
    assert view.slot_mapping.tolist() == [12, 13]


def with_encoders():
    groups = [KVCacheGroup("decoder", 4), KVCacheGroup("encoder", 4, cross=True)]
    batch = InputBatch(max_num_reqs=4, max_model_len=16, max_encoder_len=8, groups=groups)
    for index, length in enumerate((3, 5)):
        blocks = {"decoder": [1 + index], "encoder": [3 + 2 * index, 4 + 2 * index]}
        batch.add_request(index, blocks, encoder_seq_len=length)
    return MetadataBuilder(batch, max_num_batched_tokens=8).build({0: 1, 1: 3})


@pytest.mark.parametrize(
    ("skipped", "counts"),
    [({"encoder_seq_lens"}, (5, 5)), ({"encoder_seq_lens", "encoder_seq_start_loc"}, (8, 5))],
)
def test_views_of_a_step_that_came_without_lengths_of_encoders_have_the_other_fields(skipped, counts):
    """The counts are those of the step where nothing says which are the view's."""
    view = received(with_encoders().asdict_zerocopy(skipped)).prefill_metadata
    assert (view.encoder_query_lens.tolist(), view.encoder_query_start_loc.tolist()) == ([5], [0, 5])
    assert view.cross_slot_mapping.tolist() == [20, 21, 22, 23, 24]
    assert (view.num_encoder_tokens, view.max_encoder_seq_len) == counts


@pytest.mark.parametrize(
    ("name", "wrong", "what"),
    [
        ("logits_indices", 100, "7 tokens"),
        ("logits_indices", -2, "7 tokens"),
        ("token_to_req_indices", 2, "2 requests"),
    ],
)
def test_indices_of_what_the_step_has_not_are_refused(name, wrong, what):
    fields = persistent().asdict_zerocopy()
    received(fields)
    fields[name] = fields[name].copy()
    fields[name][-1] = wrong
    with pytest.raises(ValueError, match=rf"^fields\['{name}'\]: {wrong} found, but there are {what}"):
        received(fields)


def test_a_tensor_without_values_is_named():
    torch = pytest.importorskip("torch")
    fields = persistent().asdict_zerocopy()
    with pytest.raises(ValueError, match=r"^fields\['positions'\]: on meta, it cannot be copied to the host"):
        received(fields | {"positions": torch.zeros(7, dtype=torch.int64, device="meta")})


@pytest.mark.parametrize("name", ["num_actual_reqs", "num_actual_tokens"])
def test_more_of_a_step_than_there_is_cannot_be_real(name):
    with pytest.raises(ValueError, match=rf"^fields\['{name}'\]: 99 found, more than"):
        received(persistent().asdict_zerocopy() | {name: 99})


@pytest.mark.parametrize("name", sorted(ENCODER_ARRAYS))
def test_arrays_of_encoders_cover_every_request(name):
    groups = [KVCacheGroup("decoder", 4), KVCacheGroup("encoder", 4, cross=True)]
    batch = InputBatch(max_num_reqs=4, max_model_len=32, max_encoder_len=16, groups=groups)
    for request in "ab":
        batch.add_request(request, {"decoder": [3, 5, 7], "encoder": [1, 2]}, encoder_seq_len=6)
    step = MetadataBuilder(batch, max_num_batched_tokens=32).build({"a": 2, "b": 3})
    fields = next(fields for group in step.groups.values() if name in (fields := group.asdict_zerocopy()))
    received(fields)
    with pytest.raises(ValueError, match=rf"^fields\['{name}'\]: \d+ long, but 2 requests with"):
        received(fields | {name: fields[name][:1]})


def test_what_is_no_dict_of_fields_is_named():
    with pytest.raises(TypeError, match=r"^fields: int found"):
        received(5)


@pytest.mark.parametrize(
    ("name", "place", "number", "message"),
    [
        ("block_table", (0, 0), -1, "metadata: the block table names block -1, but the cache holds 10 blocks"),
        ("block_table", (0, 0), 10, "metadata: the block table names block 10, but the cache holds 10 blocks"),
        ("slot_mapping", 0, 40, "kv_cache: 10 blocks found; slot_mapping has a slot in block 10"),
        ("seq_lens", 0, 33, "metadata: block table row 0 has 8 columns, but needs 9 for 33 tokens"),
        ("seq_lens", 0, -1, "metadata: row 0 has seq_lens -1, fewer than its query tokens"),
    ],
)
def test_numbers_that_lead_out_of_the_cache_are_the_readers_to_refuse(name, place, number, message):
    """No cache is known where fields arrive: the reference compares them with the one that it is handed."""
    made = ReferenceBackend(
        BackendConfig(num_heads=2, num_kv_heads=1, head_size=8, dtype="float32", block_size=4, device="cpu")
    )
    fields = {key: value.copy() if key in ARRAYS else value for key, value in persistent().asdict_zerocopy().items()}
    fields[name][place] = number
    query, key, cache = torch.ones(7, 2, 8), torch.ones(7, 1, 8), made.allocate_kv_cache(10)
    with pytest.raises(ValueError, match=f"^{message}"):
        made.impl("a", scale=1.0).forward(query, key, key, cache, received(fields, made))
    assert not cache.any()
