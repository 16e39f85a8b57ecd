"""The errors of adopted steps that the kernel refused: texts for the codes of ``kernels.codes``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.kernels import codes
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.adopted.given import Given
    from attncore.builder.adopted.settings import Settings


def refused_step(
    code: int, row: int, starts: Any, lengths: Any, given: Given, settings: Settings, query_len: int
) -> ValueError:
    """The error of a step of these host arrays (``lengths`` may be None) and tensors, which AdoptedRows refused.

    ``query_len`` is that of the captured size.
    """
    rows, columns, slots = len(starts) - 1, given.block_table.shape[1], len(given.slot_mapping)
    match code:
        case codes.TOO_MANY_ROWS if lengths is None or rows > settings.max_num_reqs or rows < 0 or row == 0:
            return ValueError(
                f"host_query_start_loc: {counted(rows, 'row')} found, {settings.max_num_reqs} are the most "
                "(max_num_reqs)"
            )
        case codes.TOO_MANY_ROWS:
            return ValueError(
                f"host_seq_lens: {counted(len(lengths), 'length')} found for {counted(rows, 'row')}; give one each"
            )
        case codes.STARTS_NOT_AT_0:
            return ValueError(f"host_query_start_loc: it begins at {starts[0]}; give sums from 0 on")
        case codes.STARTS_FALL:
            return ValueError(
                f"host_query_start_loc: row {row} begins at token {starts[row]} and ends at {starts[row + 1]}; give "
                "prefix sums"
            )
        case codes.TOO_MANY_TOKENS:
            return ValueError(
                f"host_query_start_loc: {starts[-1]} tokens in this step exceed max_num_tokens "
                f"{settings.max_num_tokens}"
            )
        case codes.TOO_FEW_SLOTS:
            return ValueError(
                f"slot_mapping: {counted(slots, 'slot')} found for {counted(starts[-1], 'token')}; give one each"
            )
        case codes.TOO_SHORT:
            tokens = starts[row + 1] - starts[row]
            return ValueError(
                f"host_seq_lens: row {row} has {counted(lengths[row], 'key')}, fewer than its "
                f"{counted(tokens, 'token')}"
            )
        case codes.TOO_LONG:
            return ValueError(
                f"host_seq_lens: row {row} has {lengths[row]}, above max_model_len {settings.max_model_len}"
            )
        case codes.BEYOND_TABLE:
            keys = 1 if lengths is None else lengths[row]
            return ValueError(
                f"host_seq_lens: row {row} has {keys}, but its table of {counted(columns, 'column')} holds "
                f"{counted(columns * settings.block_size, 'token')} (block_size {settings.block_size})"
            )
        case codes.SLOTS_NOT_PADDED:
            return ValueError(
                f"slot_mapping: {counted(slots, 'slot')} found for a captured size of {counted(rows, 'row')} of "
                f"{counted(query_len, 'token')}; pad it "
                f"with -1 to {rows * query_len}"
            )
        case codes.QUERY_NOT_CAPTURED:
            return ValueError(
                f"capturing: not {counted(rows, 'row')} of {counted(query_len, 'token')} each (padded rows behind "
                f"them have none), with {counted(rows * query_len, 'slot')}; a graph is captured over decodes of one "
                "length"
            )
    return ValueError("host_seq_lens: their sum over this step does not fit int32; schedule fewer requests")
