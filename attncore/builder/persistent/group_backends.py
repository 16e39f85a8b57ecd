"""The backends that a builder builds for: one for all KV-cache groups, or one for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.checked_backend import check_backend
from attncore.builder.metadata import Wrap
from attncore.builder.rank_drafts import INSTEAD
from attncore.builder.read_only import read_only
from attncore.quoted import quoted
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.persistent.batch_core import BatchCore
    from attncore.builder.persistent.step_metadata import StepMetadata


class Backends:
    """What a builder asks of its backends. ``by_group`` maps a group's name to its backend; None gives NumPy arrays."""

    def __init__(self, by_group: Mapping[str, Any]) -> None:
        self.by_group = dict(by_group)
        given = [backend for backend in self.by_group.values() if backend is not None]
        self.wraps: dict[str, Wrap] = {
            name: read_only if backend is None else backend.from_host for name, backend in self.by_group.items()
        }
        self.plans = tuple(
            (name, backend.plan) for name, backend in self.by_group.items() if backend is not None and backend.has_plan
        )
        devices = {backend.config.device for backend in given}
        if len(devices) > 1:
            raise ValueError(f"backend: they are on different devices, {' and '.join(sorted(devices))}; choose one")
        self.device: str = devices.pop() if devices else "cpu"
        self.page_lists = [
            index
            for index, backend in enumerate(self.by_group.values())
            if backend is not None and backend.spec is not None and "paged_kv_indices" in backend.spec.device_needs
        ]
        """Groups whose backends read page indices on the device: every step makes them there."""
        self.waits_for_last_plan = any(
            backend.has_plan and (backend.spec is None or backend.spec.plan_staging == "shared") for backend in given
        )
        pads = {backend.config.spec.pad_seq_len for backend in given if backend.config.spec}
        if len(pads) > 1:
            raise ValueError("backend: they state different pad_seq_len; lengths are shared, so choose ones that agree")
        self.pad_seq_len: int = pads.pop() if pads else 0

    def plan(self, metadata: StepMetadata, left: tuple[Any, ...] | None) -> None:
        """Each group's plan for the step; ``left``: those alone that its graph does not make, of ``record_plans``."""
        for name, plan in self.plans if left is None else left:
            plan(metadata.groups[name])

    def record_plans(self, metadata: StepMetadata) -> tuple[Any, ...]:
        """Records, inside a capture, what plans each step on the device; the plans that remain the host's."""
        return tuple(
            (name, plan) for name, plan in self.plans if not self.by_group[name].record_plan(metadata.groups[name])
        )

    def graph_level(self) -> tuple[str, str]:
        """The lowest ``cuda_graph`` level of the backends, and that backend's name; ``("always", "")`` without one."""
        from attncore.vocabulary import GRAPH_LEVELS

        levels = [
            (backend.config.spec.cuda_graph, backend.name)
            for backend in self.by_group.values()
            if backend is not None and backend.spec
        ]
        return min(levels, key=lambda level: [*GRAPH_LEVELS].index(level[0]), default=("always", ""))


def backends_of(core: BatchCore, backend: Any, ranks: ContextParallel | None, decode_threshold: int = 1) -> Backends:
    """One backend for each group, checked against the group's block size; of a rank, against drafts.

    Raises ValueError or TypeError that says what is wrong.
    """
    world = _world_size(core, ranks)
    names = [group.name for group in core.groups]
    if isinstance(backend, Mapping):
        for name in backend:
            if name not in names:
                raise ValueError(f"backend: {quoted(name)} is no group of the batch; known: {', '.join(names)}")
        for name in names:
            if name not in backend:
                raise ValueError(f"backend: none for group {name!r}")
        by_group = {name: backend[name] for name in names}
    else:
        by_group = dict.fromkeys(names, backend)
    for group in core.groups:
        if by_group[group.name] is not None:
            _check_backend(by_group[group.name], group.name, group.tokens_per_column, world, len(names) > 1)
            _check_ranks(by_group[group.name], ranks)
    if world > 1 and decode_threshold > 1 and any(one is not None and one.spec for one in by_group.values()):
        raise ValueError(
            f"decode_threshold: {decode_threshold} with context_parallel of {counted(world, 'rank')} and a backend; "
            f"{INSTEAD} (of a builder without a backend), or leave decode_threshold at 1"
        )
    planning = [given for given in by_group.values() if given is not None and given.has_plan]
    for given in planning:
        if sum(given is other for other in planning) > 1:
            raise ValueError(
                f"backend: {given.name!r} plans, and is given for several groups; a plan is of one group's pages, so "
                "create one backend for each and give them by name"
            )
    return Backends(by_group)


def _check_backend(backend: Any, group: str, block_size: int, world: int, several: bool) -> None:
    check_backend(backend)
    if backend.config.block_size * world != block_size:
        what = f"batch: group {group!r}: its" if several else "batch: its"
        ranks = f" on each of {counted(world, 'rank')}" if world > 1 else ""
        raise ValueError(
            f"{what} block_size {block_size} is not the backend's {backend.config.block_size}{ranks}; "
            "use choice.block_size"
        )


def _check_ranks(backend: Any, ranks: ContextParallel | None) -> None:
    """ValueError where the layers of ``attncore.ranks.over_ranks`` take other tokens for the rank's than its steps."""
    layers = getattr(backend, "ranks", None)
    if isinstance(layers, ContextParallel) and _share(layers) != _share(ranks):
        raise ValueError(
            f"context_parallel: {quoted(ranks)} given, but the layers of backend {backend.name!r} attend over "
            f"{quoted(layers)}; give that"
        )


def _share(ranks: ContextParallel | None) -> tuple[int, ...]:
    """What says which tokens are a rank's; empty where one rank has all."""
    if ranks is None or ranks.world_size == 1:
        return ()
    return ranks.world_size, ranks.rank, ranks.block_size, ranks.interleave


def _world_size(core: BatchCore, ranks: ContextParallel | None) -> int:
    if ranks is None:
        return 1
    for group in core.groups:
        if group.cross or group.sliding_window is not None:
            what = "cross" if group.cross else "windowed"
            raise ValueError(f"context_parallel: group {group.name!r} is {what}; ranks share out whole contexts only")
        if group.tokens_per_column != ranks.virtual_block_size:
            raise ValueError(
                f"context_parallel: blocks of {counted(ranks.block_size, 'token')} on each of "
                f"{counted(ranks.world_size, 'rank')} are "
                f"virtual blocks of {ranks.virtual_block_size}; group {group.name!r} has {group.tokens_per_column}"
            )
    return ranks.world_size
