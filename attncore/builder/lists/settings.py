"""The checked arguments of a CommonMetadataBuilder, and what its steps need that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from attncore import arguments
from attncore.builder.checked_backend import check_backend
from attncore.builder.lists.dialects import DIALECTS, Dialect
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.read_only import read_only
from attncore.errors import ConcurrentUseError
from attncore.graphs import refuse_while_capturing
from attncore.kernels import KernelsName, load_kernels


class ListSettings:
    """The arguments of CommonMetadataBuilder, as it documents them, and values derived from them.

    The arguments do not change: buffers and graphs are sized by them.
    """

    def __init__(
        self,
        block_size: int,
        layout: str,
        sliding_window: int | None,
        chunked_prefill: bool,
        max_seq_len_to_capture: int | None,
        encoder_decoder: bool,
        max_encoder_seq_len_to_capture: int | None,
        backend: Any,
        kernels: KernelsName | None,
    ) -> None:
        optional = arguments.optional_integer
        block_size = arguments.integer("block_size", block_size, 1)
        sliding_window = optional("sliding_window", sliding_window, 1)
        max_seq_len_to_capture = optional("max_seq_len_to_capture", max_seq_len_to_capture, 1)
        max_encoder_seq_len_to_capture = optional("max_encoder_seq_len_to_capture", max_encoder_seq_len_to_capture, 1)
        layout = arguments.one_of("layout", layout, DIALECTS)
        chunked_prefill = arguments.flag("chunked_prefill", chunked_prefill)
        encoder_decoder = arguments.flag("encoder_decoder", encoder_decoder)
        if encoder_decoder and not DIALECTS[layout].encoder_decoder:
            able = ", ".join(name for name, dialect in DIALECTS.items() if dialect.encoder_decoder)
            raise ValueError(f"layout: {layout} has no encoder/decoder attention; {able} have")
        if max_encoder_seq_len_to_capture is not None and not encoder_decoder:
            raise ValueError("max_encoder_seq_len_to_capture: given, but encoder_decoder is false")
        self._block_size, self._dialect = block_size, DIALECTS[layout]
        self._sliding_window, self._chunked_prefill = sliding_window, chunked_prefill
        self._max_seq_len_to_capture = max_seq_len_to_capture
        self._encoder_decoder = encoder_decoder
        self._max_encoder_seq_len_to_capture = max_encoder_seq_len_to_capture
        self._kernels = load_kernels(kernels)
        self.max_numbers: int | None = None
        """The most numbers that a step's arrays may hold; set for untrusted input (``attncore build``)."""
        self._reader = self._kernels.GroupReader()
        self._reader.refused = partial(
            ConcurrentUseError, "builder: another caller is inside it; give each thread a builder of its own"
        )
        self.enter: Callable[[], Any] = self._reader.enter
        """One caller at a time builds with these settings, or advances or prepares what was built (see Entrance)."""
        self.undo: list[tuple[Any, ...]] = self._reader.undo
        if backend is not None:
            check_backend(backend)
            if backend.config.block_size != block_size:  # its layers would look for each token in another slot
                raise ValueError(
                    f"block_size: {block_size} is not the backend's {backend.config.block_size}; use choice.block_size"
                )
        self._backend = backend
        self.last_step = -1
        """The number of the last step that was built or advanced; one that did not happen has none."""
        self.wrap = read_only if backend is None else backend.from_host
        self.plan: Any = _guard_plan(backend) if backend is not None and backend.has_plan else None

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def dialect(self) -> Dialect:
        return self._dialect

    @property
    def sliding_window(self) -> int | None:
        return self._sliding_window

    @property
    def chunked_prefill(self) -> bool:
        return self._chunked_prefill

    @property
    def max_seq_len_to_capture(self) -> int | None:
        return self._max_seq_len_to_capture

    @property
    def encoder_decoder(self) -> bool:
        return self._encoder_decoder

    @property
    def max_encoder_seq_len_to_capture(self) -> int | None:
        return self._max_encoder_seq_len_to_capture

    @property
    def kernels(self) -> Any:
        return self._kernels

    @property
    def backend(self) -> Any:
        return self._backend


def _guard_plan(backend: Any) -> Callable[[CommonAttentionMetadata], None]:
    """The backend's plan, with a CaptureError while a stream is capturing; steps without a plan need no such check."""
    plan, device = backend.plan, backend.config.device

    def guarded_plan(metadata: CommonAttentionMetadata) -> None:
        refuse_while_capturing(device, "plan")
        plan(metadata)

    return guarded_plan
