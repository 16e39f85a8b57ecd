"""BackendSpec: the static facts of a backend, written, read and compared without torch and without a GPU.

A backend does not support what its spec does not declare.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields
from typing import Any

from attncore.did_you_mean import did_you_mean
from attncore.quoted import MOST, one_line, quoted
from attncore.registry.device_patterns import in_order
from attncore.registry.spec.check_fields import check_fields
from attncore.registry.spec.option import Option
from attncore.registry.spec.sizes import MultipleOf, describe
from attncore.registry.spec.variant import Check, Variant
from attncore.show import angled, guarded, short, some

ATTNCORE_API = 1
"""The version of the contract between attncore and a backend that this attncore speaks."""


class ContractVersionError(ValueError):
    """A spec was written for another version of the contract; ``api`` is the one it names."""

    def __init__(self, api: object) -> None:
        self.api = api
        super().__init__(f"api: built for contract {quoted(api)}; this attncore speaks {ATTNCORE_API}")


@dataclass(frozen=True, repr=False)
class BackendSpec:
    """What a backend is, needs and supports. Any collection may be given; each is kept as an immutable one.

    Raises ValueError that lists every field with a bad value, TypeError that begins with the name of a field that is
    missing or unknown, and ContractVersionError when ``api`` is not ATTNCORE_API. The version is checked first, so that
    fields of a later contract do not matter.
    """

    name: str
    """Equal to the name of the entry point."""
    _: KW_ONLY
    api: int
    """The version of the contract that the backend was written for."""
    factory: str
    """``module:Class`` of the AttentionBackend; imported only when it is created."""
    devices: Mapping[str, int]
    """Pattern of devices -> priority, 0 to 100; of several patterns that match, the most specific counts."""
    dtypes: Collection[str]
    """Of DTYPES: dtypes of query, key, value and output."""
    head_sizes: Collection[int] | MultipleOf
    """Sizes of a head."""
    block_sizes: Collection[int] | MultipleOf
    """Tokens that a block of the kernel may hold."""
    kv_cache_dtypes: Collection[str] = ("auto",)
    """Of KV_CACHE_DTYPES; ``auto`` is the model's dtype."""
    preferred_block_size: int | None = None
    """The block size to use where the request leaves it open; None: the smallest."""
    kv_cache_layouts: Collection[str] = ("NHD",)
    """Of KV_CACHE_LAYOUTS, the preferred one first."""
    features: Collection[str] = ()
    """Of FEATURES: what the backend has beyond causal attention over a paged cache with grouped heads."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Feature -> why the backend does not have it."""
    cuda_graph: str = "never"
    """Of GRAPH_LEVELS: the highest level that may be captured."""
    host_needs: Collection[str] = ()
    """Fields of ``metadata.host`` that it reads, in ``plan`` or a layer."""
    device_needs: Collection[str] = ()
    """Fields of metadata that it reads on the device: what a step is sent with. Builders make page lists where
    ``paged_kv_indices`` is one."""
    requires: Collection[str] = ()
    """Distributions with versions (``acme-kernels>=2``) that must be installed."""
    install: Mapping[str, str] = field(default_factory=dict)
    """Distribution that it requires -> how to get it, where ``pip install`` with its name is no good advice."""
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
    """Largest block id that the kernel reads correctly."""
    workspace_bytes: int | None = None
    """Device memory that the library asks for beyond the cache."""
    compiles_at_run_time: bool = False
    """Whether the library compiles kernels at first use."""
    finite_tail: bool = False
    """Whether unused rows of a last page must hold finite numbers."""
    finite_passed_blocks: bool = False
    """Whether the null block, and blocks that a window has passed, must hold finite numbers: a kernel reads keys by
    tiles that begin before the window, and multiplies what it hides by 0.
    """
    host_lengths: str = "none"
    """Of HOST_LENGTHS."""
    plan_staging: str = "shared"
    """Of PLAN_STAGING."""
    pad_seq_len: int = 0
    """``seq_lens`` of a padded row under a captured graph: 0 or 1."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Name -> what the backend takes in ``Choice.create(options=...)``."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the plugin reads, each named ``ATTNCORE_<NAME>_...`` -> what it does."""
    notes: Collection[str] = ()
    """Sentences that ``explain`` prints beside the backend; they are not reasons against it."""
    check: Check | None = None
    """``check(request, host)`` yields sentences or Reasons against the backend, for what no other field can say. In
    ``request.options`` are the options given that the spec accepts, and no defaults.
    """
    variants: tuple[Variant, ...] = ()
    """Generations of the library, the preferred one first; the first that fits a request is used."""

    def __new__(cls, *args: object, **kwargs: object) -> BackendSpec:
        api = kwargs.get("api", ATTNCORE_API)
        if type(api) is not int:  # True and 1.0 equal 1, and are no version of a contract
            raise TypeError(f"api: {quoted(api)} is not an integer; state the contract, api={ATTNCORE_API}")
        if api != ATTNCORE_API:
            raise ContractVersionError(api)
        if args or kwargs:  # a copy is made without arguments
            _check_names({declared.name: declared for declared in fields(cls)}, bool(args), kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        values, problems = check_fields({declared.name: getattr(self, declared.name) for declared in fields(self)})
        if problems:
            raise ValueError("; ".join(problems))
        self.__dict__.update(values)
        by_variant = []
        for variant in self.variants:
            given = {**variant.facts, "requires": (*self.requires, *variant.requires), "variants": ()}
            stated, wrong = check_fields(given, values)
            if wrong:
                problems.append(f"variants: {variant.name!r}: {'; '.join(wrong)}")
                continue
            variant.facts = {name: stated[name] for name in variant.facts}  # as checked
            by_variant.append((variant.name, self._of_checked(stated)))
        if problems:
            raise ValueError("; ".join(problems))
        self.__dict__["_by_variant"] = tuple(by_variant) or (("", self),)

    def _of_checked(self, values: dict[str, Any]) -> BackendSpec:
        """A spec without variants of fields that are checked: what a variant states no check has to read again."""
        made = object.__new__(type(self))
        made.__dict__.update(values, _by_variant=(("", made),))
        return made

    @guarded
    def __repr__(self) -> str:
        """What it supports, in a few lines; fields at their defaults are left out."""
        facts = [f"contract {self.api}"]
        facts += [f"{name} (priority {self.devices[name]})" for name in in_order(self.devices)[:4]]
        for name in ("dtypes", "kv_cache_dtypes", "features", "requires"):
            if words := getattr(self, name):
                facts.append(f"{name} {some(words if name == 'requires' else sorted(words), most=4)}")
        facts += [f"{name} {describe(getattr(self, name))}" for name in ("head_sizes", "block_sizes")]
        facts.append(f"kv_cache_layouts {some(self.kv_cache_layouts)}")
        facts += [f"cuda_graph {self.cuda_graph}", "use_mla" if self.use_mla else ""]
        facts.append(f"variants {some(variant.name for variant in self.variants)}" if self.variants else "")
        return angled(f"BackendSpec {short(self.name)}", facts)

    @property
    def by_variant(self) -> tuple[tuple[str, BackendSpec], ...]:
        """Each variant's name and the spec as it states it; for a spec without variants ``""`` and the spec itself."""
        by_variant: tuple[tuple[str, BackendSpec], ...] = self.__dict__["_by_variant"]
        return by_variant

    @property
    def all_requires(self) -> tuple[str, ...]:
        """Every requirement of any variant."""
        return tuple(dict.fromkeys(text for _, spec in self.by_variant for text in spec.requires))

    @property
    def all_devices(self) -> dict[str, int]:
        """The devices of all variants, each with the highest priority that one has there."""
        found: dict[str, int] = {}
        for _, spec in self.by_variant:
            for device, priority in spec.devices.items():
                found[device] = max(priority, found.get(device, priority))
        return found


def plain_spec(spec: BackendSpec) -> BackendSpec:
    """A BackendSpec of the fields of ``spec``, each read once; raises as BackendSpec does, and what reading raises.

    ``spec`` may be of a subclass, whose fields are not checked or run code when they are read, or may have been changed
    since it was made. The one returned is of no subclass, and no plugin holds it.
    """
    return BackendSpec(**{declared.name: getattr(spec, declared.name) for declared in fields(BackendSpec)})


def _check_names(known: Mapping[str, Field[Any]], has_positional_name: bool, given: Collection[str]) -> None:
    """TypeError for a required field that is missing, ``api`` first, and for one that a spec does not have."""
    if "api" not in given:
        raise TypeError(f"api: missing; state the contract, api={ATTNCORE_API}")
    for name in given:
        if name not in known:
            raise TypeError(f"{one_line(name, MOST)}: a spec has no such field{did_you_mean(name, known)}")
    for name, declared in known.items():
        required = declared.default is MISSING and declared.default_factory is MISSING
        if required and name not in given and not (has_positional_name and name == "name"):
            raise TypeError(f"{name}: missing; a spec must state it")
