"""Batch files of the persistent builder: one step per line (JSON Lines) in, its metadata out.

A line lists the requests of a step with the blocks that they hold. It is built by an InputBatch and a MetadataBuilder
of its own, so the rules are the persistent builder's: decodes first, block 0 is the null block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attncore import array_arguments
from attncore.arguments import INT32_MAX
from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.persistent.builder import MetadataBuilder
from attncore.builder.persistent.input_batch import InputBatch
from attncore.builder.persistent.kv_cache_group import NULL_BLOCK_ID, ONLY_GROUP, KVCacheGroup
from attncore.builder.persistent.step_metadata import StepMetadata
from attncore.json_lines.json_fields import REQUIRED, fields_of, integer, list_of, read_record, refuse_duplicates
from attncore.json_lines.metadata_as_json import MAX_ANSWER, as_json, check_numbers, fields_of_metadata
from attncore.kernels import KernelsName
from attncore.quoted import quoted_json
from attncore.show import counted

_SHARED = (
    "num_decodes", "num_decode_tokens", "num_prefills", "num_prefill_tokens", "seq_lens", "context_lens", "query_lens",
    "query_start_loc", "seq_start_loc", "positions", "token_to_req_indices", "logits_indices", "max_query_len",
    "max_seq_len", "max_prefill_seq_len", "max_decode_seq_len", "max_decode_query_len",
)  # fmt: skip
_OF_GROUP = ("slot_mapping", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


class StepOptions(NamedTuple):
    """The options that all lines share. Blocks hold ``block_size`` tokens on each of ``world_size`` ranks."""

    groups: tuple[KVCacheGroup, ...] | None = None
    """None: one group, whose block size each line gives."""
    decode_threshold: int = 1
    world_size: int = 1
    rank: int = 0
    interleave: int = 1
    max_answer: int = MAX_ANSWER
    """Bytes of the longest answer."""


class StepSequence(NamedTuple):
    """One request of a step."""

    seq_id: int
    query_len: int
    context_len: int
    tables: dict[str, list[int]]
    """Blocks by group name."""


class StepLine(NamedTuple):
    """One line, checked so far that the persistent builder accepts it."""

    groups: tuple[KVCacheGroup, ...]
    """Their block sizes count the tokens of a block on all ranks together."""
    sequences: list[StepSequence]


def parse_step(line: str | bytes, options: StepOptions) -> StepLine:
    """One line to a StepLine; ValueError or TypeError that begins with the field's path."""
    text, record = read_record(line)
    known = {"sequences": REQUIRED} if options.groups else {"block_size": REQUIRED, "sequences": REQUIRED}
    if isinstance(record, dict):
        if "groups" in record and "sequences" not in record:
            raise ValueError(
                "groups: stand in batches of the list builder, which are read without --groups, --speculative and "
                "--context-parallel; steps of the persistent builder have sequences"
            )
        if "block_size" in known and "block_size" not in record:
            raise ValueError("block_size: missing; without --groups each step gives it, and one block_table a sequence")
    fields = fields_of("", "batch", record, known)
    refuse_duplicates(text)
    groups = options.groups or (KVCacheGroup(ONLY_GROUP, integer("block_size", fields["block_size"], 1)),)
    _check_ranks(groups[0].block_size, options)
    groups = tuple(group._replace(block_size=group.block_size * options.world_size) for group in groups)
    sequences = [
        _sequence(f"sequences[{index}]", one, groups, options.groups is not None)
        for index, one in enumerate(list_of("sequences", fields["sequences"]))
    ]
    seen: set[int] = set()
    for index, sequence in enumerate(sequences):
        if sequence.seq_id in seen:
            raise ValueError(f"sequences[{index}].seq_id: {sequence.seq_id} stands twice in one step")
        seen.add(sequence.seq_id)
    _check_sums(groups, sequences, options.max_answer)
    longest = _longest(sequences)
    for index, sequence in enumerate(sequences):
        for group, table in zip(groups, _tables(groups, longest, sequence).values(), strict=True):
            path = f"sequences[{index}].{f'block_tables.{group.name}' if options.groups else 'block_table'}"
            passed = max(0, sequence.context_len + 1 - group.sliding_window) if group.sliding_window else 0
            _check_places(path, table, passed // group.block_size)
    return StepLine(groups, sequences)


def build_step(step: StepLine, options: StepOptions, kernels: KernelsName | None = None) -> dict[str, Any]:
    """The metadata of a step as JSON types: ints and lists.

    Fields that the groups share stand once, with ``seq_ids`` in the order of the batch's rows. The fields of each group
    stand under ``groups`` by its name, or beside the shared ones where the options state no groups.
    """
    groups, sequences = step
    longest = _longest(sequences)
    batch = InputBatch(max_num_reqs=len(sequences), max_model_len=longest, groups=groups, kernels=kernels)
    for sequence in sequences:
        batch.add_request(sequence.seq_id, _tables(groups, longest, sequence), sequence.context_len)
    ranks = None
    if options.world_size > 1:
        block_size = groups[0].block_size
        ranks = ContextParallel.of_virtual_blocks(block_size, options.world_size, options.rank, options.interleave)
    builder = MetadataBuilder(
        batch,
        max_num_batched_tokens=sum(sequence.query_len for sequence in sequences),
        decode_threshold=options.decode_threshold,
        context_parallel=ranks,
        depth=1,
    )
    metadata = builder.build({sequence.seq_id: sequence.query_len for sequence in sequences})
    answer = {"seq_ids": list(metadata.req_ids)} | fields_of_metadata(metadata, _SHARED)
    own = {group.name: _of_group(metadata.groups[group.name]) for group in groups}
    return as_json(answer | ({"groups": own} if options.groups else own[groups[0].name]), options.max_answer)


def _of_group(metadata: StepMetadata) -> dict[str, Any]:
    fields = fields_of_metadata(metadata, _OF_GROUP)
    return {"slot_mapping": fields.pop("slot_mapping"), "block_tables": metadata.host.block_table} | fields


def _longest(sequences: list[StepSequence]) -> int:
    """Tokens of the longest sequence after this step; block tables are as wide as it needs."""
    return max(sequence.context_len + sequence.query_len for sequence in sequences)


def _tables(groups: tuple[KVCacheGroup, ...], longest: int, sequence: StepSequence) -> dict[str, list[int]]:
    """The blocks of a sequence as far as a table that holds ``longest`` tokens has columns for them."""
    return {group.name: sequence.tables[group.name][: -(-longest // group.block_size)] for group in groups}


def _check_ranks(block_size: int, options: StepOptions) -> None:
    if block_size % options.interleave:
        raise ValueError(
            f"block_size: {block_size} cannot be shared out {counted(options.interleave, 'token')} in turn"
        )
    if block_size * options.world_size > INT32_MAX:
        raise ValueError(f"block_size: {block_size} on {counted(options.world_size, 'rank')} does not fit int32")


def _sequence(path: str, record: Any, groups: tuple[KVCacheGroup, ...], by_name: bool) -> StepSequence:
    tables_field = "block_tables" if by_name else "block_table"
    known = dict.fromkeys(("seq_id", "query_len", "context_len", tables_field), REQUIRED)
    fields = fields_of(f"{path}.", path, record, known)
    seq_id = integer(f"{path}.seq_id", fields["seq_id"], None)
    query_len = integer(f"{path}.query_len", fields["query_len"], 1)
    context_len = integer(f"{path}.context_len", fields["context_len"], 0)
    if query_len + context_len > INT32_MAX:
        raise ValueError(f"{path}.query_len: {query_len} on top of context_len {context_len} does not fit int32")
    where, given = f"{path}.{tables_field}", fields[tables_field]
    if by_name:
        given = fields_of(f"{where}.", where, given, dict.fromkeys((group.name for group in groups), REQUIRED))
    else:
        given = {groups[0].name: given}
    for group in groups:
        at = f"{where}.{group.name}" if by_name else where
        _check_table(at, given[group.name], seq_id, context_len, context_len + query_len, group.block_size)
    return StepSequence(seq_id, query_len, context_len, {group.name: given[group.name] for group in groups})


def _check_table(path: str, table: Any, seq_id: int, context_len: int, seq_len: int, block_size: int) -> None:
    if not isinstance(table, list):
        raise TypeError(f"{path}: {quoted_json(table)} is not a list")
    if bad := array_arguments.bad_block_ids(table, INT32_MAX + 1):
        kind, text = bad
        raise kind(f"{path}: {text}")
    if len(table) * block_size > INT32_MAX:
        raise ValueError(f"{path}: {counted(len(table), 'block')} of {counted(block_size, 'token')} do not fit int32")
    if len(table) * block_size < seq_len:
        problem = array_arguments.too_few_blocks(len(table), seq_len, block_size)
        raise ValueError(f"{path}: sequence {seq_id} {problem}")
    for index in range(context_len // block_size, (seq_len - 1) // block_size + 1):
        if table[index] == NULL_BLOCK_ID:
            raise ValueError(
                f"{path}: sequence {seq_id} would write token {max(context_len, index * block_size)} to block "
                f"{NULL_BLOCK_ID}, the null block (index {index}, block_size {block_size})"
            )


def _check_places(path: str, table: list[int], first: int) -> None:
    """ValueError where a block stands twice, or the null block from index ``first`` on, which no window has passed.

    The batch would refuse them too, in the words of its argument.
    """
    if NULL_BLOCK_ID not in table and len(set(table)) == len(table):
        return
    places: dict[int, int] = {}
    for index, block in enumerate(table):
        if block == NULL_BLOCK_ID:
            if index >= first:
                raise ValueError(
                    f"{path}: block {block} at index {index}, the null block, where no window has passed; give the "
                    "tokens there a block of their own"
                )
        elif (before := places.setdefault(block, index)) != index:
            raise ValueError(
                f"{path}: block {block} stands at index {before} and again at {index}; give each place its own"
            )


def _check_sums(groups: tuple[KVCacheGroup, ...], sequences: list[StepSequence], max_answer: int) -> None:
    """ValueError where lengths overflow int32, or the answer, and so the builder's memory, would be too large."""
    tokens = sum(sequence.query_len for sequence in sequences)
    if sum(sequence.query_len + sequence.context_len for sequence in sequences) > INT32_MAX:
        raise ValueError("sequences: their lengths do not fit int32 in all")
    columns = sum(-(-_longest(sequences) // group.block_size) for group in groups)
    per_token = 2 + len(groups)  # positions, token_to_req_indices; slots
    per_sequence = 7 + 2 * len(groups)  # the lengths and starts, seq_ids; page counts
    check_numbers(
        "sequences",
        f"{counted(tokens, 'token')} and tables of {len(sequences)} x {columns} blocks",
        per_token * tokens + (per_sequence + columns) * len(sequences),
        max_answer,
    )
