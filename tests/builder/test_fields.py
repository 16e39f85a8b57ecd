"""Every field is declared once: what handles fields by name agrees with the table, or is derived from it."""

import inspect
import itertools
import re

import numpy as np
import pytest

from attncore.builder import (
    CommonAttentionMetadata,
    CommonMetadataBuilder,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    fields,
    metadata_from_fields,
)
from attncore.builder.device.arena import ArenaRing, Capacity
from attncore.builder.fields import FIELDS, Field, Length, Owner, Pad
from attncore.builder.persistent.step_metadata import StepMetadata
from attncore.json_lines import list_builder, persistent_builder
from attncore.step_arrays import StepArrays

PAD_SEQ_LEN = 1
PUBLIC = {name: field for name, field in FIELDS.items() if not field.internal}


def persistent_step(kernels, *, bucket=None):
    """A decode and a prefill over two decoder groups and an encoder; or two decodes padded to ``bucket``."""
    groups = [KVCacheGroup("full", 4), KVCacheGroup("large", 8), KVCacheGroup("cross", 4, cross=True)]
    batch = InputBatch(max_num_reqs=6, max_model_len=32, groups=groups, max_encoder_len=8, spans=True, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=32, decode_threshold=2, draft_trees=True)
    builder._backends.pad_seq_len = PAD_SEQ_LEN
    batch.add_request("a", {"full": [1, 2], "large": [1], "cross": [5]}, 5, encoder_seq_len=3, encoder_computed=True)
    batch.add_request("b", {"full": [3, 4], "large": [2], "cross": [6]}, 1, encoder_seq_len=4, encoder_computed=True)
    if bucket is None:
        batch.set_spans("b", [(2, 5)])
        return builder.build({"b": 5})
    builder.capture(bucket)
    return builder.build(bucket=bucket)


def list_step(kernels, layout="flash", pad=-1, **options):
    builder = CommonMetadataBuilder(4, layout, max_seq_len_to_capture=32, kernels=kernels, **options)
    encoder = {"encoder_seq_len": 3, "cross_block_table": [7]} if options.get("encoder_decoder") else {}
    decodes = [SequenceGroup(False, [Sequence(i, 1, 4 + i, [1, 2, 3])], **encoder) for i in range(2)]
    return builder.build(decodes, pad)


def length_of(field, metadata):
    """What a field's length comes to in a step."""
    n = metadata.num_reqs
    return {
        Length.TOKEN: metadata.num_tokens, Length.REQUEST: n, Length.START: n + 1, Length.TABLE: n,
    }.get(field.length)  # fmt: skip


def test_step_arrays_describes_every_field_and_no_other():
    """The type and the docstring of each attribute say its dtype, the docstring its length."""
    attribute = re.compile(r'^    (\w+): Int(32|64)s = DECLARED\n    """int(32|64)\[(.+?)\](?=[:,])', re.MULTILINE)
    described = {name: found for name, *found in attribute.findall(inspect.getsource(StepArrays))}
    assert list(described) == list(StepArrays.__annotations__)
    assert described.keys() == PUBLIC.keys()
    for name, field in PUBLIC.items():
        bits = str(8 * np.dtype(field.dtype).itemsize)
        assert described[name] == [bits, bits, field.length.value], name


def test_a_persistent_step_has_what_the_table_says(kernels):
    metadata = persistent_step(kernels)
    for name, field in PUBLIC.items():
        value = getattr(metadata, name)
        assert value.dtype == field.dtype, name
        if (length := length_of(field, metadata)) is not None:
            assert len(value) == length, name


@pytest.mark.parametrize("layout", ["common", "flash", "flashinfer", "rocm"])
def test_a_list_step_has_what_the_table_says(kernels, layout):
    encoder = layout != "flashinfer"
    for pad in (-1, 2):
        metadata = list_step(kernels, layout, pad, encoder_decoder=encoder)
        for name, field in PUBLIC.items():
            built = {"": False, "`flashinfer`": layout == "flashinfer", "encoder/decoder": encoder}
            has = built.get(field.builders.lists, name not in fields.ENCODER_ARRAYS or encoder)
            assert hasattr(metadata, name) == has, name
            if not has:
                continue
            value = getattr(metadata, name)
            assert value.dtype == field.dtype, name
            length = length_of(field, metadata)
            if length is not None:
                assert len(value) == length - (0 if field.list_pads else max(pad, 0)), name


