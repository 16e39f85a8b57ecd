"""The checked arguments of a CommonMetadataBuilder, and what its steps need that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attncore import arguments
from attncore.builder.lists.dialects import DIALECTS
from attncore.builder.metadata import CommonAttentionMetadata, identity
from attncore.graphs import refuse_while_capturing
from attncore.kernels import KernelsName, load_kernels


class ListSettings:
    """The arguments of CommonMetadataBuilder, as it documents them, and values derived from them."""

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
        if layout not in DIALECTS:
            raise ValueError(f"layout: {layout!r} is not one of {', '.join(DIALECTS)}")
        for name, flag in (("chunked_prefill", chunked_prefill), ("encoder_decoder", encoder_decoder)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}: {flag!r} is not true or false")
        if encoder_decoder and not DIALECTS[layout].encoder_decoder:
            able = ", ".join(name for name, dialect in DIALECTS.items() if dialect.encoder_decoder)
            raise ValueError(f"layout: {layout} has no encoder/decoder attention; {able} have")
        if max_encoder_seq_len_to_capture is not None and not encoder_decoder:
            raise ValueError("max_encoder_seq_len_to_capture: given, but encoder_decoder is false")
        self.block_size, self.dialect = block_size, DIALECTS[layout]
        self.sliding_window, self.chunked_prefill = sliding_window, chunked_prefill
        self.max_seq_len_to_capture = max_seq_len_to_capture
        self.encoder_decoder, self.max_encoder_seq_len_to_capture = encoder_decoder, max_encoder_seq_len_to_capture
        self.kernels = load_kernels(kernels)
        self.max_numbers: int | None = None
        """The most numbers that a step's arrays may hold; set for untrusted input (``attncore build``)."""
        self.backend = backend
        self.wrap = identity if backend is None else backend.from_host
        self.plan: Any = _guard_plan(backend) if backend is not None and backend.has_plan else None


def _guard_plan(backend: Any) -> Callable[[CommonAttentionMetadata], None]:
    """The backend's plan, with a CaptureError while a stream is capturing; steps without a plan need no such check."""
    plan, device = backend.plan, backend.config.device

    def guarded_plan(metadata: CommonAttentionMetadata) -> None:
        refuse_while_capturing(device, "plan")
        plan(metadata)

    return guarded_plan
