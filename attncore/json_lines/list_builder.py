"""Batch files of the list builder: one batch per line (JSON Lines) in, its metadata out."""

from __future__ import annotations

from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from attncore.builder.blocks.placeholder_map import Placeholder
from attncore.builder.lists.builder import CommonMetadataBuilder
from attncore.builder.lists.sequence_group import Sequence, SequenceGroup
from attncore.json_lines.json_fields import (
    REQUIRED,
    boolean,
    fields_of,
    integer,
    is_short_name,
    list_of,
    optional,
    read_record,
    refuse_duplicates,
)
from attncore.json_lines.metadata_as_json import LEAST_OF_A_NUMBER, MAX_ANSWER, as_json, fields_of_metadata
from attncore.kernels import KernelsName
from attncore.quoted import quoted_json
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder import CommonAttentionMetadata

_BATCH = {
    "block_size": REQUIRED, "groups": REQUIRED, "sliding_window": None, "chunked_prefill": False,
    "graph_batch_size": None, "max_seq_len_to_capture": None,
}  # fmt: skip
_GROUP = {
    "is_prompt": REQUIRED, "sequences": REQUIRED, "prefix_cache_hit": False, "encoder_seq_len": None,
    "cross_block_table": None, "placeholders": None,
}  # fmt: skip
_PLACEHOLDER = {"offset": REQUIRED, "length": REQUIRED, "item": None, "embedding_start": 0}
_SEQUENCE = {"seq_id": REQUIRED, "query_len": REQUIRED, "context_len": REQUIRED, "block_table": REQUIRED}

_group_fields = itemgetter("is_prompt", "sequences")
_sequence_fields = itemgetter(*_SEQUENCE)
_new = tuple.__new__  # of a named tuple, from a tuple: a third of its constructor's time

