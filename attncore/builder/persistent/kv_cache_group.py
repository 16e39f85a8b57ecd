"""KVCacheGroup: layers that share block tables, such as those of one sliding window, as a batch is told of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from attncore import arguments
from attncore.builder.persistent.state_group import MOST_STATE_GROUPS, StateGroup, checked_state_group
from attncore.quoted import quoted

MAX_GROUPS = 64

ONLY_GROUP = "decoder"
"""The name of the only group of a batch that was made with ``block_size`` instead of groups."""

NULL_BLOCK_ID = 0
"""The block that a table holds where a window has passed; no token is written to it."""


class KVCacheGroup(NamedTuple):
    """A group of layers whose caches are addressed by the same block table. InputBatch checks it."""

    name: str
    """The group's name, of 200 letters at most: the key in ``block_ids`` and in ``metadata.groups``."""
    block_size: int
    """Tokens of a manager block, as the engine's block manager allocates it."""
    kernel_block_size: int | None = None
    """Tokens of a kernel block, a divisor of ``block_size`` (None: the same). Tables hold kernel blocks."""
    sliding_window: int | None = None
    """Tokens that a query of these layers sees, itself included; earlier blocks may be released. None: all tokens."""
    cross: bool = False
    """Whether the group holds an encoder's keys and values, for cross attention."""
    num_blocks: int | None = None
    """The number of manager blocks of the cache: block ids are below it. None: any int32."""

    @property
    def kernel_blocks(self) -> int:
        """Columns of the table that a manager block takes."""
        return self.block_size // (self.kernel_block_size or self.block_size)

    @property
    def tokens_per_column(self) -> int:
        """Tokens that a column of the table stands for."""
        return self.kernel_block_size or self.block_size


def checked_groups(
    groups: Iterable[KVCacheGroup | StateGroup],
) -> tuple[tuple[KVCacheGroup, ...], tuple[StateGroup, ...]]:
    """The KV-cache groups, decoder groups first and the cross group last, and the groups of states.

    ValueError or TypeError that names the field.
    """
    try:
        given = tuple(groups)
    except TypeError:
        raise TypeError(f"groups: {quoted(groups)} is not a list of KVCacheGroup") from None
    checked = [
        checked_state_group(f"groups[{index}]", group)
        if isinstance(group, StateGroup)
        else _checked_group(f"groups[{index}]", group)
        for index, group in enumerate(given)
    ]
    names: set[str] = set()
    for index, group in enumerate(checked):
        if group.name in names:
            raise ValueError(f"groups[{index}].name: {group.name!r} stands twice; name each group differently")
        names.add(group.name)
    states = tuple(group for group in checked if isinstance(group, StateGroup))
    tables = [group for group in checked if isinstance(group, KVCacheGroup)]
    decoders = tuple(group for group in tables if not group.cross)
    crosses = tuple(group for group in tables if group.cross)
    if not decoders:
        why = "give one that is not cross"
        if states and not crosses:
            why = "for a model without attention give one whose blocks have max_model_len tokens, as many as slots"
        raise ValueError(f"groups: none holds the decoder's own keys; {why}")
    if len(states) > MOST_STATE_GROUPS:
        raise ValueError(f"groups: {len(states)} of states given; a batch takes {MOST_STATE_GROUPS}")
    if len(crosses) > 1:
        raise ValueError(f"groups: {crosses[0].name!r} and {crosses[1].name!r} are both cross; give one")
    if len(decoders) > MAX_GROUPS:
        raise ValueError(f"groups: {len(decoders)} given; a batch takes {MAX_GROUPS}")
    return decoders + crosses, states


def _checked_group(path: str, given: object) -> KVCacheGroup:
    """The group with a plain name and ints, each field read once; ValueError or TypeError that names the field."""
    if not isinstance(given, KVCacheGroup):
        raise TypeError(f"{path}: {quoted(given)} is not a KVCacheGroup")
    named, block_size, kernel_block_size, sliding_window, cross, num_blocks = tuple.__iter__(given)
    name = arguments.name(f"{path}.name", named)
    block_size = arguments.integer(f"{path}.block_size", block_size, 1)
    kernel_block_size = arguments.optional_integer(f"{path}.kernel_block_size", kernel_block_size, 1)
    if kernel_block_size is not None and block_size % kernel_block_size:
        raise ValueError(
            f"{path}.kernel_block_size: {kernel_block_size} does not divide its block_size {block_size}; "
            "choose a block size that is a multiple of the kernel's"
        )
    sliding_window = arguments.optional_integer(f"{path}.sliding_window", sliding_window, 1)
    num_blocks = arguments.optional_integer(f"{path}.num_blocks", num_blocks, 1)
    cross = arguments.flag(f"{path}.cross", cross)
    if cross and sliding_window is not None:
        raise ValueError(f"{path}.sliding_window: given for a cross group, whose queries see the whole encoder")
    return KVCacheGroup(name, block_size, kernel_block_size, sliding_window, cross, num_blocks)
