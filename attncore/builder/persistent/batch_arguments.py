"""Checks of the arguments of InputBatch: its groups, new requests, block ids by group."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attncore import arguments
from attncore.builder.persistent.kv_cache_group import ONLY_GROUP, KVCacheGroup, checked_groups
from attncore.builder.persistent.state_group import StateGroup
from attncore.quoted import MAX_PART, one_line, plain_text, quoted

if TYPE_CHECKING:
    from attncore.builder.persistent.batch_core import BatchCore


def groups_of(
    groups: Iterable[KVCacheGroup | StateGroup] | None, block_size: int | None, num_blocks: int | None
) -> tuple[tuple[KVCacheGroup, ...], tuple[StateGroup, ...]]:
    """The KV-cache groups and the groups of states, from ``groups`` or from ``block_size``.

    ValueError where both or neither are given.
    """
    if groups is not None:
        for name, value in (("block_size", block_size), ("num_blocks", num_blocks)):
            if value is not None:
                raise ValueError(f"{name}: {value} given beside groups, which state their own; give one of the two")
        return checked_groups(groups)
    if block_size is None:
        raise ValueError("block_size: missing; give it, or groups that state their own")
    block_size = arguments.integer("block_size", block_size, 1)
    num_blocks = arguments.optional_integer("num_blocks", num_blocks, 1)
    return (KVCacheGroup(ONLY_GROUP, block_size, num_blocks=num_blocks),), ()


def check_new_request(
    core: BatchCore, req_id: Hashable, num_computed_tokens: int, encoder_seq_len: int, encoder_computed: bool
) -> tuple[int, int, bool]:
    """The numbers of tokens as ints, and the flag; ValueError or TypeError where the request cannot be added."""
    if req_id is None:
        raise ValueError("req_id: None cannot name a request")
    try:
        hash(req_id)
    except TypeError as error:
        raise TypeError(f"req_id: {quoted(req_id)} cannot name a request ({one_line(error, MAX_PART)})") from None
    if req_id in core.order.row_of:
        raise ValueError(f"req_id: {quoted(req_id)} is in the batch already; remove it first")
    num_computed_tokens = arguments.integer("num_computed_tokens", num_computed_tokens, 0)
    if num_computed_tokens > core.max_model_len:
        raise ValueError(
            f"num_computed_tokens: {num_computed_tokens} of request {quoted(req_id)} exceed "
            f"max_model_len {core.max_model_len}"
        )
    encoder_seq_len = arguments.integer("encoder_seq_len", encoder_seq_len, 0)
    if encoder_seq_len > core.max_encoder_len:
        if core.cross is None:
            raise ValueError(f"encoder_seq_len: {encoder_seq_len} of request {quoted(req_id)}, but no group is cross")
        raise ValueError(
            f"encoder_seq_len: {encoder_seq_len} of request {quoted(req_id)} exceed max_encoder_len "
            f"{core.max_encoder_len}"
        )
    encoder_computed = arguments.flag("encoder_computed", encoder_computed)
    if encoder_computed and core.cross is None:
        raise ValueError(f"encoder_computed: true for request {quoted(req_id)}, but no group is cross")
    if core.order.num_reqs == core.max_num_reqs:
        raise ValueError(f"req_id: no row for {quoted(req_id)}; the batch holds max_num_reqs {core.max_num_reqs}")
    return num_computed_tokens, encoder_seq_len, encoder_computed


def ids_by_group(
    tables: Mapping[str, object], req_id: Hashable, block_ids: Any, *, all_groups: bool = False
) -> dict[str, Any]:
    """Block ids by group name, as given; ValueError or TypeError for an unknown group or, with ``all_groups``, a
    missing one.
    """
    if not isinstance(block_ids, Mapping):
        raise TypeError(
            f"block_ids: {quoted(block_ids)} of request {quoted(req_id)} is not a mapping; give ids by group: "
            f"{', '.join(tables)}"
        )
    try:
        given = [
            (key, ids) for key, ids in block_ids.items()
        ]  # read once: the caller's mapping may answer otherwise the next time
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"block_ids: of request {quoted(req_id)}, its items are no names and ids ({one_line(error, MAX_PART)})"
        ) from None
    by_name: dict[str, Any] = {}
    for key, ids in given:
        name = plain_text(key)
        if name is None or name not in tables:
            raise ValueError(
                f"block_ids: request {quoted(req_id)} names group {quoted(key)}; known: {', '.join(tables)}"
            )
        by_name[name] = ids
    if all_groups:
        for name in tables:
            if name not in by_name:
                raise ValueError(
                    f"block_ids: request {quoted(req_id)} has none for group {name!r}; give a list, if empty"
                )
    return by_name
