"""KVCacheGroup: layers that share block tables, such as those of one sliding window, as a batch is told of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from attncore import arguments

MAX_GROUPS = 64

NULL_BLOCK_ID = 0
"""The block that a table holds where a window has passed; no token is written to it."""


class KVCacheGroup(NamedTuple):
    """A group of layers whose caches are addressed by the same block table. InputBatch checks it."""

    name: str
    """The group's name: the key in ``block_ids`` and in ``metadata.groups``."""
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


def checked_groups(groups: Iterable[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """The groups, decoder groups first and the cross group last; ValueError or TypeError that names the field."""
    try:
        given = tuple(groups)
    except TypeError:
        raise TypeError(f"groups: {groups!r} is not a list of KVCacheGroup") from None
    names: set[str] = set()
    for index, group in enumerate(given):
        path = f"groups[{index}]"
        if not isinstance(group, KVCacheGroup):
            raise TypeError(f"{path}: {group!r} is not a KVCacheGroup")
        if not isinstance(group.name, str) or not group.name:
            raise TypeError(f"{path}.name: {group.name!r} is not a name")
        if group.name in names:
            raise ValueError(f"{path}.name: {group.name!r} stands twice; name each group differently")
        names.add(group.name)
        arguments.integer(f"{path}.block_size", group.block_size, 1)
        if group.kernel_block_size is not None:
            arguments.integer(f"{path}.kernel_block_size", group.kernel_block_size, 1)
            if group.block_size % group.kernel_block_size:
                raise ValueError(
                    f"{path}.kernel_block_size: {group.kernel_block_size} does not divide its block_size "
                    f"{group.block_size}; choose a block size that is a multiple of the kernel's"
                )
        for field in ("sliding_window", "num_blocks"):
            if getattr(group, field) is not None:
                arguments.integer(f"{path}.{field}", getattr(group, field), 1)
        if not isinstance(group.cross, bool):
            raise TypeError(f"{path}.cross: {group.cross!r} is not true or false")
        if group.cross and group.sliding_window is not None:
            raise ValueError(f"{path}.sliding_window: given for a cross group, whose queries see the whole encoder")
    decoders = tuple(group for group in given if not group.cross)
    crosses = tuple(group for group in given if group.cross)
    if not decoders:
        raise ValueError("groups: none holds the decoder's own keys; give one that is not cross")
    if len(crosses) > 1:
        raise ValueError(f"groups: {crosses[0].name!r} and {crosses[1].name!r} are both cross; give one")
    if len(decoders) > MAX_GROUPS:
        raise ValueError(f"groups: {len(decoders)} given; a batch takes {MAX_GROUPS}")
    return decoders + crosses
