"""AttentionRequest: what a model and an engine ask of a backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from attncore.arguments import check_value_size, flag, float32_number, integer
from attncore.did_you_mean import did_you_mean
from attncore.env import NAME
from attncore.frozen_map import FrozenMap
from attncore.quoted import quoted
from attncore.show import cut, guarded
from attncore.vocabulary import (
    DTYPES,
    FEATURES,
    GRAPH_LEVELS,
    KV_CACHE_DTYPES,
    KV_CACHE_LAYOUTS,
    PHASES,
    POLICIES,
    dtype_name,
)

_COUNTS = ("num_heads", "num_kv_heads", "head_size")
_OPTIONAL_COUNTS = (
    "head_size_v",
    "block_size",
    "manager_block_size",
    "max_model_len",
    "sliding_window",
    "num_blocks",
)


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionRequest:
    """What is asked. Raises ValueError or TypeError that begins with the field's name.

    Numbers of heads are those of one rank. ``None`` leaves a field open, or states that the model lacks the feature.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    """Of DTYPES; a torch dtype is taken by its name."""
    head_size_v: int | None = None
    """Size of a value head where it differs."""
    kv_cache_dtype: str = "auto"
    """Of KV_CACHE_DTYPES; ``fp8`` is fp8_e4m3."""
    block_size: int | None = None
    """Tokens per block of the kernel, exactly; None: the backend chooses, and ``Choice.block_size`` gives it."""
    manager_block_size: int | None = None
    """Tokens per block of the engine's allocator; the kernel's block must divide it."""
    kv_cache_layout: str | None = None
    """Of KV_CACHE_LAYOUTS; None: the backend chooses, and ``Choice.kv_cache_layout`` gives it."""
    max_model_len: int | None = None
    """Tokens of the longest sequence."""
    num_blocks: int | None = None
    """Blocks in the cache, the null block included."""
    sliding_window: int | None = None
    """Tokens a query may see, itself included."""
    logits_soft_cap: float | None = None
    """Scores become ``cap * tanh(score / cap)``."""
    alibi: bool | Literal["standard"] = False
    """True: slopes of any value; ``standard``: the standard slopes of ``num_heads`` heads."""
    sinks: bool = False
    """Whether a learnt logit per head joins the softmax."""
    strided_kv_cache: bool = False
    """Whether the engine hands over the cache as a pair of views, keys and values, with strides of its own."""
    use_mla: bool = False
    """Whether the cache holds one latent row of ``head_size`` per token, the values being its first ``head_size_v``."""
    features: Iterable[str] = ()
    """Of FEATURES: what is needed beyond what the fields above imply."""
    cuda_graph: str = "never"
    """Of GRAPH_LEVELS: the steps that the engine captures."""
    phase: Literal["prefill", "decode"] | None = None
    """Of PHASES, where another backend runs the other phase; None: both."""
    allow_compile: bool = True
    """Whether a library may compile kernels at run time."""
    backend: str | None = None
    """Name of the backend to use."""
    prefer: Iterable[str] = ()
    """Names of backends to use where they can be, in this order."""
    exclude: Iterable[str] = ()
    """Names of backends not to use."""
    policy: Literal["strict", "fallback"] = "strict"
    """Of POLICIES: where the backend named by ``backend`` or ATTNCORE_BACKEND cannot be used, ``strict`` raises and
    ``fallback`` takes the next one.
    """
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of a backend -> its options; a backend whose spec does not declare them is not chosen."""

    def __post_init__(self) -> None:
        for name in (*_COUNTS, *_OPTIONAL_COUNTS):
            if (value := getattr(self, name)) is not None or name in _COUNTS:
                object.__setattr__(self, name, integer(name, value, 1))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        check_value_size(self.head_size, self.head_size_v, self.num_kv_heads, self.use_mla is True)
        for name in ("dtype", "kv_cache_dtype"):
            object.__setattr__(self, name, _plain(dtype_name(getattr(self, name))))
        if isinstance(self.kv_cache_dtype, str) and self.kv_cache_dtype == "fp8":
            object.__setattr__(self, "kv_cache_dtype", "fp8_e4m3")
        for name, words in _WORDS.items():
            value = _plain(getattr(self, name))
            object.__setattr__(self, name, value)
            if value is None and name in ("kv_cache_layout", "phase"):
                continue
            if not isinstance(value, str) or value not in words:
                raise ValueError(
                    f"{name}: {quoted(value)} is not one of {', '.join(words)}{did_you_mean(value, words)}"
                )
        for name in ("sinks", "strided_kv_cache", "use_mla", "allow_compile"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        alibi = _plain(self.alibi)
        object.__setattr__(self, "alibi", alibi)
        if alibi is not True and alibi is not False and (not isinstance(alibi, str) or alibi != "standard"):
            raise ValueError(f"alibi: {quoted(self.alibi)} is not True, False or 'standard'")
        if self.logits_soft_cap is not None:
            cap = float32_number("logits_soft_cap", self.logits_soft_cap, positive=True)
            object.__setattr__(self, "logits_soft_cap", cap)
        if self.block_size and self.manager_block_size and self.manager_block_size % self.block_size:
            raise ValueError(
                f"manager_block_size: {self.manager_block_size} is not a multiple of block_size {self.block_size}"
            )
        object.__setattr__(self, "features", frozenset(_names("features", self.features, FEATURES)))
        object.__setattr__(self, "prefer", _names("prefer", self.prefer))
        object.__setattr__(self, "exclude", frozenset(_names("exclude", self.exclude)))
        if self.backend is not None:
            object.__setattr__(self, "backend", _names("backend", (self.backend,))[0])
        object.__setattr__(self, "options", _check_options(self.options))

    @guarded
    def __repr__(self) -> str:
        """The fields that are not at their defaults."""
        stated = (f"{name}={cut(repr(value), 60)}" for name, value in self.as_json().items())
        return f"AttentionRequest({', '.join(stated)})"

    @property
    def asked_features(self) -> tuple[str, ...]:
        """Every feature that the request needs, sorted: those listed, and those that other fields imply."""
        implied = {
            "sliding_window": self.sliding_window is not None,
            "logits_soft_cap": self.logits_soft_cap is not None,
            "alibi": self.alibi is True,
            "alibi_standard": self.alibi == "standard",
            "sinks": self.sinks,
            "strided_kv_cache": self.strided_kv_cache,
        }
        return tuple(sorted({name for name, asked in implied.items() if asked}.union(self.features)))

    def as_json(self) -> dict[str, Any]:
        """The fields that are not at their defaults, as JSON types."""
        stated = {}
        for declared in fields(self):
            value = getattr(self, declared.name)
            if value == declared.default or (not value and not isinstance(value, bool)):
                continue
            if isinstance(value, frozenset | tuple):
                value = sorted(value) if isinstance(value, frozenset) else list(value)
            elif isinstance(value, Mapping):
                value = {name: dict(options) for name, options in value.items()}
            stated[declared.name] = value
        return stated


_WORDS = {
    "dtype": DTYPES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "kv_cache_layout": KV_CACHE_LAYOUTS,
    "cuda_graph": GRAPH_LEVELS,
    "phase": PHASES,
    "policy": POLICIES,
}


def _names(field: str, value: object, known: Iterable[str] | None = None) -> tuple[str, ...]:
    try:
        if isinstance(value, str):
            raise TypeError
        names = tuple(map(_plain, value))  # type: ignore[call-overload]
    except Exception as error:  # a collection of the caller's own raises what it likes
        raise TypeError(f"{field}: {quoted(value)} is not a collection of names") from error
    for name in names:
        if known is not None and (not isinstance(name, str) or name not in known):
            raise ValueError(f"{field}: {quoted(name)} is not one of {', '.join(known)}{did_you_mean(name, known)}")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"{field}: {quoted(name)} is not a backend's name")
    return names


def _plain(value: Any) -> Any:
    """A string of a subclass, whose own methods may say anything, as the plain one; other values as they are."""
    return str.__str__(value) if issubclass(type(value), str) else value


def _check_options(value: object) -> Mapping[str, Mapping[str, Any]]:
    try:
        if not isinstance(value, Mapping) or not all(isinstance(one, Mapping) for one in value.values()):
            raise TypeError
        pairs = [(name, FrozenMap(dict(one))) for name, one in value.items()]
    except Exception as error:  # a mapping of the caller's own raises what it likes
        raise TypeError(f"options: {quoted(value)} is not a mapping of backends to mappings of options") from error
    names = _names("options", [name for name, _ in pairs])
    return FrozenMap(dict(zip(names, (options for _, options in pairs), strict=True)))
