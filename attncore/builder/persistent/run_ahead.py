"""``builder.run_ahead``: builds a step and books those behind it, which the device makes out of it by itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from attncore import arguments
from attncore.arguments import INT32_MAX
from attncore.builder.persistent import error_texts
from attncore.builder.persistent.steps_ahead import StepsAhead
from attncore.kernels import codes
from attncore.quoted import quoted
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.device.by_copy import CopyTransport
    from attncore.builder.persistent.assembly import Assembly

_ALL_REQUESTS: Mapping[Any, int] = MappingProxyType({})


class RunsAhead:
    """The part of MetadataBuilder that runs steps ahead."""

    _assembly: Assembly
    _core: Any
    _overlap: Any
    _answer: Any
    _sent_ahead: Any

    def run_ahead(self, num_steps: int, *, bucket: int, scheduled: Mapping[Any, int] = _ALL_REQUESTS) -> StepsAhead:
        """Builds a step of one token for every request, and books ``num_steps - 1`` more that follow without a build.

        The step is padded to ``bucket``, one of ``captured``, and each replay of its graph is a step: the device
        advances lengths, positions, slots and pages by itself. ``scheduled`` may name requests with 0, which rest in
        all of these steps. All others have run ``num_steps`` tokens afterwards, for which they hold blocks already:
        take back those of a request that ended early with ``batch.rollback_many``. ``steps.stop()`` gives back what was
        not replayed; until then, or until the last replay, no step can be built.

        Raises ValueError where a token has no block or a limit is exceeded within these steps, and where the builder
        or a backend cannot run ahead (the text says why); CaptureError where the bucket was not captured or steps ahead
        are left; nothing has changed then. An interrupted call has happened (``last_step``, ``steps_ahead``), or
        nothing has changed.
        """
        if self._sent_ahead is not None and self._core.ran_trees is None:
            steps = self._sent_ahead.run_ahead(num_steps, bucket, None if scheduled is _ALL_REQUESTS else scheduled)
            if steps is not None:
                return steps  # type: ignore[no-any-return]
        assembly, core = self._assembly, self._core
        num_steps = arguments.integer("num_steps", num_steps, 1, core.max_model_len)
        assembly.refuse_while_capturing("run_ahead")
        shape = assembly.shapes.find(bucket)
        with core.enter():
            assembly.refuse_closed()
            side = _check_can_run_ahead(assembly, shape)
            given = _given(scheduled)
            # All of it ahead of the build: that sends its step, which takes the place of the last one on the device.
            _check_rows(assembly, given, num_steps)
            rows = np.flatnonzero(assembly.query_lens[: len(core.order)])
            _check_sum(core, shape, rows, num_steps)
            if core.spans is not None:
                core.spans.check_ahead(rows.tolist(), num_steps)
            if self._overlap is not None:
                self._overlap.overlapped = False
            metadata = assembly.build(shape, given, 1, not given)
            computed = core.lengths[codes.COMPUTED, : metadata.num_actual_reqs]
            core.undo.append((setattr, core, "ahead", core.ahead))
            core.undo.append((setattr, assembly, "ahead", assembly.ahead))
            core.undo.append((np.copyto, computed, computed.copy()))
            side.start_ahead(shape)
            steps = StepsAhead(assembly, side, shape, metadata, self._answer(metadata), num_steps)
            np.add(computed, num_steps - 1, out=computed)
            assembly.ahead = core.ahead = steps
        return steps

    @property
    def steps_ahead(self) -> StepsAhead | None:
        """What the last ``run_ahead`` returned; None before the first."""
        self._core.settle()
        return self._assembly.ahead


def _check_can_run_ahead(assembly: Assembly, shape: Any) -> CopyTransport:
    """The transport. ValueError that says why steps of ``shape`` cannot run ahead, CaptureError while some are left."""
    side = assembly.side
    if assembly.ahead is not None:
        assembly.ahead.refuse_left()
    if side is None:
        raise ValueError("run_ahead: steps are read where they are built; transport='copy' lets them run ahead")
    if side.ticket:
        raise ValueError("run_ahead: not with ticket=True; the builder has to see each replay (steps.replay)")
    if assembly.settings.context_parallel is not None:
        raise ValueError("run_ahead: not with context_parallel; which rank keeps a token is decided on the host")
    if isinstance(shape.bucket, tuple):
        raise ValueError(f"bucket: {shape.bucket} captured for rows of any lengths; steps ahead run one token of each")
    if shape.query_len != 1:
        raise ValueError(
            f"bucket: {counted(shape.num_reqs, 'row')} captured with {counted(shape.query_len, 'token')} each; steps "
            "ahead run one"
        )
    if planning := assembly.plans_on_host(shape):
        raise ValueError(
            f"run_ahead: backend {planning[0]!r} plans each step of a captured size on the host; choose one that plans "
            "on the device (record_plan) or not at all"
        )
    return side


def sent_ahead(assembly: Assembly) -> Any:
    """What runs steps ahead in one compiled call (the kernels' SentAhead), where a step is built in one; else None."""
    sent, core, side = assembly.in_one_call, assembly.core, assembly.side
    if sent is None or side is None:
        return None
    return core.kernels.SentAhead(sent, partial(StepsAhead, assembly, side), (core, assembly))


def _given(scheduled: Mapping[Any, int]) -> dict[Any, int]:
    """The tokens of the named requests, 0 for those that rest; TypeError or ValueError where one is not 0 or 1."""
    if not isinstance(scheduled, Mapping):
        raise TypeError(f"scheduled: {quoted(scheduled)} is not a mapping of request to tokens")
    given = {req_id: arguments.integer("scheduled", tokens, 0) for req_id, tokens in scheduled.items()}
    for req_id, tokens in given.items():
        if tokens > 1:
            raise ValueError(
                f"scheduled: {counted(tokens, 'token')} of {quoted(req_id)}; steps ahead run one token of a request, "
                "or 0"
            )
    return given


def _check_rows(assembly: Assembly, given: Mapping[Any, int], num_steps: int) -> None:
    """ValueError where a request that runs has no block for one of ``num_steps`` tokens, or gets too long."""
    kernel = assembly.kernel
    kernel.schedule_all(num_steps)
    assembly.schedule({req_id: tokens * num_steps for req_id, tokens in given.items()})
    code, row, token, group = kernel.check(ahead=True)
    if code == codes.GIVEN_TOKENS:
        raise error_texts.refused_tokens_ahead(assembly.core, assembly.columns[group].name, row)
    if code != codes.OK:
        raise error_texts.refused_step(
            assembly.core, code, row, token, group, assembly.query_lens, INT32_MAX, INT32_MAX
        )


def _check_sum(core: Any, shape: Any, rows: Any, num_steps: int) -> None:
    """ValueError where the lengths of the last step of ``rows``, those of padded rows included, do not fit int32
    together.
    """
    padded = max(shape.num_reqs - len(rows), 0)  # fewer than none: the build says that the size holds no such step
    total = int(core.lengths[codes.COMPUTED, rows].sum(dtype=np.int64)) + num_steps * len(rows)
    if total + padded * shape.pad_seq_len > INT32_MAX:
        raise ValueError(
            f"num_steps: {num_steps}, but then the sum of lengths does not fit int32; run fewer steps or requests"
        )
