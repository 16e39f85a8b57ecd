"""Captured graphs of the list door: a size's wrappers are made over the buffers that its graph reads."""

from __future__ import annotations

from typing import Any

from attncore.abstract import AttentionState


class FlashInferState(AttentionState):
    """The default state, which owns the buffers; and for each captured size a wrapper over them, for each plan key.

    A padded step of a captured size is planned in that wrapper when it is built: replay its graph, and run steps
    without one unpadded.
    """

    def metadata_for_capture(self, batch_size: int) -> Any:
        """See the base class. The size's wrappers are made first: then the plan of padding goes to them."""
        known = batch_size in self.captured
        if self.backend is not None and not known:
            builder = self._capturable(batch_size, "metadata_for_capture")
            blank = self._steps.new_metadata(builder, batch_size)
            self.backend.capture_list_door(blank, builder)
        return super().metadata_for_capture(batch_size)
