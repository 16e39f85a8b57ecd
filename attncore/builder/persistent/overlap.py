"""Overlapping steps: a step is built while the last one runs, before it is known which of its drafts are accepted.

The host counts every token of the last step as computed, so its lengths, positions and slots are upper bounds. Before
the new step begins on the device, the engine's sampler has written to ``num_rejected``, by row of the last step, how
many tokens were rejected. Each row of the new step carries the row that its request had in the last one
(``previous_rows``), and the device subtracts that row's rejected tokens (``device.corrections``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import arguments
from attncore.array_arguments import not_by_address, of_fixed_size
from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.persistent.group_backends import Backends
from attncore.quoted import quoted

if TYPE_CHECKING:
    from attncore.builder.persistent.step_metadata import StepMetadata

PREVIOUS_ROWS = "previous_rows"
"""The field that is sent with an overlapped step: int32[n], the row that each row's request had in the last step."""


class _Step(NamedTuple):
    """The requests of a step, and the row of each."""

    req_ids: tuple[Any, ...]
    rows: dict[Any, int]
    left: frozenset[int] = frozenset()
    """Rows whose request has left or was preempted since: the lengths of what has its name by now are exact."""

    def without(self, req_id: Any) -> _Step:
        """The step after this request has left. It is found by identity: a name's own ``__eq__`` may raise."""
        row = next((row for row, held in enumerate(self.req_ids) if held is req_id), None)
        return self if row is None else self._replace(left=self.left | {row})


_NO_STEP = _Step((), {})


class Overlap:
    """Which row each request had in the last step; checks of what overlapping steps need."""

    def __init__(
        self, backends: Backends, max_num_reqs: int, num_rejected: Any, ranks: ContextParallel | None, depth: int
    ) -> None:
        self._exact = _exact(backends)
        """Names of the groups whose backends plan by exact lengths, where the host plans."""
        _check(backends, max_num_reqs, num_rejected, ranks)
        self.num_rejected = of_fixed_size(num_rejected)
        self.overlapped = False
        self._last = self._before_last = _NO_STEP
        self._depth = depth
        self._bounded: dict[int, bool] = {}
        """Of the last steps, those whose host arrays are valid: whether their lengths are bounds."""
        self._all = np.arange(max_num_reqs, dtype=np.int32)

    def begin(self, overlapped: bool, planned_on_host: Sequence[str]) -> None:
        """Says whether the next step is overlapped. ``planned_on_host``: the groups whose plans of it the host makes.

        ValueError where a backend among theirs needs exact lengths, which the host does not have.
        """
        if overlapped and self._exact:
            name = next((self._exact[group] for group in planned_on_host if group in self._exact), None)
            if name is not None:
                raise ValueError(
                    f"overlapped: backend {name!r} needs exact lengths for a plan on the host, and the host would plan "
                    "this step; take a captured size that plans itself (a graph with metadata.record()), or call "
                    "batch.rollback_many with the last step's verdicts first and build without overlapped"
                )
        self.overlapped = overlapped

    def fill(self, metadata: StepMetadata, out: npt.NDArray[np.int32]) -> None:
        """Writes ``previous_rows`` int32[n]: the row in the last step, -1 where the length is exact."""
        out[:] = -1
        if not self.overlapped:
            return
        req_ids, last = metadata.req_ids, self._last
        if not last.left and (req_ids is last.req_ids or req_ids == last.req_ids):
            out[: len(req_ids)] = self._all[: len(req_ids)]
        else:
            rows = [last.rows.get(req_id, -1) for req_id in req_ids]
            out[: len(req_ids)] = [-1 if row in last.left else row for row in rows]

    def note(self, step: int) -> None:
        """Notes whether the host's lengths of a step are bounds, before anybody looks at it."""
        self._bounded[step] = self.overlapped
        self._bounded.pop(step - self._depth - 1, None)

    def remember(self, metadata: StepMetadata, *, dummy: bool) -> None:
        """Makes a step that was sent the last one.

        A ``dummy``, of ``build_empty`` or ``capture``, is no step of the engine's: the verdicts of the one before it
        may still be outstanding. Behind a built step without rows the host has them.
        """
        req_ids, self._before_last = metadata.req_ids, self._last
        if dummy:
            return
        if not req_ids:
            self._last = _NO_STEP
        elif req_ids is not self._last.req_ids or self._last.left:
            self._last = _Step(req_ids, {req_id: row for row, req_id in enumerate(req_ids)})

    def leave(self, req_id: Any) -> None:
        """A request leaves, or loses its progress: whoever has its name later is another one here."""
        self.restore(*(step.without(req_id) for step in self.steps))

    @property
    def steps(self) -> tuple[_Step, ...]:
        """The last step and the one before it, for ``restore``."""
        return self._last, self._before_last

    def restore(self, last: _Step, before_last: _Step) -> None:
        """Takes back ``leave`` and ``remember``."""
        self._last, self._before_last = last, before_last

    def forget(self) -> None:
        """Takes back the last ``remember``, of a step that is not to be replayed."""
        self._last = self._before_last

    def lengths_of(self, metadata: StepMetadata) -> str:
        """``"bounded"`` where the step's lengths on the host are upper bounds, else ``"exact"``."""
        return "bounded" if self._bounded.get(metadata.step) else "exact"


