"""A batch, a builder and a step in a few lines of text: what ``repr`` gives.

Only host memory is read, by slices that are dropped again: arrays of metadata are taken by ``host.peek``, which keeps
no view, and the tensors of a device are never touched. ``grid`` draws the blocks of each request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from attncore.kernels import codes
from attncore.show import angled, counted, short, some

SEVERAL = 6
"""Numbers of an array that a line shows."""


def batch_text(batch: Any) -> str:
    """``repr`` of an InputBatch."""
    return angled(type(batch).__name__, _batch_facts(batch))


def _batch_facts(batch: Any) -> Iterator[str]:
    core = batch._core
    num_rows, paused = len(core.order.req_ids), len(core.order.paused)
    yield f"{core.order.num_reqs} of {counted(batch.max_num_reqs, 'request')}"
    if paused:
        yield f"{paused} preempted"
    yield f"{counted(int(core.lengths[codes.COMPUTED, :num_rows].sum()), 'token')} computed"
    for name, table in core.tables.items():
        of_group = f"group {short(name)}: " if len(core.tables) > 1 else ""
        limit = "" if table.group.num_blocks is None else f" of {table.group.num_blocks}"
        held, size = table.num_held(num_rows), counted(table.group.block_size, "token")
        blocks = "block" if held == 1 and not limit else "blocks"
        yield f"{of_group}{held}{limit} {blocks} of {size} held"
    yield f"max_model_len {batch.max_model_len}"
    yield batch.kernels


def builder_text(builder: Any, backends: Any, depth: int, closed: bool) -> str:
    """``repr`` of a MetadataBuilder."""
    return angled(type(builder).__name__, _builder_facts(builder, backends, depth, closed))


def _builder_facts(builder: Any, backends: Any, depth: int, closed: bool) -> Iterator[str]:
    last = builder.last_step
    if closed:
        yield "closed"
    yield f"last step {last}" if last >= 0 else "no step built yet"
    yield f"{builder.batch.num_reqs} of {counted(builder.batch.max_num_reqs, 'request')}"
    yield f"max_num_batched_tokens {builder.max_num_batched_tokens}"
    yield f"decode_threshold {builder.decode_threshold}"
    if builder.captured:
        yield f"captured sizes {some(builder.captured[:SEVERAL], len(builder.captured))}"
    yield f"depth {depth}"
    names = dict.fromkeys(backend.name for backend in backends.by_group.values() if backend is not None)
    yield f"{some(names)} on {backends.device}" if names else "NumPy arrays"
    yield f"transport {builder.transport}"
    yield builder.kernels


def list_builder_text(builder: Any) -> str:
    """``repr`` of a CommonMetadataBuilder."""
    return angled(type(builder).__name__, _list_builder_facts(builder))


def _list_builder_facts(builder: Any) -> Iterator[str]:
    yield f"layout {builder.dialect.name}"
    yield f"block_size {builder.block_size}"
    for name in ("sliding_window", "max_seq_len_to_capture", "max_encoder_seq_len_to_capture"):
        if getattr(builder, name) is not None:
            yield f"{name} {getattr(builder, name)}"
    yield from (name for name in ("chunked_prefill", "encoder_decoder") if getattr(builder, name))
    backend = builder.backend
    yield "NumPy arrays" if backend is None else f"{short(backend.name)} on {backend.config.device}"
    yield str(builder.kernels.IMPLEMENTATION)


def metadata_text(metadata: Any) -> str:
    """``repr`` of a step's metadata. Of a step whose arena was taken again only that is said."""
    number, expired, note = age(metadata)
    head = type(metadata).__name__ + (f" of step {number}" if number is not None else "")
    return angled(head, [note] if expired else [note, *_step_facts(metadata)])


def age(metadata: Any) -> tuple[int | None, bool, str]:
    """The number of a persistent step, whether its arrays hold a later step already, and what to say about it.

    A view is as old as the step that it was taken of. Other metadata owns its arrays: it has no number and no age.
    """
    whole, number = metadata.__dict__.get("_taken_of", (metadata, None))
    owner = getattr(whole, "_owner", None)
    if owner is None:
        return None, False, ""
    number, last = whole.step if number is None else number, owner.last_step
    if number < 0 or last < 0 or number == last:
        return number, False, "not built yet" if number < 0 else ""
    if last - number >= owner.ring.depth or whole.step != number or number > last:
        return number, True, f"STALE: step {last} was built since and this arena is used again (depth)"
    return number, False, f"an OLDER step: step {last} was built since"


def _step_facts(metadata: Any) -> Iterator[str]:
    num_reqs, num_tokens = metadata.num_reqs, metadata.num_tokens
    actual = getattr(metadata, "num_actual_reqs", num_reqs)
    if metadata.use_cuda_graph and actual != num_reqs:
        yield f"{counted(actual, 'request')} padded to {num_reqs} (bucket)"
        yield f"{counted(metadata.num_actual_tokens, 'token')} padded to {num_tokens}"
    else:
        yield counted(num_reqs, "request") + (" (bucket)" if metadata.use_cuda_graph else "")
        yield counted(num_tokens, "token")
    for kind, count, tokens in (
        ("decode", metadata.num_decodes, metadata.num_decode_tokens),
        ("prefill", metadata.num_prefills, metadata.num_prefill_tokens),
    ):
        if count:
            of = f"({counted(tokens, 'token')} in all)" if count > 1 else f"of {counted(tokens, 'token')}"
            yield f"{counted(count, kind)} {of}"
    if metadata.num_encoder_tokens:
        yield counted(metadata.num_encoder_tokens, "encoder token")
    bounded = "at most " if lengths_are_bounds(metadata) else ""
    for name in ("seq_lens", "query_lens"):
        array = peek(metadata, name)
        if array is not None:
            numbers = some(array[:SEVERAL].tolist(), len(array), SEVERAL) if len(array) else ""
            yield f"{name} {bounded}[{numbers}]"
    groups = metadata.__dict__.get("groups") or ()
    if len(groups) > 1:
        yield f"group {short(metadata.group)} of {len(groups)}"
    yield device_of(metadata)


def peek(metadata: Any, name: str) -> np.ndarray[Any, Any] | None:
    """A field's host array, of which metadata keeps no view; None where the step or the builder has none."""
    host = metadata.__dict__.get("host")
    array = host.peek(name) if hasattr(type(host), "peek") else None
    return array if isinstance(array, np.ndarray) else None


def lengths_are_bounds(metadata: Any) -> bool:
    """Whether the lengths on the host are upper bounds, in a step built overlapped."""
    owner = getattr(metadata, "_owner", None)
    return owner is not None and owner.builder.host_lengths(metadata) == "bounded"


def device_of(metadata: Any) -> str:
    """Where the fields are: a device as torch writes it, or ``NumPy arrays``."""
    backend = getattr(getattr(metadata, "_wrap", None), "__self__", None)
    return "NumPy arrays" if backend is None else f"tensors on {backend.config.device}"


def host_text(host: Any) -> str:
    """``repr`` of ``metadata.host``: the names, types and lengths of its arrays."""
    arrays = [(name, host.peek(name)) for name in host.field_names()]
    described = [
        f"{name} {array.dtype}[{', '.join(map(str, array.shape))}]" for name, array in arrays if array is not None
    ]
    return angled("metadata.host", [counted(len(described), "array"), *described])