# The fields of an answer, by dialect. The block table has its name of the first generation.
_COMMON = (
    "num_prefills", "num_prefill_tokens", "num_decode_tokens", "slot_mapping", "seq_lens", "context_lens",
    "query_start_loc", "seq_start_loc", "block_tables", "max_query_len", "max_prefill_seq_len", "max_decode_seq_len",
    "use_cuda_graph",
)  # fmt: skip
_OUTPUT = {
    "common": _COMMON,
    "rocm": _COMMON,
    "flash": (*_COMMON, "max_decode_query_len"),
    "flashinfer": (*_COMMON, "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
}
# Further fields of an answer to encoder/decoder groups.
_ENCODER_OUTPUT = (
    "encoder_seq_lens", "num_encoder_tokens", "max_encoder_seq_len", "encoder_seq_start_loc", "cross_slot_mapping",
    "cross_block_tables",
)  # fmt: skip


class Batch(NamedTuple):
    """One line of a batch file, its fields checked by name. The builder checks their values."""

    block_size: int
    sliding_window: int | None
    chunked_prefill: bool
    max_seq_len_to_capture: int | None
    cuda_graph_pad_size: int
    groups: list[SequenceGroup]
    encoder_decoder: bool = False
    """Whether a group has an encoder length or a cross table."""


def parse_batch(line: str | bytes) -> Batch:
    """One line to a Batch; ValueError or TypeError that begins with the field's path."""
    text, record = read_record(line)
    if isinstance(record, dict) and "sequences" in record and "groups" not in record:
        raise ValueError(
            "sequences: stand in steps of the persistent builder, which are read with --groups, --speculative or "
            "--context-parallel; batches of the list builder have groups"
        )
    fields = fields_of("", "batch", record, _BATCH)
    block_size = integer("block_size", fields["block_size"], 1)
    window = optional("sliding_window", fields["sliding_window"])
    chunked = boolean("chunked_prefill", fields["chunked_prefill"])
    groups, encoder_decoder = _groups(fields["groups"])
    if text.count('"') != 2 * _count_keys(record):
        refuse_duplicates(text)
    batch_size = optional("graph_batch_size", fields["graph_batch_size"])
    capture, pad = None, -1
    if batch_size is not None:
        if fields["max_seq_len_to_capture"] is None:
            raise ValueError("max_seq_len_to_capture: missing; graph_batch_size needs it")
        capture = integer("max_seq_len_to_capture", fields["max_seq_len_to_capture"], 1)
        num_seqs = sum(len(group.sequences) for group in groups)
        if batch_size < num_seqs:
            raise ValueError(
                f"graph_batch_size: {batch_size} is below the {counted(num_seqs, 'sequence')} of the batch"
            )
        pad = batch_size - num_seqs
    return Batch(block_size, window, chunked, capture, pad, groups, encoder_decoder)


def build_batch(
    batch: Batch, layout: str = "common", kernels: KernelsName | None = None, max_answer: int = MAX_ANSWER
) -> dict[str, Any]:
    """The metadata of a batch as JSON types: ints, bools and lists; ValueError for more than ``max_answer`` bytes."""
    metadata = metadata_of(batch, layout, kernels, max_answer)
    names = _OUTPUT[layout] + _ENCODER_OUTPUT if batch.encoder_decoder else _OUTPUT[layout]
    fields = fields_of_metadata(metadata, names)
    if any(group.placeholders is not None for group in batch.groups):
        fields["multi_modal_placeholder_index_maps"] = {
            name: {"src": one.source_indices, "dest": one.token_indices}
            for name, one in metadata.placeholder_maps.items()
        }
    return as_json(fields, max_answer)


def metadata_of(
    batch: Batch, layout: str = "common", kernels: KernelsName | None = None, max_answer: int = MAX_ANSWER
) -> CommonAttentionMetadata:
    """The metadata of a batch; ValueError where its answer would be of more than ``max_answer`` bytes."""
    builder = _builder(
        batch.block_size, layout, batch.sliding_window, batch.chunked_prefill, batch.max_seq_len_to_capture,
        batch.encoder_decoder, kernels, max_answer,
    )  # fmt: skip
    try:
        return builder.build(batch.groups, batch.cuda_graph_pad_size)
    except (ValueError, TypeError) as error:
        _check_values(batch.groups)
        argument, _, text = str(error).partition(": ")
        if argument == "cuda_graph_pad_size":  # the field from which it is worked out is the line's
            raise ValueError(f"graph_batch_size: {text}") from None
        raise


@lru_cache(maxsize=4)
def _builder(
    block_size: int,
    layout: str,
    window: int | None,
    chunked: bool,
    capture: int | None,
    encoder_decoder: bool,
    kernels: Any,
    max_answer: int,
) -> CommonMetadataBuilder:
    # The lines of a stream mostly share their settings. Few are kept: each keeps memory for the longest of its lines.
    builder = CommonMetadataBuilder(
        block_size,
        layout,
        sliding_window=window,
        chunked_prefill=chunked,
        max_seq_len_to_capture=capture,
        encoder_decoder=encoder_decoder,
        kernels=kernels,
    )
    builder.max_numbers = max_answer // LEAST_OF_A_NUMBER
    return builder


def _groups(records: Any) -> tuple[list[SequenceGroup], bool]:
    """The groups, and whether they are of an encoder/decoder model. Their values are not checked.

    The builder checks each value in any case, so ``build_batch`` looks for a bad one only where the build fails. Where
    a field is missing or unknown, the groups are read again to find its path.
    """
    groups, encoder_decoder = [], False
    try:
        for record in records:
            is_prompt, records_of_group = _group_fields(record)
            sequences = []
            for sequence in records_of_group:
                if len(sequence) != 4:
                    raise KeyError
                sequences.append(_new(Sequence, _sequence_fields(sequence)))
            if len(record) == 2:
                groups.append(_new(SequenceGroup, (is_prompt, sequences, False, None, None, None)))
            elif len(record) == 3 and "prefix_cache_hit" in record:
                hit = record["prefix_cache_hit"]
                groups.append(_new(SequenceGroup, (is_prompt, sequences, hit, None, None, None)))
            elif record.keys() <= _GROUP.keys():
                groups.append(_whole_group(f"groups[{len(groups)}]", is_prompt, sequences, record))
                encoder_decoder |= groups[-1][3:5] != (None, None)
            else:
                raise KeyError
        if groups and isinstance(records, list):
            return groups, encoder_decoder
    except (KeyError, TypeError):
        pass
    groups = [_group(f"groups[{i}]", group) for i, group in enumerate(list_of("groups", records))]
    return groups, any(group[3:5] != (None, None) for group in groups)


def _whole_group(path: str, is_prompt: Any, sequences: list[Sequence], record: dict[str, Any]) -> SequenceGroup:
    length, table = record.get("encoder_seq_len"), record.get("cross_block_table")
    placeholders = _placeholders(f"{path}.placeholders", record.get("placeholders"))
    return SequenceGroup(is_prompt, sequences, record.get("prefix_cache_hit", False), length, table, placeholders)


def _placeholders(path: str, record: Any) -> dict[str, list[Placeholder]] | None:
    """The placeholders of a group by modality; ``item`` is by default the place in the modality's list."""
    if record is None:
        return None
    if not isinstance(record, dict):
        raise TypeError(f"{path}: {quoted_json(record)} is not an object with a list for each modality")
    found: dict[str, list[Placeholder]] = {}
    for modality, ranges in record.items():
        where = f"{path}.{modality}" if is_short_name(modality) else f"{path}[{quoted_json(modality)}]"
        if not isinstance(ranges, list):
            raise TypeError(f"{where}: {quoted_json(ranges)} is not a list")
        found[modality] = []
        for index, one in enumerate(ranges):
            at = f"{where}[{index}]"
            fields = fields_of(f"{at}.", at, one, _PLACEHOLDER)
            item = index if fields["item"] is None else integer(f"{at}.item", fields["item"], 0)
            found[modality].append(
                Placeholder(
                    item,
                    integer(f"{at}.offset", fields["offset"], 0),
                    integer(f"{at}.length", fields["length"], 1),
                    integer(f"{at}.embedding_start", fields["embedding_start"], 0),
                )
            )
    return found


def _check_values(groups: list[SequenceGroup]) -> None:
    """TypeError or ValueError, in the words of JSON, for the first bad value."""
    for i, group in enumerate(groups):
        path = f"groups[{i}]"
        boolean(f"{path}.is_prompt", group.is_prompt)
        boolean(f"{path}.prefix_cache_hit", group.prefix_cache_hit)
        if group.encoder_seq_len is not None:
            integer(f"{path}.encoder_seq_len", group.encoder_seq_len, 0)
        _check_table(f"{path}.cross_block_table", group.cross_block_table)
        list_of(f"{path}.sequences", group.sequences)
        for j, sequence in enumerate(group.sequences):
            _checked_sequence(f"{path}.sequences[{j}]", sequence)


def _count_keys(record: dict[str, Any]) -> int:
    """Number of keys in a checked batch. None of its values is a string, so each key is one pair of quotation marks.

    Those of placeholders are not counted: a batch that has some is always looked through for duplicates.
    """
    groups = record["groups"]
    return len(record) + sum([len(group) + sum(map(len, group["sequences"])) for group in groups])


def _group(path: str, record: Any) -> SequenceGroup:
    fields = fields_of(f"{path}.", path, record, _GROUP)
    records = list_of(f"{path}.sequences", fields["sequences"])
    sequences = []
    for j, sequence in enumerate(records):
        where = f"{path}.sequences[{j}]"
        sequences.append(_new(Sequence, _sequence_fields(fields_of(f"{where}.", where, sequence, _SEQUENCE))))
    return _whole_group(path, fields["is_prompt"], sequences, fields)


def _checked_sequence(path: str, sequence: Sequence) -> None:
    integer(f"{path}.seq_id", sequence.seq_id, None)
    integer(f"{path}.query_len", sequence.query_len, 1)
    integer(f"{path}.context_len", sequence.context_len, 0)
    _check_table(f"{path}.block_table", sequence.block_table)


def _check_table(path: str, table: Any) -> None:
    if table is not None and not isinstance(table, list):
        raise TypeError(f"{path}: {quoted_json(table)} is neither a list nor null")
