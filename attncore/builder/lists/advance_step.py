"""advance_step: moves a step of decodes of the list builder on by one token, in place, without a rebuild."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from attncore import arguments
from attncore.array_arguments import check_readable, check_tensor
from attncore.builder.lists.advanced_arrays import BeforeNext, write_next
from attncore.builder.lists.next_decodes import check_built, plan_next
from attncore.builder.lists.turned_step import turned_step
from attncore.builder.lists.unfinished import Before, Unsettled, settle
from attncore.builder.metadata import check_metadata
from attncore.graphs import refuse_while_capturing
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.lists.settings import ListSettings
    from attncore.builder.metadata import CommonAttentionMetadata


def advance_step(
    metadata: CommonAttentionMetadata,
    input_tokens: Any = None,
    sampled_token_ids: Any = None,
    num_queries: int | None = None,
    turn_prefills_into_decodes: bool = False,
) -> None:
    """Moves a step of decodes that CommonMetadataBuilder built on by one sampled token each, in place.

    Afterwards every field, on the host and on the device, is what a build of the longer sequences would give; views and
    plans are renewed, and ``metadata.step`` is a new number. Arrays keep their addresses, except ``paged_kv_indices``
    and a ``block_table`` whose shape changes (that of a step padded for a graph does not). ``sampled_token_ids``, n
    integers in an array or tensor, are written to the first n of ``input_tokens`` int[num_reqs], and 0 to those of
    padded requests. ``num_queries``, where given, must be n, the number of decodes without padding.

    With ``turn_prefills_into_decodes`` the step may have prompts, of which each sampled a token: from then on every row
    is a decode of one token, in the same order. The arrays of that step are new ones, the metadata is the same object.

    A token that starts a block takes it from the tables of the groups that the step was built from: an engine may
    append to these tables, but must not change their entries. Raises ValueError or TypeError that names the argument or
    the row, and changes nothing, for a step with other prompts, a decode of several tokens, a token without a block,
    and a step that a captured graph can no longer hold; CaptureError while a stream is capturing; ConcurrentUseError
    while the builder is inside another call, in this thread or another. Where an exception from outside interrupts it
    (KeyboardInterrupt), ``metadata.advanced`` says whether it has happened.
    """
    turns = arguments.flag("turn_prefills_into_decodes", turn_prefills_into_decodes)
    settings = _check_metadata(metadata, turns)
    with settings.enter():
        settle(metadata)
        advance = _turn if metadata.num_prefills else _advance
        advance(metadata, settings, input_tokens, sampled_token_ids, num_queries)


def _advance(
    metadata: CommonAttentionMetadata,
    settings: ListSettings,
    input_tokens: Any,
    sampled_token_ids: Any,
    num_queries: int | None,
) -> None:
    """``advance_step``, inside the builder."""
    n, tokens = _check_call(metadata, settings, input_tokens, sampled_token_ids, num_queries)
    step = plan_next(metadata, settings, n)
    check_built(metadata)  # a block id's own code may have set one
    before = BeforeNext(metadata, step, None if tokens is None else _plain(input_tokens)[: metadata.num_reqs])
    _make(metadata, settings, before, vars(metadata), input_tokens, n, tokens, write_next, step)


def _turn(
    metadata: CommonAttentionMetadata,
    settings: ListSettings,
    input_tokens: Any,
    sampled_token_ids: Any,
    num_queries: int | None,
) -> None:
    """``advance_step`` of a step with prompts, inside the builder: a build of the longer sequences, as decodes."""
    n, tokens = _check_call(metadata, settings, input_tokens, sampled_token_ids, num_queries)
    longer = turned_step(metadata)
    check_built(metadata)  # a block id's own code may have set one
    before = Before(metadata, vars(metadata), None if tokens is None else _plain(input_tokens)[:n])
    _make(metadata, settings, before, longer, input_tokens, n, tokens, _write_turned, longer)


def _write_turned(metadata: CommonAttentionMetadata, longer: dict[str, Any], settings: ListSettings) -> None:
    metadata.__dict__ = longer


def _make(
    metadata: CommonAttentionMetadata,
    settings: ListSettings,
    before: Before,
    after: dict[str, Any],
    input_tokens: Any,
    n: int,
    tokens: Any,
    write: Callable[[CommonAttentionMetadata, Any, ListSettings], None],
    step: Any,
) -> None:
    """Makes the step the next one, which ``write`` writes; its attributes are ``after`` then."""
    held, number = vars(metadata), settings.last_step + 1
    # For the next call, where this one never ends: a thread that has died in a forked process.
    settings.undo.append((_take_back, metadata, settings, number, (held, after), before))
    try:
        write(metadata, step, settings)
        if settings.plan is not None:
            settings.plan(metadata)
        if tokens is not None:
            input_tokens[:n] = tokens
            input_tokens[n : metadata.num_reqs] = 0
        settings.last_step = number  # it has happened
    except BaseException:
        if settings.last_step != number:
            # A signal's handler runs behind a call, and so finds the class set: who reads the step then has it settled.
            held["_unfinished"] = after["_unfinished"] = before
            try:  # noqa: SIM105
                object.__setattr__(metadata, "__class__", Unsettled)
            except TypeError:  # a subclass with slots of its own: the next call on the step settles it
                pass
            settle(metadata)
        raise


def _take_back(
    metadata: CommonAttentionMetadata,
    settings: ListSettings,
    number: int,
    attributes: tuple[dict[str, Any], dict[str, Any]],
    before: Before,
) -> None:
    """Takes back a step that did not become ``number``; its attributes may be either."""
    if settings.last_step != number and not before.restored:
        for held in attributes:
            held["_unfinished"] = before
        settle(metadata)


def _check_call(
    metadata: CommonAttentionMetadata,
    settings: ListSettings,
    input_tokens: Any,
    sampled_token_ids: Any,
    num_queries: int | None,
) -> tuple[int, Any]:
    """The number of rows without padding, and their sampled tokens; None where the engine passed none."""
    check_built(metadata)
    n = len(metadata.host.query_lens)
    if num_queries is not None and arguments.integer("num_queries", num_queries, 1) != n:
        raise ValueError(
            f"num_queries: {num_queries}, but the step has {counted(n, 'row')} without padding; build it anew"
        )
    tokens = _check_tokens(metadata, n, input_tokens, sampled_token_ids)
    refuse_while_capturing("cpu" if settings.backend is None else settings.backend.config.device, "advance_step")
    return n, tokens


def _check_metadata(metadata: CommonAttentionMetadata, turns: bool) -> ListSettings:
    """The settings of the step's builder; TypeError where it is no step, ValueError where the step cannot advance."""
    check_metadata("metadata", metadata)
    if metadata.source is None:
        raise ValueError(
            "metadata: not as CommonMetadataBuilder.build gave it (a copy, a view, a captured size, or of the "
            "persistent builder); advance the built step"
        )
    if metadata.num_prefills and not turns:
        raise ValueError(
            f"metadata: {counted(metadata.num_prefills, 'prompt')} in the step; only decodes advance without a build, "
            "so pass turn_prefills_into_decodes=True where each prompt sampled a token"
        )
    if metadata.num_decodes and metadata.max_decode_query_len > 1:
        row = metadata.num_prefills + int(metadata.host.query_lens[metadata.num_prefills :].argmax())
        raise ValueError(
            f"metadata: row {row} ran {counted(metadata.max_decode_query_len, 'token')}; decodes of one token "
            "advance, so build the step anew"
        )
    settings: ListSettings = metadata.source.builder
    return settings


