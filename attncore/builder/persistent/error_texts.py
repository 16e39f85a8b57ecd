"""The errors of steps that the kernels refused: texts for the codes of ``kernels.codes``, made only on failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore import array_arguments
from attncore.kernels import codes
from attncore.quoted import quoted
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.persistent.batch_core import BatchCore


def refused_step(
    core: BatchCore,
    code: int,
    row: int,
    token: int,
    group: int,
    query_lens: Any,
    max_tokens: int,
    max_encoder_tokens: int,
) -> ValueError:
    """The error of a step that StepKernel.check refused; ``query_lens`` are those of the batch's rows."""
    lens = query_lens[: len(core.order)]
    if code == codes.TOO_MANY_TOKENS:
        return ValueError(
            f"scheduled: {int(lens.sum())} tokens in this step exceed max_num_batched_tokens {max_tokens}; "
            "schedule fewer or build the builder for more"
        )
    if code == codes.TOO_MANY_SEQ_TOKENS:
        what = "their sum" if core.cross is None else "their sum, or that of encoder_seq_lens,"
        return ValueError(f"seq_lens: {what} over this step does not fit int32; schedule fewer requests")
    if code == codes.TOO_MANY_ENCODER_TOKENS:
        return ValueError(
            f"scheduled: {token} encoder tokens in this step exceed max_num_encoder_tokens {max_encoder_tokens}; "
            "let fewer new requests run or build the builder for more"
        )
    req_id, computed = core.order.req_ids[row], core.num_computed(row)
    who = f"row {row} (request {quoted(req_id)})"
    if code == codes.TOO_LONG:
        return ValueError(
            f"scheduled: {who} has {counted(computed, 'computed token')} and {int(lens[row])} more exceed "
            f"max_model_len {core.max_model_len}"
        )
    table = core.tables[core.groups[group].name]
    block_size, index = table.group.block_size, token // table.group.block_size
    what = "encoder token" if table.group.cross else "token"
    if len(core.groups) > 1:
        who += f" in group {table.group.name!r}"
    if code == codes.NULL_BLOCK:
        return ValueError(
            f"block_table: {who} would write {what} {token} to block 0, the null block "
            f"(index {index}, block_size {block_size})"
        )
    tokens = core.encoder_len(row) if table.group.cross else computed + int(lens[row])
    problem = array_arguments.too_few_blocks(len(table.held(row)), tokens, block_size, what)
    return ValueError(f"block_table: {who} {problem} (append_blocks)")


def without_slot(core: BatchCore, row: int) -> ValueError:
    """The error of a step that runs a preempted request before ``append_blocks`` gave it all it takes."""
    held = core.held(row)
    missing = next((name for name in (*core.states, *core.tables) if not held[name]), "")
    what = "slot" if missing in core.states else "block"
    return ValueError(
        f"scheduled: row {row} (request {quoted(core.order.req_ids[row])}) was preempted and rests until it has a slot "
        f"in each group of states, and blocks; it has no {what} in group {missing!r} (append_blocks)"
    )


def refused_tokens(core: BatchCore, column: str, row: int, query_lens: Any) -> ValueError:
    """The error of a step that runs tokens which a column has not."""
    computed = core.num_computed(row)
    return ValueError(
        f"{column}: row {row} (request {quoted(core.order.req_ids[row])}) runs tokens {computed} to "
        f"{computed + int(query_lens[row]) - 1}, more than it was given and the column is wide; give the request its "
        "tokens (column.give), or make the column wider"
    )


def refused_tokens_ahead(core: BatchCore, column: str, row: int) -> ValueError:
    """The error of steps ahead behind whose first a request has tokens that a column was given."""
    return ValueError(
        f"{column}: row {row} (request {quoted(core.order.req_ids[row])}) was given tokens behind that of position "
        f"{core.num_computed(row)}, but only the first of steps ahead has one of the column; build steps until these "
        "have run, or let the request rest (scheduled={request: 0})"
    )


def refused_bucket(core: BatchCore, code: int, row: int, count: int, query_lens: Any, shape: Any) -> ValueError:
    """The error of a step that does not fit the captured size that it should be padded to."""
    name, each = f"bucket: {counted(shape.num_reqs, 'row')}", shape.query_len
    if code == codes.TOO_MANY_ROWS:
        return ValueError(f"{name} captured, but this step has {counted(count, 'request')}; choose a larger one")
    if code == codes.BEYOND_SIZE:
        return ValueError(
            f"bucket: {counted(shape.num_tokens, 'token')} captured, but this step has {count}; choose a larger one"
        )
    if code == codes.TOO_MANY_SEQ_TOKENS:
        return ValueError(
            f"{name}, the padded ones included, have lengths whose sum does not fit int32; schedule fewer "
            "requests, or build without a bucket"
        )
    who = f"row {row} (request {quoted(core.order.req_ids[row])})"
    if code == codes.ENCODER_NOT_CAPTURED:
        return ValueError(f"{name}, and {who} runs its encoder tokens in this step; run it without a graph")
    return ValueError(
        f"{name} captured with {counted(each, 'token')} each, but {who} runs {int(query_lens[row])}; "
        f"schedule {each} of every request, or build without a bucket and run the step without a graph"
    )