def _check(backends: Backends, max_num_reqs: int, num_rejected: Any, ranks: ContextParallel | None) -> None:
    _check_tensor(num_rejected, max_num_reqs, backends.device)
    if ranks is not None:
        raise ValueError("num_rejected: not with context_parallel; which rank keeps a token depends on exact lengths")
    for group, name in _exact(backends).items():
        backend = backends.by_group[group]
        if not backend.has_plan or not backend.records_plan:
            raise ValueError(
                f"num_rejected: backend {name!r} needs exact lengths on the host; choose one that takes bounds"
            )


def _exact(backends: Backends) -> dict[str, str]:
    """The groups whose backends need exact lengths on the host, and the names of these."""
    return {
        group: backend.name
        for group, backend in backends.by_group.items()
        if backend is not None and backend.spec is not None and backend.spec.host_lengths == "exact"
    }


def _check_tensor(num_rejected: Any, max_num_reqs: int, device: str) -> None:
    """ValueError where ``num_rejected`` is not what the device's kernels read by its address, of numbers side by side.

    A subclass says of itself what it likes, so that it is none.
    """
    torch = sys.modules.get("torch")  # where it is not loaded, there is no tensor
    if torch is None or type(num_rejected) is not getattr(torch, "Tensor", None):
        dtype, shape = getattr(num_rejected, "dtype", ""), getattr(num_rejected, "shape", ())
        found = f"{type(num_rejected).__name__} {quoted(f'{dtype}{shape}')}"
        raise ValueError(f"num_rejected: {found} found; give a torch int32 tensor of max_num_reqs {max_num_reqs}")
    why = not_by_address(num_rejected)
    if why is not None:
        raise ValueError(f"num_rejected: {why}")
    if num_rejected.dtype != torch.int32 or num_rejected.shape != (max_num_reqs,):
        raise ValueError(
            f"num_rejected: {num_rejected.dtype}{list(num_rejected.shape)} found; give a torch int32 tensor of "
            f"max_num_reqs {max_num_reqs}"
        )
    if not _is_on(num_rejected.device, device):
        raise ValueError(f"num_rejected: on {num_rejected.device}, but the steps go to {device}")
    if not num_rejected.is_contiguous():
        raise ValueError(
            f"num_rejected: strides {num_rejected.stride()} found, but it is read by its address; give a contiguous "
            "tensor, to which the sampler writes"
        )


def _is_on(found: Any, device: str) -> bool:
    """Whether a tensor's device is the one that ``device`` names, which without an index is CUDA's current one."""
    import torch

    wanted = torch.device(device)
    index = torch.cuda.current_device() if device == "cuda" else wanted.index
    return bool(found.type == wanted.type and (index is None or wanted.type == "cpu" or found.index == index))


def check_overlapped(given: object, overlap: Overlap | None) -> bool:
    """``build``'s ``overlapped`` as a bool; TypeError or ValueError where it may not be given."""
    overlapped = arguments.flag("overlapped", given)
    if overlapped and overlap is None:
        raise ValueError("overlapped: this builder was made without num_rejected, so lengths must be exact")
    return overlapped
