"""A backend's configuration compared with its spec, once, when the backend is made.

Negotiation gives a configuration that fits. This refuses one that was made past it, so that no vendor has to.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from attncore.abstract.backend_config import BackendConfig
from attncore.quoted import quoted, type_name
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.abstract.spec_protocol import SpecFacts


def check_config(config: object) -> None:
    """TypeError unless it is a BackendConfig."""
    if not isinstance(config, BackendConfig):
        raise TypeError(f"config: {type_name(config)} found; give a BackendConfig, such as Choice.config() makes")


def checked(config: BackendConfig) -> BackendConfig:
    """``config``, with its spec narrowed to the variant that it names; ``config`` itself where it has no spec.

    Raises ValueError that begins with the name of the first field that the spec does not accept, and says what was
    found and what is accepted; TypeError that begins with ``config`` where it is none.
    """
    check_config(config)
    if config.spec is None:
        return config
    spec = _of_variant(config, config.spec)
    who = f"{spec.name}'s variant {config.variant}" if config.variant else spec.name
    for problem in _problems(config, spec, who):
        raise ValueError(problem)
    return config if spec is config.spec else replace(config, spec=spec)


def _of_variant(config: BackendConfig, spec: SpecFacts) -> SpecFacts:
    if not spec.variants:  # it has none, or is that of one variant already
        return spec
    by_variant = dict(spec.by_variant)
    if config.variant not in by_variant:
        raise ValueError(f"variant: {quoted(config.variant)} found; {spec.name} has {_listed_names(by_variant)}")
    return by_variant[config.variant]


def _problems(config: BackendConfig, spec: SpecFacts, who: str) -> Iterator[str]:
    """Sentences, one for each field that ``spec`` does not accept."""
    for name, found, accepted in (
        ("head_size", config.head_size, spec.head_sizes),
        ("block_size", config.block_size, spec.block_sizes),
        ("dtype", config.dtype, spec.dtypes),
        ("kv_cache_layout", config.kv_cache_layout, spec.kv_cache_layouts),
    ):
        if found not in accepted:
            yield f"{name}: {found} found; {who} accepts {_listed(accepted)}"
    yield from _value_size(config, spec, who)
    if config.kv_cache_dtype not in spec.kv_cache_dtypes and not (
        config.kv_cache_dtype == config.dtype and "auto" in spec.kv_cache_dtypes
    ):
        yield f"kv_cache_dtype: {config.kv_cache_dtype} found; {who} accepts {_listed(spec.kv_cache_dtypes)}"
    if config.use_mla and not spec.use_mla:
        yield f"use_mla: True found; {who} reads no latent cache, so give False"
    if spec.mla_only and not config.use_mla:
        yield f"use_mla: False found; {who} reads latent caches only, so give True"
    group = config.num_heads // config.num_kv_heads
    if spec.max_group_size is not None and group > spec.max_group_size:
        yield (
            f"num_heads: {config.num_heads} over num_kv_heads {config.num_kv_heads} found, "
            f"{counted(group, 'query head')} a "
            f"key-value head; {who} accepts {spec.max_group_size} at most"
        )
    longest = config.max_model_len
    if spec.max_model_len is not None and longest is not None and longest > spec.max_model_len:
        yield f"max_model_len: {longest} found; {who} accepts {spec.max_model_len} at most"
    yield from _options(config, spec)


def _value_size(config: BackendConfig, spec: SpecFacts, who: str) -> Iterator[str]:
    found, accepted = config.head_size_v or config.head_size, spec.head_size_v
    if found == config.head_size and not (config.use_mla and accepted is not None):
        return
    if accepted is None:
        yield f"head_size_v: {found} found; {who} accepts the same as head_size, {config.head_size}"
    elif found not in accepted:
        yield f"head_size_v: {found} found; {who} accepts {_listed(accepted)}"


def _options(config: BackendConfig, spec: SpecFacts) -> Iterator[str]:
    for name, value in config.options.items():
        option = spec.options.get(name)
        if option is None:
            yield f"options: {quoted(name)} is not declared by {spec.name}; declared: {_listed(spec.options) or 'none'}"
        elif value != option.default and (wrong := option.problem(value)):
            yield f"options: {quoted(name)}: {quoted(value)} {wrong}"


def _listed_names(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _listed(accepted: Container[object]) -> str:
    """A set of sizes or of words in a sentence; a MultipleOf says itself what it holds."""
    return ", ".join(map(str, sorted(accepted))) if isinstance(accepted, Iterable) else str(accepted)
