"""The checked arguments of a MetadataBuilder beside batch, backend and ``num_rejected``, which are objects."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from attncore import arguments
from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.device.transport import TRANSPORTS
from attncore.quoted import quoted
from attncore.show import counted


class Settings(NamedTuple):
    """The arguments of MetadataBuilder, as it documents them."""

    max_num_batched_tokens: int
    max_num_encoder_tokens: int
    decode_threshold: int
    context_parallel: ContextParallel | None
    transport: str
    ticket: bool
    depth: int


def check_settings(
    max_num_batched_tokens: int,
    max_num_encoder_tokens: int | None,
    decode_threshold: int,
    context_parallel: ContextParallel | None,
    transport: str,
    ticket: bool,
    depth: int,
    max_encoder_len: int,
) -> Settings:
    """The settings with plain ints and defaults filled in; ValueError or TypeError that names the argument."""
    max_num_batched_tokens = arguments.integer("max_num_batched_tokens", max_num_batched_tokens, 1)
    decode_threshold = arguments.integer("decode_threshold", decode_threshold, 1)
    depth = arguments.integer("depth", depth, 1)
    if max_num_encoder_tokens is None:
        max_num_encoder_tokens = max(max_num_batched_tokens, max_encoder_len)
    max_num_encoder_tokens = arguments.integer("max_num_encoder_tokens", max_num_encoder_tokens, 1)
    if context_parallel is not None:
        if not isinstance(context_parallel, ContextParallel):
            raise TypeError(f"context_parallel: {quoted(context_parallel)} is not a ContextParallel")
        # A copy, whose numbers are checked: a subclass may leave that out, and the caller's may change later.
        context_parallel = ContextParallel(
            context_parallel.world_size,
            context_parallel.rank,
            context_parallel.block_size,
            context_parallel.interleave,
            context_parallel.tensor_parallel_size,
        )
    return Settings(
        max_num_batched_tokens,
        max_num_encoder_tokens,
        decode_threshold,
        context_parallel,
        arguments.one_of("transport", transport, TRANSPORTS),
        arguments.flag("ticket", ticket),
        depth,
    )


def check_states(states: Collection[str], settings: Settings, takes_verdicts: bool) -> None:
    """ValueError where a builder over groups of states would have to take tokens back, or to share them out."""
    if not states:
        return
    name = next(iter(states))
    for wrong, argument in (
        (settings.decode_threshold > 1, f"decode_threshold: {settings.decode_threshold}"),
        (takes_verdicts, "num_rejected"),
    ):
        if wrong:
            raise ValueError(
                f"{argument} given for drafts, but group {name!r} holds states, from which a rejected token cannot be "
                "taken back; run one token of a request, or a batch without groups of states"
            )
    if settings.context_parallel is not None:
        raise ValueError(f"context_parallel: group {name!r} holds states; ranks share out whole contexts only")


def check_captured_size(
    num_reqs: int, query_len: int, num_tokens: int | None, max_num_reqs: int, settings: Settings
) -> None:
    """ValueError where a size that is to be captured is beyond the builder's capacity."""
    if num_tokens is not None:
        if query_len != 1:
            raise ValueError(
                f"num_tokens: {num_tokens} given beside query_len {query_len}; rows have any lengths then: give one"
            )
        if settings.context_parallel is not None:
            raise ValueError(
                f"num_tokens: {num_tokens}, but ranks share out the contexts (context_parallel); capture decodes alone"
            )
        if num_tokens > settings.max_num_batched_tokens:
            raise ValueError(
                f"num_tokens: {num_tokens} exceed max_num_batched_tokens {settings.max_num_batched_tokens}"
            )
    if query_len > settings.decode_threshold:
        raise ValueError(
            f"query_len: {query_len} is above decode_threshold {settings.decode_threshold}; graphs hold decodes only"
        )
    if num_reqs > max_num_reqs:
        raise ValueError(f"num_reqs: {num_reqs} exceed the batch's max_num_reqs {max_num_reqs}")
    if num_reqs * query_len > settings.max_num_batched_tokens:
        raise ValueError(
            f"num_reqs: {num_reqs} of {counted(query_len, 'token')} exceed max_num_batched_tokens "
            f"{settings.max_num_batched_tokens}"
        )