def _check_tokens(metadata: CommonAttentionMetadata, n: int, input_tokens: Any, sampled: Any) -> Any:
    """The n sampled tokens in one dimension; None where the engine passed none."""
    if input_tokens is None and sampled is None:
        return None
    for name, value, length in (("input_tokens", input_tokens, metadata.num_reqs), ("sampled_token_ids", sampled, n)):
        if value is None:
            raise TypeError(f"{name}: missing; give input_tokens and sampled_token_ids both, or neither")
        check_readable(name, value)
        check_tensor(name, value)
        kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
        if not hasattr(value, "shape") or not kind.removeprefix("u").startswith("int"):
            raise TypeError(f"{name}: {type(value).__name__} is not an array or tensor of integers")
        if len(value.reshape(-1)) < length:
            raise ValueError(
                f"{name}: {counted(len(value.reshape(-1)), 'token')} for the {counted(length, 'row')} of the step"
            )
    if len(input_tokens.shape) != 1:
        raise ValueError(f"input_tokens: {list(input_tokens.shape)}; it must have one dimension")
    if isinstance(input_tokens, np.ndarray) and not input_tokens.flags.writeable:
        raise ValueError("input_tokens: a read-only array; the sampled tokens are written to it")
    if len(input_tokens) > 1 and _items_share_memory(input_tokens):
        raise ValueError("input_tokens: its elements share memory, as an expanded one's do; give one that has its own")
    tokens = _plain(sampled).reshape(-1)[:n]
    _check_range(tokens, input_tokens.dtype)
    if isinstance(tokens, np.ndarray) and not isinstance(input_tokens, np.ndarray):
        import torch

        return torch.from_numpy(tokens)
    return tokens


def _plain(tokens: Any) -> Any:
    """A tensor, or of any array the plain one: a subclass may give anything for a part of itself."""
    return np.asarray(tokens) if isinstance(tokens, np.ndarray) else tokens


def _items_share_memory(tokens: Any) -> bool:
    """Whether neighbours of an array or tensor of one dimension have a byte in common."""
    if isinstance(tokens, np.ndarray):
        return abs(tokens.strides[0]) < tokens.itemsize
    return bool(tokens.stride(0) == 0)


def _check_range(tokens: Any, dtype: Any) -> None:
    """ValueError where a token does not fit ``dtype``. Tokens on a GPU are not looked at: that would wait for it."""
    if str(getattr(tokens, "device", "cpu")) != "cpu":
        return
    values, room = np.asarray(tokens), _limits(dtype)
    given = _limits(values.dtype)
    if given.min >= room.min and given.max <= room.max:
        return
    for value in (int(values.min()), int(values.max())):
        if not room.min <= value <= room.max:
            raise ValueError(f"sampled_token_ids: {value} does not fit input_tokens, which are {dtype}")


def _limits(dtype: Any) -> Any:
    """The ``min`` and ``max`` of an integer dtype of NumPy or torch."""
    if isinstance(dtype, np.dtype):
        return np.iinfo(dtype)
    import torch

    return torch.iinfo(dtype)
