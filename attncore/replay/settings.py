"""Settings: the options of a replay."""

from __future__ import annotations

from dataclasses import dataclass, field

from attncore.arguments import INT32_MAX, integer
from attncore.builder.persistent.kv_cache_group import ONLY_GROUP, KVCacheGroup
from attncore.builder.persistent.state_group import StateGroup
from attncore.replay.scheduling.cost_model import CostModel
from attncore.replay.scheduling.draft_model import Speculation


@dataclass(frozen=True)
class Settings:
    """The options of a replay; the command line says what each means.

    ``groups`` are the KV-cache groups where several were asked for; ``block_size`` then says nothing. With
    ``world_size`` ranks, blocks hold ``block_size`` tokens on each. ``keeps_states``: the model has recurrent layers.
    A request then has a slot for its states, of ``max_num_seqs`` and the null slot, and no prefix is found in the
    cache, since states of a prefix are not kept.
    """

    num_blocks: int = 16384
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    rate: float = 1.0
    clock: CostModel = field(default_factory=CostModel)
    verify_every: int = 16
    seed: int = 0
    groups: tuple[KVCacheGroup, ...] | None = None
    speculation: Speculation | None = None
    world_size: int = 1
    interleave: int = 1
    keeps_states: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_blocks", 1, 2**63 - 1),
            ("block_size", 1, INT32_MAX),
            ("max_num_seqs", 1, INT32_MAX),
            ("max_num_batched_tokens", 1, INT32_MAX),
            ("verify_every", 0, INT32_MAX),
            ("seed", 0, 2**63 - 1),
            ("world_size", 1, INT32_MAX),
            ("interleave", 1, INT32_MAX),
        ):
            object.__setattr__(self, name, integer(name, getattr(self, name), least, most))

    @property
    def groups_of_rank(self) -> tuple[KVCacheGroup, ...]:
        """The groups, or the only one, with the block size of one rank."""
        return self.groups or (KVCacheGroup(ONLY_GROUP, self.block_size),)

    @property
    def groups_of_batch(self) -> tuple[KVCacheGroup, ...]:
        """The same with the tokens that a block id stands for on all ranks, and the size of the caches."""
        return tuple(
            group._replace(block_size=group.block_size * self.world_size, num_blocks=self.num_blocks)
            for group in self.groups_of_rank
        )

    @property
    def states(self) -> StateGroup | None:
        """The group of states of a model that has some."""
        return StateGroup("states", self.max_num_seqs + 1) if self.keeps_states else None

    @property
    def has_windows(self) -> bool:
        """Whether a group has a sliding window."""
        return any(group.sliding_window for group in self.groups_of_rank)

    @property
    def decode_threshold(self) -> int:
        """The largest number of tokens of a decode: its own and its drafts."""
        return 1 + (self.speculation.num_drafts if self.speculation else 0)
