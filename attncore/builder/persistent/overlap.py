"""Steps that overlap: one is built while the last one runs, and its drafts are not judged yet.

The host counts every token of the last step as computed, so its lengths, positions and slots are upper bounds. The
device knows better by the time the step begins there: the engine's sampler has left in ``num_rejected``, by row of the
last step, how many tokens were num_rejected. Each row travels with the row that its request had in that step, and the
device takes back what that row lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.persistent.backends import Backends

if TYPE_CHECKING:
    from attncore.builder.persistent.step_metadata import StepMetadata

PREVIOUS_ROWS = "previous_rows"
"""The field that travels with an overlapped step: int32[n], each row's row in the last step."""


class Overlap:
    """Which row each request had in the last step; checks of what overlapping steps need."""

    def __init__(self, backends: Backends, max_num_reqs: int, num_rejected: Any, ranks: ContextParallel | None) -> None:
        _check(backends, max_num_reqs, num_rejected, ranks)
        self.num_rejected = num_rejected
        self.overlapped = False
        self._last: tuple[Any, ...] = ()
        self._rows: dict[Any, int] = {}
        self._bounded: dict[int, bool] = {}
        self._all = np.arange(max_num_reqs, dtype=np.int32)

    def fill(self, metadata: StepMetadata, out: npt.NDArray[np.int32]) -> None:
        """previous_rows int32[n]: the row in the last step, -1 where its length is exact."""
        out[:] = -1
        if not self.overlapped:
            return
        req_ids = metadata.req_ids
        if req_ids is self._last or req_ids == self._last:
            out[: len(req_ids)] = self._all[: len(req_ids)]
        else:
            out[: len(req_ids)] = [self._rows.get(req_id, -1) for req_id in req_ids]

    def built(self, metadata: StepMetadata) -> None:
        """A step was sent: it is the last one now. One without rows leaves the one before it the last."""
        self._bounded[metadata.step] = self.overlapped
        self._bounded.pop(metadata.step - 8, None)
        if metadata.req_ids and metadata.req_ids is not self._last:
            self._last = metadata.req_ids
            self._rows = {req_id: row for row, req_id in enumerate(self._last)}

    def lengths_of(self, metadata: StepMetadata) -> str:
        return "bounded" if self._bounded.get(metadata.step) else "exact"


def _check(backends: Backends, max_num_reqs: int, num_rejected: Any, ranks: ContextParallel | None) -> None:
    kind, length = str(getattr(num_rejected, "dtype", type(num_rejected).__name__)), getattr(num_rejected, "shape", ())
    if kind != "torch.int32" or tuple(length) != (max_num_reqs,):
        raise ValueError(
            f"num_rejected: {kind}{list(length)} found; give a torch int32 tensor of max_num_reqs {max_num_reqs}"
        )
    if not str(num_rejected.device).startswith(backends.device.split(":")[0]):
        raise ValueError(f"num_rejected: on {num_rejected.device}, but the steps go to {backends.device}")
    if ranks is not None:
        raise ValueError("num_rejected: not with context_parallel; which rank keeps a token depends on exact lengths")
    for backend in backends.by_group.values():
        if backend is not None and backend.spec is not None and backend.spec.host_lengths == "exact":
            raise ValueError(
                f"num_rejected: backend {backend.name!r} needs exact lengths on the host; choose one that takes bounds"
            )
