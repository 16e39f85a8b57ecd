"""The errors of groups of sequences that the kernels refused: texts for their codes, made only on failure."""

from __future__ import annotations

from typing import Any

from attncore import arguments, array_arguments
from attncore.arguments import INT32_MAX, UNREADABLE, own_items
from attncore.kernels import codes
from attncore.quoted import quoted
from attncore.show import counted


def refused_groups(
    groups: Any, code: int, row: int, token: int, block_size: int, window: int | None, layout: str
) -> ValueError:
    """The error of groups that GroupReader.measure refused, at its ``row``."""
    if code == codes.TOO_MANY_SEQ_TOKENS:
        return ValueError("groups: tokens, lengths or pages of this step do not fit int32 in all")
    places = _places(groups)
    if row >= len(places):
        return changed_groups()
    i, j, sequence = places[row]
    path, hit = f"groups[{i}].sequences[{j}]", f"groups[{i}].prefix_cache_hit"
    table = own_items(sequence)[3]
    seq_id, query_len, context_len = _numbers(sequence)
    match code:
        case codes.TOO_FEW_BLOCKS:
            tokens = max(token + 1, context_len + query_len)
            problem = array_arguments.too_few_blocks(len(table), tokens, block_size)
            return ValueError(f"{path}.block_table: sequence {seq_id} {problem}")
        case codes.HIT_ON_DECODE:
            return ValueError(f"{hit}: true on a decode; only a prompt can hit the prefix cache")
        case codes.HIT_WITH_WINDOW:
            return ValueError(f"{hit}: true with sliding_window {window}; a prefix-cache hit excludes a window")
        case codes.CONTEXT_WITHOUT_CHUNKS:
            return ValueError(
                f"chunked_prefill: false, but {path} is a prompt with context_len {context_len} and no prefix_cache_hit"
            )
    return ValueError(
        f"{path}.query_len: {query_len} on a decode; layout {layout} runs one token a decode (flash runs more)"
    )


