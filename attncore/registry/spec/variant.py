"""Variant: one generation of a library inside a spec, with the facts in which it differs from the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypedDict, Unpack

from attncore.quoted import MOST, one_line, quoted
from attncore.registry.host.host import Host
from attncore.registry.reasons import Reason
from attncore.registry.request import AttentionRequest
from attncore.registry.spec.option import Option
from attncore.registry.spec.sizes import MultipleOf

Check = Callable[[AttentionRequest, Host], Iterable[str | Reason]]
"""A plugin's own check of a request on a host: it yields every reason against."""


class VariantFacts(TypedDict, total=False):
    """The fields of a spec that a variant may state differently."""

    factory: str
    devices: Mapping[str, int]
    dtypes: Collection[str]
    kv_cache_dtypes: Collection[str]
    head_sizes: Collection[int] | MultipleOf
    block_sizes: Collection[int] | MultipleOf
    preferred_block_size: int | None
    kv_cache_layouts: Collection[str]
    features: Collection[str]
    unsupported: Mapping[str, str]
    cuda_graph: str
    host_needs: Collection[str]
    device_needs: Collection[str]
    phases: Collection[str]
    head_size_v: Collection[int] | MultipleOf | None
    use_mla: bool
    mla_only: bool
    max_group_size: int | None
    max_model_len: int | None
    max_block_id: int | None
    workspace_bytes: int | None
    compiles_at_run_time: bool
    finite_tail: bool
    finite_passed_blocks: bool
    host_lengths: str
    plan_staging: str
    pad_seq_len: int
    options: Mapping[str, Option]
    notes: Collection[str]
    check: Check | None


class Variant:
    """One generation of a library: its name, what it requires, and the facts in which it differs from the spec.

    TypeError that begins with the name of a fact that no variant may state.
    """

    __slots__ = ("facts", "name", "requires")

    def __init__(self, name: str, *, requires: Collection[str] = (), **facts: Unpack[VariantFacts]) -> None:
        unknown = sorted(set(facts) - VariantFacts.__annotations__.keys())
        if unknown:
            raise TypeError(
                f"{one_line(unknown[0], MOST)}: variant {quoted(name)} states a fact that no variant may state"
            )
        self.name = name
        self.requires = requires
        self.facts: Mapping[str, Any] = dict(facts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Variant):
            return NotImplemented
        return (self.name, tuple(self.requires), self.facts) == (other.name, tuple(other.requires), other.facts)

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.requires)))

    def __repr__(self) -> str:
        facts = "".join(f", {key}={value!r}" for key, value in self.facts.items())
        return f"Variant({self.name!r}, requires={self.requires!r}{facts})"