def padded_as(field, array, num_rows, num_tokens, *, own_row=False):
    """What the rule says of the padded part of ``array``, of a step of so many rows and tokens."""
    count = len(array)
    match field.pad:
        case Pad.SEQ_LEN:
            return [PAD_SEQ_LEN] * (count - num_rows)
        case Pad.REPEAT:
            return [array[num_rows]] * (count - num_rows - 1)
        case Pad.GROW:
            return [array[num_rows] + PAD_SEQ_LEN * k for k in range(1, count - num_rows)]
        case Pad.LAST_ROW:
            return [row if own_row else count - 1 for row in range(num_tokens, count)]
        case int():
            return [field.pad] * (count - (num_tokens if field.length is Length.TOKEN else num_rows))
    raise AssertionError(f"{field.name} has no rule")


def check_padding(metadata, num_rows, *, own_row=False):
    for name, field in PUBLIC.items():
        if (
            field.length in (Length.PAGE, Length.ENCODER_TOKEN, Length.TABLE)
            or field.derive
            or getattr(metadata, name, None) is None
        ):
            continue
        if own_row and not field.list_pads:
            continue
        array = getattr(metadata, name).tolist()
        expected = padded_as(field, array, num_rows, num_rows, own_row=own_row)
        assert array[len(array) - len(expected) :] == expected, name
        assert expected, name


def test_padded_rows_follow_the_rules(kernels):
    check_padding(persistent_step(kernels, bucket=4), 2)
    for layout in ("flash", "flashinfer"):
        check_padding(list_step(kernels, layout, 2, encoder_decoder=layout == "flash"), 2, own_row=True)


def test_arenas_hold_every_field_once():
    ring = ArenaRing(Capacity(40, 7, 9), [4, 8, 4], True, 1)
    views = ring.views(ring.capacity)[0]
    of = {owner: {f.name for f in FIELDS.values() if f.owner is owner} for owner in Owner}
    in_arena = {name for name, field in FIELDS.items() if field.length not in (Length.TABLE, Length.PAGE)}
    in_arena -= fields.DERIVED
    assert views.fields.keys() == (of[Owner.STEP] | of[Owner.ENCODER]) & in_arena
    for group in views.groups[:-1]:
        assert group.keys() == (of[Owner.GROUP] | of[Owner.BLOCK_SIZE]) & in_arena
    assert views.groups[-1].keys() == {"slot_mapping"} | (of[Owner.BLOCK_SIZE] & in_arena)
    spans = []
    for name, array in itertools.chain(views.fields.items(), *(g.items() for g in views.groups)):
        start = array.__array_interface__["data"][0]
        spans.append((start, start + array.nbytes, name))
    spans = sorted({(start, stop) for start, stop, _ in spans})
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_broadcasting_carries_what_the_table_says(kernels):
    for metadata in (persistent_step(kernels), list_step(kernels)):
        sent = metadata.asdict_zerocopy()
        carried = {name for name in PUBLIC if hasattr(metadata, name)} - fields.DERIVED
        assert sent.keys() & fields.ARRAYS == carried
        arrived = metadata_from_fields(sent)
        for name in carried | fields.DERIVED & {name for name in PUBLIC if hasattr(metadata, name)}:
            assert getattr(arrived, name).tolist() == getattr(metadata, name).tolist(), name


def test_json_lines_name_fields_of_the_table():
    named = {
        *list_builder._COMMON,
        *list_builder._ENCODER_OUTPUT,
        *persistent_builder._SHARED,
        *persistent_builder._OF_GROUP,
    }
    aliases = {"block_tables": "block_table", "cross_block_tables": "cross_block_table"}
    assert {aliases.get(name, name) for name in named} <= PUBLIC.keys() | set(fields.COUNTS)


def test_counts_are_those_of_metadata(kernels):
    metadata = persistent_step(kernels)
    for name in (*fields.COUNTS, *fields.ACTUAL_COUNTS):
        assert isinstance(getattr(metadata, name), int), name
        assert name in CommonAttentionMetadata.__annotations__ or name in StepMetadata.__annotations__


def test_a_new_field_is_an_entry_of_the_table(monkeypatch):
    """A field that is added to the table is laid out, sliced and broadcast by name, without another line of code."""
    added = Field("num_draft_tokens", np.int32, Length.REQUEST, pad=0)
    monkeypatch.setitem(FIELDS, added.name, added)
    ring = ArenaRing(Capacity(8, 4), [4], False, 1)
    assert ring.views(ring.capacity)[0].fields[added.name].shape == (4,)
