"""LayersChoice: a backend for each kind of layers of one model, and the KV-cache groups of their batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncore.quoted import quoted
from attncore.registry.choice.cache_format import choose_block_size, common_block_sizes, common_layouts
from attncore.registry.choice.choice import Choice, choice_of
from attncore.registry.choice.negotiate import Negotiation
from attncore.registry.choice.negotiate_layers import LayersNegotiation, is_cross
from attncore.registry.spec import sizes
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.sizes import Sizes
from attncore.show import guarded

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend
    from attncore.builder import KVCacheGroup


@dataclass(frozen=True)
class LayersChoice(Mapping[str, Choice]):
    """A choice for each kind of layers, by the kind's name; one batch and one builder serve them all.

    Kinds for which the same backend would be created with the same configuration (layers that differ in sinks or slopes
    alone) share a KV-cache group and its block tables; ``group_of`` has the group's name, which is that of its first
    kind.
    """

    choices: Mapping[str, Choice]
    group_of: Mapping[str, str]

    def __getitem__(self, kind: str) -> Choice:
        return self.choices[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self.choices)

    def __len__(self) -> int:
        return len(self.choices)

    @guarded
    def __repr__(self) -> str:
        lines = (f"\n {quoted(kind)}: {choice!r}," for kind, choice in self.choices.items())
        return f"LayersChoice({''.join(lines)})"

    def kv_cache_groups(self) -> tuple[KVCacheGroup, ...]:
        """The groups of ``InputBatch(groups=)``: names, block sizes of manager and kernel, windows, the cross group."""
        from attncore.builder import KVCacheGroup

        groups = []
        for name in dict.fromkeys(self.group_of.values()):
            choice = self.choices[name]
            request, per_block = choice.request, choice.blocks_per_manager_block
            groups.append(
                KVCacheGroup(
                    name,
                    choice.block_size * per_block,
                    choice.block_size,
                    None if is_cross(request) else request.sliding_window,
                    is_cross(request),
                    None if request.num_blocks is None else request.num_blocks // per_block,
                )
            )
        return tuple(groups)

    def create(self, device: str | None = None) -> dict[str, AttentionBackend]:
        """Group -> its backend, as ``MetadataBuilder(batch, backends)`` takes them: one for each, for a plan is of one
        group's pages. A layer's ``impl`` is of ``backends[choice.group_of[kind]]``. Errors as of ``Choice.create``.
        """
        return {name: self.choices[name].create(device) for name in dict.fromkeys(self.group_of.values())}

    def explain(self) -> str:
        """The negotiation of each kind in words, and the groups."""
        parts = [f"layers {quoted(kind)}:\n{choice.explain()}" for kind, choice in self.choices.items()]
        return "\n".join((*parts, *map(self._group_text, dict.fromkeys(self.group_of.values()))))

    def _group_text(self, name: str) -> str:
        choice = self.choices[name]
        kinds = ", ".join(quoted(kind) for kind, group in self.group_of.items() if group == name)
        variant = f", variant {choice.candidate.variant_label}" if choice.variant else ""
        return (
            f"group {quoted(name)}: {choice.name}{variant}, block_size {choice.block_size}, kv_cache_layout "
            f"{choice.kv_cache_layout}, layers {kinds}"
        )

    def as_json(self) -> dict[str, Any]:
        """The choice as JSON types."""
        return {kind: {**choice.as_json(), "group": self.group_of[kind]} for kind, choice in self.choices.items()}


def choose_layers(negotiation: LayersNegotiation) -> LayersChoice | None:
    """What a negotiation for layers chose, block sizes and layouts settled; None where it chose nothing."""
    if not negotiation.agreed:
        return None
    by_kind = negotiation.by_kind
    block_sizes = _block_sizes(by_kind)
    choices = {
        kind: choice_of(one, block_sizes[kind], common_layouts(_spec(one), one.request)[0])
        for kind, one in by_kind.items()
    }
    return LayersChoice(choices, _groups(choices))


def _block_sizes(by_kind: Mapping[str, Negotiation]) -> dict[str, int]:
    """Kind -> its block size. A kind joins the first kinds before it with which it has a size in common: groups of one
    size cost less in a step.
    """
    shared: list[tuple[list[str], Sizes]] = []
    for kind, one in by_kind.items():
        accepted = common_block_sizes(_spec(one), one.request)
        for place, (kinds, found) in enumerate(shared):
            both = sizes.intersection(found, accepted)
            if not isinstance(both, frozenset) or both:
                shared[place] = ([*kinds, kind], both)
                break
        else:
            shared.append(([kind], accepted))
    answer = {}
    for kinds, found in shared:
        managed = [kind for kind in kinds if by_kind[kind].request.manager_block_size is not None]
        preferred = [_spec(by_kind[kind]).preferred_block_size for kind in kinds]
        size = choose_block_size(found, by_kind[(managed or kinds)[0]].request, preferred)
        answer.update(dict.fromkeys(kinds, size))
    return answer


def _spec(negotiation: Negotiation) -> BackendSpec:
    if negotiation.chosen is None or negotiation.chosen.spec is None:
        raise ValueError(f"negotiation: {negotiation.refusal}")
    return negotiation.chosen.spec


def _groups(choices: Mapping[str, Choice]) -> dict[str, str]:
    """Kind -> the first kind whose backend, configuration, manager's block and number of blocks are the same."""
    firsts: list[tuple[str, tuple[Any, ...]]] = []
    group_of = {}
    for kind, choice in choices.items():
        request = choice.request
        what = (choice.name, choice.config(), request.manager_block_size, request.num_blocks, is_cross(request))
        group_of[kind] = next((name for name, other in firsts if other == what), kind)
        if group_of[kind] == kind:
            firsts.append((kind, what))
    return group_of
