"""Chooses the backends of a replay and makes its attention layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.registry.choice.negotiate_installed import negotiate_installed
from attncore.registry.choice.select import select
from attncore.registry.host.host import Host
from attncore.registry.plugins.load import registry
from attncore.registry.spec.sizes import describe, smallest
from attncore.replay.backend_code import created
from attncore.replay.layers.attention_layers import AttentionLayers
from attncore.replay.layers.context_parallel_layers import ShardedLayers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncore.abstract import AttentionBackend
    from attncore.builder.persistent.kv_cache_group import KVCacheGroup
    from attncore.registry.spec.backend_spec import BackendSpec
    from attncore.registry.spec.sizes import Sizes
    from attncore.replay.settings import Settings
    from attncore.replay.token_content import Content

HEAD_SIZES = (32, 64, 128, 256)
"""Of heads where the command does not say: small ones first, which a CPU computes soon."""


HEAD_SIZES_OF_GPUS, DTYPE_OF_GPUS = (128, 64, 256), "bfloat16"
"""The same where the command names no backend either and the machine has a GPU, whose libraries have few."""


def make_layers(
    settings: Settings,
    content: Content,
    num_layers: int,
    backend: str | None,
    dtype: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[AttentionLayers, str]:
    """``num_layers`` layers, and why their backend was chosen; NoBackendError where none can be used.

    ``backend`` names one (None: the one that is chosen for the first KV-cache group, which all others then have too),
    ``options`` are its own. Layers are of ``dtype``; where that is None, float32 where the one named computes in that,
    else of one that it has.
    """
    given = {backend: options} if backend and options else {}
    made: dict[str, AttentionBackend] = {}
    why, dtype = "", dtype or dtype_of(backend)
    for group in settings.groups_of_rank:
        fields = _fields(settings, group, content.num_heads, content.num_kv_heads)
        choice = select(head_size=content.head_size, dtype=dtype, backend=backend, options=given, **fields)
        why = why or choice.explain().splitlines()[0].partition(": ")[2]
        made[group.name] = created(choice)
        backend = made[group.name].name
    of_layers = made if settings.groups else next(iter(made.values()))
    windows = {group.name: group.sliding_window for group in settings.groups_of_rank}
    if settings.world_size == 1:
        return AttentionLayers(of_layers, content, num_layers, settings.num_blocks, windows), why
    return ShardedLayers(
        of_layers, content, num_layers, settings.num_blocks, windows,
        world_size=settings.world_size, interleave=settings.interleave,
    ), why  # fmt: skip


def fitting_a_gpu(
    settings: Settings, num_heads: int, num_kv_heads: int, head_size: int | None
) -> tuple[int, str] | None:
    """A head size (the one asked for, where one is) and a dtype with which a backend of this machine's GPU is chosen.

    None where there is none: on a CPU, and where only backends for any device can be used.
    """
    if Host.probe().device == "cpu":
        return None
    fields = _fields(settings, settings.groups_of_rank[0], num_heads, num_kv_heads)
    for size in (head_size,) if head_size else HEAD_SIZES_OF_GPUS:
        chosen = negotiate_installed(head_size=size, dtype=DTYPE_OF_GPUS, **fields).chosen
        if chosen is not None and chosen.match is not None and chosen.match.pattern != "any":
            return size, DTYPE_OF_GPUS
    return None


def _fields(settings: Settings, group: KVCacheGroup, num_heads: int, num_kv_heads: int) -> Any:
    """The fields of a request for the layers of a group, but for head size, dtype and backend."""
    features = {"multi_token_decode"} if settings.speculation else set()
    if settings.world_size > 1:  # each token is a row of its own then, drafts too
        features = {"lse"}
    return {
        "num_heads": num_heads, "num_kv_heads": num_kv_heads, "block_size": group.block_size,
        "num_blocks": settings.num_blocks, "sliding_window": group.sliding_window, "features": features,
    }  # fmt: skip


def dtype_of(backend: str | None) -> str:
    """float32, or bfloat16 or float16 for a backend, named, that has only these: the libraries of GPUs."""
    had = {dtype for form in _variants(backend) for dtype in form.dtypes}
    return next((dtype for dtype in ("float32", "bfloat16", "float16") if dtype in had), "float32")


def head_size_of(backend: str | None, asked: int | None = None) -> int:
    """The head size asked for. Where none is: the one of HEAD_SIZES that most variants of a backend, named, have, 32
    before others, or else its smallest.

    ValueError where no variant has the size asked for. A name that no backend has is refused when one is chosen.
    """
    sizes: list[Sizes] = [form.head_sizes for form in _variants(backend)]  # type: ignore[misc]
    if not sizes:
        return asked or HEAD_SIZES[0]
    if asked and not any(asked in accepted for accepted in sizes):
        had = " or ".join(dict.fromkeys(describe(accepted) for accepted in sizes))
        raise ValueError(f"head_size: backend {backend!r} has no heads of {asked}, it has {had}; give one of these")
    best = max(HEAD_SIZES, key=lambda size: sum(size in accepted for accepted in sizes))  # the first of equals
    return asked or (best if any(best in accepted for accepted in sizes) else smallest(sizes[0]))


def _variants(backend: str | None) -> list[BackendSpec]:
    """What the variants of a backend, named, have."""
    specs = [record.spec for record in registry().records if record.name == backend and record.spec is not None]
    return [form for spec in specs for _, form in spec.by_variant]
