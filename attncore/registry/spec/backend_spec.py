"""BackendSpec: the static facts of a backend. Light: it is written, read and compared without torch and without a GPU.

A spec fails closed: what it does not declare, the backend does not support.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from attncore.registry.spec.sizes import MultipleOf

if TYPE_CHECKING:
    from attncore.registry.host.host import Host
    from attncore.registry.reasons import Reason
    from attncore.registry.request import AttentionRequest

ATTNCORE_API = 1
"""The version of the contract between attncore and a backend that this attncore speaks."""

Check = Callable[["AttentionRequest", "Host"], "Iterable[str | Reason]"]


class ContractVersionError(ValueError):
    """A spec was written for another version of the contract; ``api`` is the one it names."""

    def __init__(self, api: object) -> None:
        self.api = api
        super().__init__(f"api: built for contract {api}; this attncore speaks {ATTNCORE_API}")


@dataclass(frozen=True, slots=True)
class Option:
    """One option that a backend takes in ``Choice.create(options={...})``.

    ``type`` is bool, int, float or str; ``choices``, where given, are the only values; ``default`` is None or such a
    value.
    """

    type: type
    help: str
    default: bool | int | float | str | None = None
    choices: tuple[bool | int | float | str, ...] = ()

    def __post_init__(self) -> None:
        if self.type not in (bool, int, float, str):
            raise ValueError(f"type: {self.type!r} is not bool, int, float or str")
        for value in (*self.choices, *(() if self.default is None else (self.default,))):
            if wrong := self.problem(value):
                raise ValueError(f"choices: {value!r} {wrong}")

    def problem(self, value: object) -> str | None:
        """What is wrong with ``value``, as the end of a sentence; None where nothing is."""
        fits = isinstance(value, (int, float) if self.type is float else self.type)
        if not fits or (self.type is not bool and isinstance(value, bool)):
            return f"is not {'an' if self.type is int else 'a'} {self.type.__name__}"
        if self.choices and value not in self.choices:
            return f"is not one of {', '.join(map(repr, self.choices))}"
        return None


class VariantFacts(TypedDict, total=False):
    """The fields of a spec that one of its variants may state differently."""

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
    needs: Collection[str]
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
    host_lengths: str
    plan_staging: str
    pad_seq_len: int
    options: Mapping[str, Option]
    notes: Collection[str]
    check: Check | None


class Variant:
    """One generation of a library inside a spec: its name, what it requires, and the facts in which it differs."""

    __slots__ = ("facts", "name", "requires")

    def __init__(self, name: str, *, requires: Collection[str] = (), **facts: Unpack[VariantFacts]) -> None:
        unknown = sorted(set(facts) - VariantFacts.__annotations__.keys())
        if unknown:
            raise TypeError(f"{unknown[0]}: variant {name!r} states a fact that no variant may state")
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


@dataclass(frozen=True)
class BackendSpec:
    """What a backend is, needs and supports. Collections may be given as any; they are kept immutable.

    Raises ValueError that lists every field that makes no sense, TypeError beginning with the name of a field that is
    missing or that a spec does not have, and ContractVersionError (before anything else is looked at, so that fields
    of a later contract do not matter) when ``api`` is not ATTNCORE_API.
    """

    name: str
    """Equal to the name of the entry point."""
    _: KW_ONLY
    api: int
    """The version of the contract that the backend was written for."""
    factory: str
    """``module:Class`` of the AttentionBackend; imported only when it is created."""
    devices: Mapping[str, int]
    """Pattern of devices -> priority, 0 to 100; where several match, the closest counts."""
    dtypes: Collection[str]
    """Of DTYPES: dtypes of query, key, value and output."""
    head_sizes: Collection[int] | MultipleOf
    """Sizes of a head."""
    block_sizes: Collection[int] | MultipleOf
    """Tokens that a block of the kernel may hold."""
    kv_cache_dtypes: Collection[str] = ("auto",)
    """Of KV_CACHE_DTYPES; ``auto`` is the model's dtype."""
    preferred_block_size: int | None = None
    """The one to use where the request leaves it open; None: the smallest."""
    kv_cache_layouts: Collection[str] = ("NHD",)
    """Of KV_CACHE_LAYOUTS, the preferred one first."""
    features: Collection[str] = ()
    """Of FEATURES: what the backend has beyond causal attention over a paged cache with grouped heads."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Feature -> why the backend does not have it."""
    cuda_graph: str = "never"
    """Of GRAPH_LEVELS: the most that may be captured."""
    needs: Collection[str] = ("block_table",)
    """Of NEEDS."""
    requires: Collection[str] = ()
    """Distributions with versions (``acme-kernels>=2``) that must be installed."""
    phases: Collection[str] = ("prefill", "decode")
    """Of PHASES: the parts of a step that the backend can run."""
    head_size_v: Collection[int] | MultipleOf | None = None
    """Sizes of a value head where it differs from the query's; None: it must be the same."""
    use_mla: bool = False
    """Whether the backend runs latent attention (one latent head, values a part of keys)."""
    mla_only: bool = False
    """Whether latent attention is all that it runs."""
    max_group_size: int | None = None
    """Most query heads per key/value head."""
    max_model_len: int | None = None
    """Longest sequence, in tokens."""
    max_block_id: int | None = None
    """Largest block id that the kernel reads rightly."""
    workspace_bytes: int | None = None
    """Device memory that the library asks for beyond the cache."""
    compiles_at_run_time: bool = False
    """Whether the library compiles kernels at first use."""
    finite_tail: bool = False
    """Whether unused rows of a last page must hold finite numbers."""
    host_lengths: str = "none"
    """Of HOST_LENGTHS."""
    plan_staging: str = "shared"
    """Of PLAN_STAGING."""
    pad_seq_len: int = 0
    """``seq_lens`` of a padded row under a captured graph: 0 or 1."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Name -> what the backend takes in ``Choice.create(options=...)``."""
    notes: Collection[str] = ()
    """What to know before using it, in words that ``explain`` repeats: no reasons against it."""
    check: Check | None = None
    """``check(request, host)`` yields sentences (or reasons) why not; for what no other field can say."""
    variants: tuple[Variant, ...] = ()
    """Generations of the library, the preferred one first; the first that fits a request is used."""

    def __new__(cls, *args: object, **kwargs: object) -> BackendSpec:
        api = kwargs.get("api", ATTNCORE_API)
        if type(api) is not int:  # True and 1.0 equal 1, and are no version of a contract
            raise TypeError(f"api: {api!r} is not an integer; state the contract, api={ATTNCORE_API}")
        if api != ATTNCORE_API:
            raise ContractVersionError(api)
        if args or kwargs:  # a copy is made without arguments
            _check_fields({one.name: one for one in fields(cls)}, bool(args), kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        from attncore.registry.spec.check_fields import normalise

        values, problems = normalise({one.name: getattr(self, one.name) for one in fields(self)})
        if problems:
            raise ValueError("; ".join(problems))
        for name, value in values.items():
            object.__setattr__(self, name, value)
        forms = []
        for variant in self.variants:
            requires = (*self.requires, *variant.requires)
            try:
                forms.append((variant.name, replace(self, variants=(), requires=requires, **variant.facts)))
            except ValueError as error:
                problems.append(f"variants: {variant.name!r}: {error}")
        if problems:
            raise ValueError("; ".join(problems))
        object.__setattr__(self, "_forms", tuple(forms) or (("", self),))

    @property
    def forms(self) -> tuple[tuple[str, BackendSpec], ...]:
        """The spec as each of its variants states it, with the variant's name; a spec without variants is its own
        form.
        """
        forms: tuple[tuple[str, BackendSpec], ...] = self.__dict__["_forms"]
        return forms

    @property
    def all_requires(self) -> tuple[str, ...]:
        """Every requirement, of any variant."""
        return tuple(dict.fromkeys(one for _, form in self.forms for one in form.requires))


def _check_fields(known: Mapping[str, Field[Any]], named: bool, given: Collection[str]) -> None:
    """TypeError for a field that must be stated and is not, ``api`` first, and for one that a spec does not have."""
    if "api" not in given:
        raise TypeError(f"api: missing; state the contract, api={ATTNCORE_API}")
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise TypeError(f"{name}: a spec has no such field" + (f"; did you mean {close[0]}?" if close else ""))
    for name, one in known.items():
        needed = one.default is MISSING and one.default_factory is MISSING and not (named and name == "name")
        if needed and name not in given:
            raise TypeError(f"{name}: missing; a spec must state it")