def beyond_capture(groups: Any, block_size: int, window: int | None, capture: int, layout: str) -> ValueError:
    """The error of decodes that a captured graph cannot hold: the first too long, or too wide for its layout."""
    width = -(-capture // block_size)
    path, blocks = "groups", 0
    for i, j, sequence in _places(groups):
        path, table = f"groups[{i}].sequences[{j}]", own_items(sequence)[3]
        length, blocks = sum(_numbers(sequence)[1:]), 0 if table is None else len(table)
        if window is not None:
            whole = -(-window // block_size)
            length = min(length, whole * block_size + length % block_size)
            blocks = min(blocks, -(-length // block_size))
        if length > capture:
            return ValueError(f"max_seq_len_to_capture: {capture} is below the length {length} of {path}")
        if blocks > width:
            break
    return ValueError(
        f"{path}.block_table: {blocks} blocks exceed the {counted(width, 'column')} of max_seq_len_to_capture "
        f"{capture} (layout {layout} cuts no lookahead)"
    )


def refuse_decodes_without_keys(groups: Any, block_size: int, window: int) -> None:
    """ValueError for a decode of several tokens of which one sees keys that are not in the row of the table, which has
    the blocks of the last one's window.
    """
    for i, j, sequence in _places(groups):
        _, query_len, context_len = _numbers(sequence)
        length = context_len + query_len
        shown = min(length, -(-window // block_size) * block_size + length % block_size)
        seen = min(length, window + query_len - 1)
        is_prompt, table = own_items(groups[i])[0], own_items(sequence)[3]
        if not is_prompt and query_len > 1 and table is not None and shown < seen:
            raise ValueError(
                f"groups[{i}].sequences[{j}].query_len: {query_len} on a decode with sliding_window {window}; its "
                f"tokens see {counted(seen, 'key')}, and its row of the table shows the last {shown}; make the builder "
                "without sliding_window, which layers apply themselves"
            )


def changed_groups() -> ValueError:
    """The error of groups whose sequences are no longer those that GroupReader.read counted."""
    return ValueError("groups: changed while they were read; give each build lists that no other code writes to")


def too_many_placeholders(count: int, most: int) -> ValueError:
    """The error of placeholders that ask for more numbers than an answer of ``attncore build`` may have."""
    return ValueError(
        f"groups: {counted(count, 'token')} of placeholders, with two numbers each, are more than the "
        f"{counted(most, 'number')} allowed here (of `attncore build`, as many as --max-answer bytes hold)"
    )


def _places(groups: Any) -> list[tuple[int, int, Any]]:
    """(group, index in it, sequence) of every row."""
    return [(i, j, sequence) for i, group in enumerate(groups) for j, sequence in enumerate(own_items(group[1]))]


def _numbers(sequence: Any) -> list[int]:
    """seq_id, query_len and context_len as ints, as the kernels read them: an object may hash or add as it likes."""
    return [arguments.integer_or_none(number) or 0 for number in own_items(sequence)[:3]]


def malformed_groups(groups: Any) -> ValueError | TypeError:
    """The error of groups that GroupReader.read refused, for the first wrong field, with its path."""
    try:
        groups = list(groups)
    except UNREADABLE:
        return TypeError(f"groups: {quoted(groups)} is not a list of SequenceGroup")
    if not groups:
        return ValueError("groups: empty; a step needs at least one group")
    after_decode = False
    for index, group in enumerate(groups):
        problem = _malformed_group(f"groups[{index}]", group)
        if problem:
            return problem
        is_prompt = own_items(group)[0]
        if is_prompt and after_decode:
            return ValueError(f"groups[{index}].is_prompt: a prompt after a decode; prompts come first")
        after_decode = after_decode or not is_prompt
    return ValueError("groups: refused by the kernels for a reason that no check names; please report it")


def _malformed_group(path: str, group: Any) -> ValueError | TypeError | None:
    if not isinstance(group, tuple) or len(own_items(group)) < 3:
        return TypeError(f"{path}: {type(group).__name__} is not a SequenceGroup")
    is_prompt, sequences, hit = own_items(group)[:3]
    for name, value in (("is_prompt", is_prompt), ("prefix_cache_hit", hit)):
        if type(value) is not bool:  # an object may lie about its class
            return TypeError(f"{path}.{name}: {quoted(value)} is not true or false")
    if not isinstance(sequences, (list, tuple)):
        return TypeError(f"{path}.sequences: {type(sequences).__name__} is not a list")
    sequences = own_items(sequences)  # the checks call __index__, which may be code that changes the caller's
    if not sequences:
        return ValueError(f"{path}.sequences: empty; a group needs at least one sequence")
    seen: set[int] = set()
    profiled: bool | None = None
    for index, sequence in enumerate(sequences):
        where = f"{path}.sequences[{index}]"
        problem = _malformed_sequence(where, sequence)
        if problem:
            return problem
        seq_id, without_table = _numbers(sequence)[0], own_items(sequence)[3] is None
        if seq_id in seen:
            return ValueError(f"{where}.seq_id: {seq_id} stands twice in its group")
        seen.add(seq_id)
        if profiled not in (None, without_table):
            return ValueError(f"{where}.block_table: null and non-null tables in one group")
        profiled = without_table
    return None


def _malformed_sequence(path: str, sequence: Any) -> ValueError | TypeError | None:
    if not isinstance(sequence, tuple) or len(own_items(sequence)) < 4:
        return TypeError(f"{path}: {type(sequence).__name__} is not a Sequence")
    sequence = own_items(sequence)
    for name, value, least in zip(("seq_id", "query_len", "context_len"), sequence[:3], (None, 1, 0), strict=True):
        number = arguments.integer_or_none(value)
        if number is None:
            return TypeError(f"{path}.{name}: {quoted(value)} is not an integer")
        if least is None and not -(2**63) <= number < 2**63:
            return ValueError(f"{path}.{name}: {number} does not fit 64 bits")
        if least is not None and not least <= number <= INT32_MAX:
            return ValueError(f"{path}.{name}: {number} is outside {least}..{INT32_MAX}")
    _, query_len, context_len = _numbers(sequence)
    if query_len + context_len > INT32_MAX:
        return ValueError(f"{path}.query_len: {query_len} on top of context_len {context_len} does not fit int32")
    bad = None if sequence[3] is None else array_arguments.bad_block_ids(sequence[3], INT32_MAX + 1)
    if bad is None:
        return None
    error, text = bad
    return error(f"{path}.block_table: {text}")
