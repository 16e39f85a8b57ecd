"""What a step's metadata holds, to find a backend that writes to it: other layers and later steps read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attncore.builder.fields import ARRAYS, COUNTS, DERIVED
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.builder import CommonAttentionMetadata


class MetadataSnapshot:
    """The arrays and counts of a step, as they were when it was taken."""

    def __init__(self, metadata: CommonAttentionMetadata) -> None:
        self._metadata = metadata
        self._counts = {name: getattr(metadata, name) for name in COUNTS if hasattr(metadata, name)}
        self._arrays = {
            name: np.array(getattr(metadata.host, name)) for name in ARRAYS - DERIVED if hasattr(metadata.host, name)
        }

    def check(self, who: str) -> None:
        """ConformanceError where ``who`` changed a count, an array on the host, or one that was made for the device."""
        metadata = self._metadata
        for name, before in self._counts.items():
            if getattr(metadata, name) != before:
                raise _changed(who, f"metadata.{name}")
        for name, array in self._arrays.items():
            if _differs(getattr(metadata.host, name), array):
                raise _changed(who, f"metadata.host.{name}")
            made = metadata.__dict__.get(name)
            if made is not None and _differs(made, array):
                raise _changed(who, f"metadata.{name}")


def _differs(found: Any, before: Any) -> bool:
    array = found.detach().cpu().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
    return not np.array_equal(array, before)


def _changed(who: str, what: str) -> ConformanceError:
    return ConformanceError(f"{who} changed {what}; other layers and later steps read it: work on a copy")
