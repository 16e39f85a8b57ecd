"""Takes the last step back, which waits for its replay, while its requests are as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncore.builder.device.captured_sizes import of_size
from attncore.builder.persistent.draft_trees import unsettled
from attncore.errors import CaptureError
from attncore.kernels import codes
from attncore.quoted import quoted

if TYPE_CHECKING:
    from attncore.builder.persistent.batch_core import BatchCore
    from attncore.builder.persistent.step_metadata import StepMetadata


def abandon(assembly: Any, metadata: StepMetadata) -> None:
    """``metadata.abandon()``; CaptureError for any step but the last, and where it does not wait for its replay."""
    side = assembly.side
    with assembly.core.enter():
        step = metadata.step
        if step != assembly.last_step or side is None or side.pending != step:
            why = "nothing is to be taken back"
            if side is None or side.name == "copy":
                name = assembly.builder.transport
                why = f"with transport {name!r} no step does, so take its tokens back with batch.rollback_many"
            raise CaptureError(f"abandon: step {step} is not waiting for a replay; {why}")
        if assembly.ahead is not None and assembly.ahead.left:
            raise CaptureError(f"abandon: step {step} has steps ahead; call steps.stop(), which takes back all of them")
        check_unchanged(assembly, metadata, "abandon")
        take_back(assembly, metadata)


def take_back(assembly: Any, metadata: StepMetadata, *more: tuple[Any, ...]) -> None:
    """Takes the last step back, and what was booked with it. ``more``, of ``undo``, is called behind its tokens."""
    core, step = assembly.core, metadata.step
    undo = [
        (np.copyto, core.lengths[codes.COMPUTED], _computed_before(core, metadata)),
        *core.move_back(metadata.moves),
    ]
    undo += more
    if core.ran_trees is not None:
        trees = unsettled(core, assembly.trees_before, metadata.num_actual_reqs)
        undo.append((setattr, core, "ran_trees", trees))
    undo.append((assembly.kernel.take_back, assembly.shapes.of(metadata), step))
    if assembly.side is not None:
        undo.append((assembly.side.take_back, step))
    if assembly.overlap is not None:
        undo.append((assembly.overlap.forget,))
    core.start_moving()
    core.undo.extend(undo)  # in one call: where the roll-back is interrupted, the next call goes on with it
    core.state.roll_back()


def _computed_before(core: BatchCore, metadata: StepMetadata) -> Any:
    """int32[max_num_reqs]: the computed tokens of each row before the step, which moved rows and counted tokens."""
    computed, before = core.lengths[codes.COMPUTED].copy(), _first_positions(metadata)
    computed[: len(before)] = before
    for i, j in reversed(metadata.moves):
        computed[[i, j]] = computed[[j, i]]
    return computed


def _first_positions(metadata: StepMetadata) -> Any:
    """int64[n]: the computed tokens of each request before the step; a rank's ``context_lens`` count its own alone."""
    host = metadata.host
    return host.positions.take(host.query_start_loc[: metadata.num_actual_reqs])


def check_unchanged(assembly: Any, metadata: StepMetadata, what: str, num_steps: int = 1) -> None:
    """CaptureError where a request of the last step left, or was preempted or rolled back, since it was built.

    ``num_steps``: the steps that were booked with it.
    """
    n, order = metadata.num_actual_reqs, assembly.core.order
    computed = assembly.core.lengths[codes.COMPUTED, :n]
    after = _first_positions(metadata) + metadata.host.query_lens[:n] + num_steps - 1
    came_later = assembly.core.came_later(assembly.core.places(slice(n)), metadata)
    for row, req_id in enumerate(metadata.req_ids):
        known = row < len(order) and order.req_ids[row] is req_id and not came_later[row]
        if not known or computed[row] != after[row]:
            raise CaptureError(
                f"{what}: request {quoted(req_id)} has changed since step {metadata.step} was built; {what} a step "
                "before its requests are removed, preempted or rolled back; rows that were swapped are to be swapped "
                "back first"
            )


def refuse_unfinished(assembly: Any, shape: Any) -> None:
    """CaptureError where a step of a captured size waits for its replay, or steps ahead of one do."""
    side, ahead = assembly.side, assembly.ahead
    if side is None:
        return
    if (side.pending >= 0 and side.pending_shape is shape) or (ahead is not None and ahead.waits_for(shape)):
        raise CaptureError(
            f"release: step {assembly.last_step} of {of_size(shape.bucket)} waits for a replay; replay "
            "it, or take it back: metadata.abandon(), and steps.stop() where it was built by run_ahead"
        )
