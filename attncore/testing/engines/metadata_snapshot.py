"""What a step's metadata holds, to find a backend that writes to it: other layers and later steps read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attncore.builder.fields import ARRAYS, COUNTS, DERIVED, FIELDS, Length
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.builder import CommonAttentionMetadata

GATHERED = "paged_kv_indices"


class MetadataSnapshot:
    """The arrays and counts of a step, as they were when it was taken.

    Of a table the device may have its own, which equals the host's up to each request's last block; behind that, ids of
    steps before stay there. So a table is kept as the device has it. The copy is made on the current stream, as the
    step was sent: the device has fetched the step by then. Of a step that is not ``sent`` the host's arrays alone are
    kept, without those that a builder gathers when they are asked for.
    """

    def __init__(self, metadata: CommonAttentionMetadata, *, sent: bool = True) -> None:
        self._metadata, self._sent = metadata, sent
        self._counts = {name: getattr(metadata, name) for name in COUNTS if hasattr(metadata, name)}
        names = ARRAYS - DERIVED - (set() if sent else {GATHERED})
        arrays = {name: getattr(metadata.host, name, None) for name in names}
        self._arrays = {name: np.array(array) for name, array in arrays.items() if array is not None}
        builder = metadata.builder
        bounded = builder is not None and builder.host_lengths(metadata) == "bounded"  # the device's are exact
        own = [name for name in self._arrays if sent and (bounded or FIELDS[name].length is Length.TABLE)]
        self._on_device = self._arrays | {name: np.array(on_host(getattr(metadata, name))) for name in own}

    def check(self, who: str) -> None:
        """ConformanceError where ``who`` changed a count, an array on the host, or one that was made for the device."""
        metadata = self._metadata
        for name, before in self._counts.items():
            if getattr(metadata, name) != before:
                raise _changed(who, f"metadata.{name}")
        for name, array in self._arrays.items():
            if _differs(getattr(metadata.host, name), array):
                raise _changed(who, f"metadata.host.{name}")
            made = metadata.__dict__.get(name) if self._sent else None
            if made is not None and _differs(made, self._on_device[name]):
                raise _changed(who, f"metadata.{name}")


def _differs(found: Any, before: Any) -> bool:
    return not np.array_equal(on_host(found), before)


def on_host(array: Any) -> Any:
    """An array of metadata as NumPy's."""
    return array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)


def _changed(who: str, what: str) -> ConformanceError:
    return ConformanceError(f"{who} changed {what}; other layers and later steps read it: work on a copy")
