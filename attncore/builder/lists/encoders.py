"""Encoders and cross attention: the encoder fields of the list builder's steps, and the tokens of each type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.arguments import INT32_MAX
from attncore.array_arguments import Int32Array, Int64Array
from attncore.builder.lists import error_texts
from attncore.builder.metadata import CommonAttentionMetadata, check_metadata
from attncore.kernels import codes
from attncore.quoted import quoted
from attncore.show import counted
from attncore.vocabulary import AttentionType

if TYPE_CHECKING:
    from attncore.builder.lists.settings import ListSettings

Fields = dict[str, npt.NDArray[Any]]
Counts = dict[str, int]


def token_counts(metadata: CommonAttentionMetadata, attn_type: AttentionType | str) -> tuple[int, int, int]:
    """(query tokens of prefills, key tokens of prefills, query tokens of decodes) of attention of ``attn_type``.

    By the rules of the first generation, whose steps are all prompts or all decodes: encoder tokens count as
    ``num_encoder_tokens``, including those of decodes, which do not run (``len(metadata.cross_slot_mapping)`` run).
    Raises ValueError for an unknown type, and where the type needs encoder input that the step does not have.
    """
    check_metadata("metadata", metadata)
    try:
        attention_type = AttentionType(attn_type)
    except ValueError:
        raise ValueError(f"attn_type: {quoted(attn_type)} is not one of {', '.join(AttentionType)}") from None
    prefill, decode = metadata.num_prefill_tokens, metadata.num_decode_tokens
    if attention_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        return prefill, prefill, decode
    if not hasattr(metadata, "encoder_seq_lens"):
        raise ValueError(
            f"metadata: attention of type {attention_type} needs encoder_seq_lens, which this step, without encoder "
            "input, lacks"
        )
    encoder = metadata.num_encoder_tokens
    return (encoder, encoder, 0) if attention_type is AttentionType.ENCODER else (prefill, encoder, decode)


def encoder_fields(
    settings: ListSettings, groups: Any, num_seqs: int, num_prefills: int, num_reqs: int, use_graph: bool
) -> tuple[Fields, Counts]:
    """The encoder fields, and their counts, of a step of ``groups`` that the builder has read.

    Prompts run all their encoder tokens and read no table; decodes run none and read ``cross_block_table``. Raises
    ValueError or TypeError that names the group and the field.
    """
    lens, tables = _read(groups, settings.block_size)
    if len(lens) != num_seqs:
        raise error_texts.changed_groups()
    num_tokens = sum(lens)
    if num_tokens + num_reqs - num_seqs > INT32_MAX:
        raise ValueError(f"encoder_seq_len: the sum {num_tokens} over this step does not fit int32")
    width = max(map(len, tables[num_prefills:]), default=0)
    if use_graph:
        width = _graph_width(settings, groups, lens, tables)
    widest_prompt = max(map(len, tables[:num_prefills]), default=0)
    numbers = sum(lens[:num_prefills]) + num_prefills * widest_prompt + num_reqs * (width + 2)
    if settings.max_numbers is not None and numbers > settings.max_numbers:
        raise ValueError(
            f"groups: {counted(num_tokens, 'encoder token')} and cross tables {max(width, widest_prompt)} wide are "
            f"more than the {counted(settings.max_numbers, 'number')} allowed here (of `attncore build`, as many as "
            "--max-answer bytes hold)"
        )
    seq_lens, query_lens = np.ones(num_reqs, np.int32), np.zeros(num_reqs, np.int32)
    seq_lens[:num_seqs] = lens
    query_lens[:num_prefills] = seq_lens[:num_prefills]
    fields: Fields = {
        "encoder_seq_lens": seq_lens,
        "encoder_query_lens": query_lens,
        "encoder_seq_start_loc": _prefix_sums(seq_lens),
        "encoder_query_start_loc": _prefix_sums(query_lens),
        "cross_slot_mapping": _build_slots(settings, groups, query_lens[:num_prefills], tables[:num_prefills]),
        "cross_block_table": np.zeros((num_reqs, width), np.int32),
    }
    _fill_table(settings, groups, tables, num_prefills, fields["cross_block_table"][num_prefills:num_seqs])
    return fields, {"num_encoder_tokens": num_tokens, "max_encoder_seq_len": int(seq_lens.max())}


def _read(groups: Any, block_size: int) -> tuple[list[int], list[Any]]:
    """The encoder length and the cross table of every row; the table is empty where there is none."""
    lens: list[int] = []
    tables: list[Any] = []
    for index, group in enumerate(groups):
        length, table = group[3:5] if len(group) > 4 else (None, None)
        sequences = group[1]
        if not sequences:
            raise error_texts.changed_groups()
        if type(length) is not int or not 0 <= length <= INT32_MAX:
            length = _check_length(index, length, table)
        if table is None or sequences[0][3] is None:
            _check_missing(index, group, length, table)
            table = ()
        else:
            table = _read_table(index, table)
            if len(table) * block_size < length:
                raise _too_few_blocks(index, group, length, len(table), block_size)
        if len(sequences) == 1:
            lens.append(length)
            tables.append(table)
        else:
            lens += [length] * len(sequences)
            tables += [table] * len(sequences)
    return lens, tables


def _build_slots(settings: ListSettings, groups: Any, query_lens: Int32Array, tables: list[Any]) -> Int64Array:
    """Slots of the prompts' encoder tokens; -1 for all tokens of a profiled prompt."""
    held = np.where([len(row) > 0 for row in tables], query_lens, np.int32(0)).astype(np.int32, copy=False)
    # The columns that are read, and not fewer, should a caller's list shrink meanwhile.
    needed = -(-int(held.max(initial=0)) // settings.block_size)
    table = np.empty((len(tables), max([needed, *map(len, tables)])), np.int32)
    _fill_table(settings, groups, tables, 0, table)
    num_held = int(held.sum())
    slot_mapping = np.empty(num_held, np.int64)
    if num_held:
        context = np.zeros(len(held), np.int32)
        row = settings.kernels.fill_slot_mapping(table, context, held, settings.block_size, slot_mapping)
        if row >= 0:
            raise ValueError(f"groups[{_group_of(groups, row)}].encoder_seq_len: its tokens do not fit the cross table")
    if num_held == query_lens.sum():
        return slot_mapping
    whole = np.full(int(query_lens.sum()), codes.PAD_SLOT_ID, np.int64)
    whole[np.repeat(held > 0, query_lens)] = slot_mapping
    return whole


def _fill_table(settings: ListSettings, groups: Any, tables: list[Any], first: int, out: Int32Array) -> None:
    """Writes ``tables`` from row ``first`` on to ``out``, padded with 0."""
    if not len(out):
        return
    row = settings.kernels.fill_block_table(tables[first : first + len(out)], out)
    if row >= 0:
        bad = array_arguments.bad_block_ids(tables[first + row], INT32_MAX + 1)
        error, text = bad or (ValueError, "changed while it was read")
        raise error(f"groups[{_group_of(groups, first + row)}].cross_block_table: {text}")


def _graph_width(settings: ListSettings, groups: Any, lens: list[int], tables: list[Any]) -> int:
    """The fixed width of a captured cross table; wider rows of ``tables`` are cut to it, or a ValueError."""
    name, capture = "max_encoder_seq_len_to_capture", settings.max_encoder_seq_len_to_capture
    if capture is None:
        name, capture = "max_seq_len_to_capture", settings.max_seq_len_to_capture or 0
    if max(lens) > capture:
        index = _group_of(groups, next(row for row, length in enumerate(lens) if length > capture))
        raise ValueError(f"{name}: {capture} is below the encoder_seq_len {groups[index][3]} of groups[{index}]")
    width = -(-capture // settings.block_size)
    for row, table in enumerate(tables):
        if len(table) > width:
            if not settings.dialect.cuts_lookahead:
                raise ValueError(
                    f"groups[{_group_of(groups, row)}].cross_block_table: {len(table)} blocks exceed the {width} "
                    f"columns of {name} {capture} (layout {settings.dialect.name} cuts no lookahead)"
                )
            tables[row] = list(table)[:width]
    return width


def _prefix_sums(lens: Int32Array) -> Int32Array:
    sums = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=sums[1:])
    return sums


def _group_of(groups: Any, row: int) -> int:
    """The index of the group that has ``row``."""
    indices: Iterator[int] = (index for index, group in enumerate(groups) for _ in group[1])
    return next(index for at, index in enumerate(indices) if at == row)


def _check_length(index: int, length: Any, table: Any) -> int:
    """``length`` as int; ValueError or TypeError where it is missing or not an int in range."""
    path = f"groups[{index}].encoder_seq_len"
    if length is None:
        raise ValueError(
            f"{path}: missing, but cross_block_table is given"
            if table is not None
            else f"{path}: missing; every group of an encoder/decoder step has one (0: no encoder input)"
        )
    number = arguments.integer_or_none(length)
    if number is None:
        raise TypeError(f"{path}: {quoted(length)} is not an integer")
    if not 0 <= number <= INT32_MAX:
        raise ValueError(f"{path}: {number} is outside 0..{INT32_MAX}")
    return number


def _check_missing(index: int, group: Any, length: int, table: Any) -> None:
    """ValueError unless the group is profiled, with neither table, or has no encoder tokens to keep."""
    profiled = group[1][0][3] is None
    path = f"groups[{index}].cross_block_table"
    if profiled and table is not None:
        raise ValueError(f"{path}: given, but the group's block tables are null (profiling)")
    if not profiled and length:
        raise ValueError(
            f"{path}: missing; blocks are needed for {counted(length, 'encoder token')} (null: profiling, as block "
            "tables)"
        )


def _read_table(index: int, table: Any) -> Any:
    """The block ids as an array or a list of our own: the caller's may say another length, or change."""
    name = f"groups[{index}].cross_block_table"
    if (why := arguments.why_no_list(table)) is not None:
        raise TypeError(f"{name}: {why}")
    try:
        len(table)
    except TypeError:
        raise TypeError(f"{name}: {quoted(table)} is not a sequence of block ids") from None
    return table if type(table) is np.ndarray else arguments.items(name, table)


def _too_few_blocks(index: int, group: Any, length: int, num_blocks: int, block_size: int) -> ValueError:
    problem = array_arguments.too_few_blocks(num_blocks, length, block_size, "encoder token")
    return ValueError(f"groups[{index}].cross_block_table: sequence {group[1][0][0]} {problem}")
