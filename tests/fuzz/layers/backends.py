"""The backends under test: ``reference``, and the plugins over stand-ins of their libraries, or on a GPU over these."""

from __future__ import annotations

import importlib
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fuzz.layers.settings import Settings, Sizes, Tested, draw_settings

import attncore
from attncore import BackendConfig, Host
from attncore.builder import CascadeRule
from attncore.reference import ReferenceBackend, attncore_backend

GRAPH_LEVELS = "never", "uniform_decode", "uniform", "always"
PLUGINS = Path(__file__).parents[3] / "plugins"
SPEC = attncore_backend()
EXACT = ("auto", "auto", "fp8_e4m3", "fp8_e5m2")
FOR_REFERENCE = Sizes(
    value_sizes=(4, 12),
    cache_dtypes=(*EXACT, "bfloat16"),
    latent=0.2,
    dtypes=("float32", "float32", "float16", "bfloat16"),
)
LATENT: dict[str, Any] = {
    "head_sizes": (576,), "value_sizes": (512,), "layouts": ("NHD",), "tolerance": 3e-2, "latent": 1.0
}  # fmt: skip
HALVES = ("bfloat16", "float16")
FOR_BLOCKS_OF_16 = Sizes(head_sizes=(64,), block_sizes=(16,), tolerance=3e-2, dtypes=HALVES)


def _fields(settings: Settings) -> dict[str, Any]:
    return {
        "num_heads": settings.heads,
        "num_kv_heads": settings.kv_heads,
        "head_size": settings.head_size,
        "block_size": settings.block_size,
        "kv_cache_layout": settings.layout,
        "kv_cache_dtype": settings.cache_dtype,
        **({"use_mla": True, "head_size_v": settings.value_size} if settings.latent else {}),
        **({} if settings.dtype is None else {"dtype": settings.dtype}),
    }


def reference(*, by_hand: bool) -> Tested:
    """``by_hand``: without a spec, so that stand-ins of graphs may hold its steps."""

    def make(settings: Settings) -> Any:
        return ReferenceBackend(
            BackendConfig(
                spec=None if by_hand else SPEC,
                **{"dtype": "float32", "head_size_v": settings.value_size, **_fields(settings)},
            )
        )

    return Tested(make, frozenset(SPEC.features), "always" if by_hand else "never", FOR_REFERENCE)


def flash(generation: str, patch: pytest.MonkeyPatch, *, latent: bool = False) -> Tested:
    standin = _standins("attn-flash", "flash_standin")
    standin.install(patch, generation, standin.MADE[generation]())
    sizes = {
        "2": Sizes(
            (8, 40, 64), (), (256,), tolerance=3e-2, model_len=270, windows=(5, 260), longer=(520,), dtypes=HALVES
        ),
        "4": replace(FOR_BLOCKS_OF_16, head_sizes=(16, 48, 64), block_sizes=(16, 32)),
    }.get(generation, Sizes((16, 32), (), (1, 2, 3, 4, 8, 16), ("auto", "fp8_e4m3"), tolerance=3e-2, dtypes=HALVES))
    if latent:
        sizes = Sizes(block_sizes=(1, 2, 8, 16), **LATENT)

    def make(settings: Settings) -> Any:
        if settings.dtype == "float16":
            settings.cache_dtype = "auto"  # over fp8 its output is bfloat16
        return standin.create(generation, **_fields(settings))

    return _tested(make, sizes)


def flashinfer(*, latent: bool = False) -> Tested:
    standin = _standins("attn-flashinfer", "flashinfer_standin")
    sizes = Sizes(**LATENT) if latent else Sizes((64,), (), (1, 2, 3, 4, 8, 16), EXACT, tolerance=3e-2, dtypes=HALVES)
    make = standin.latent_backend if latent else standin.backend
    return _tested(lambda settings: make(**_fields(settings)), sizes, on_device=True)


def flashinfer_by(kernel: str, *, cascade: bool = False) -> Tested:
    """Decodes by another ``kernel`` than the usual one: ``xqa``, over fp8 caches ``xqa_built``, or ``cuda_cores``; and
    prefixes that two requests share read once.
    """
    standin = _standins("attn-flashinfer", "flashinfer_standin")
    xqa, groups = kernel.startswith("xqa"), tuple(one for one in Sizes.heads if one[0] // one[1] in (1, 2, 3, 4, 8))
    sizes = Sizes(
        (64,), (), (16,) if xqa else (1, 2, 4, 16), ("fp8_e4m3",) if kernel == "xqa_built" else ("auto",),
        tolerance=3e-2, dtypes=HALVES, heads=groups,
    )  # fmt: skip
    form: dict[str, Any] = {"options": {"decode": kernel, "cascade": cascade}}
    if kernel == "xqa_built":
        spec = dict(importlib.import_module("attn_flashinfer").attncore_backend().by_variant)[kernel]
        form = {"options": {"cascade": cascade}, "spec": spec, "variant": kernel}

    def make(settings: Settings) -> Any:
        backend = standin.backend(**form, **_fields(settings))
        if cascade:
            rule = CascadeRule(min_requests=2, min_prefix_tokens=1, min_saving=0.0)
            backend._tools = replace(backend._tools, rule=rule)
        return backend

    tested = _tested(make, sizes, on_device=True)
    return replace(tested, features=tested.features - ({"lse", "kv_scales_per_head"} if xqa else set()))


def rocm(variant: str, patch: pytest.MonkeyPatch) -> Tested:
    """A library that is a stand-in; that of the plugin's own kernels reads what they do not, masked keys' values."""
    standins = _standins("attn-rocm", "rocm_standins")
    standins.install(patch, variant)
    return _tested(lambda settings: standins.backend(variant, **_fields(settings)), FOR_BLOCKS_OF_16, finite=True)


def selected(sizes: Sizes, device: str, host: Host | None = None, **asked: Any) -> Tested:
    """The backend that ``asked`` selects on this machine."""

    def make(settings: Settings) -> Any:
        fields = {"dtype": "bfloat16", **asked, **_fields(settings)}
        return attncore.select(**fields, host=host).create(device=device)

    return _tested(make, sizes)


def hybrid(*kinds: Tested) -> Tested:
    """A model whose groups of layers run on several backends, in bfloat16."""
    kinds = tuple(replace(kind, sizes=replace(kind.sizes, dtypes=("bfloat16",))) for kind in kinds)
    level = next(one for one in GRAPH_LEVELS if any(kind.cuda_graph == one for kind in kinds))
    features = frozenset.intersection(*(kind.features for kind in kinds))
    return Tested(
        lambda settings: kinds[settings.kind].make(settings), features, level, kinds[0].sizes,
        any(kind.on_device for kind in kinds), any(kind.finite for kind in kinds), kinds,
    )  # fmt: skip


def _tested(make: Any, sizes: Sizes, *, finite: bool = False, on_device: bool = False) -> Tested:
    """What the spec of a backend says, for the first of each size."""
    first = draw_settings(random.Random(0), sizes)
    spec = make(first).spec
    finite = finite or spec.finite_tail or spec.finite_passed_blocks
    return Tested(make, frozenset(spec.features), spec.cuda_graph, sizes, on_device, finite)


def _standins(plugin: str, module: str) -> Any:
    """The module of a plugin's tests that stands in for its library."""
    if (folder := str(PLUGINS / plugin / "tests")) not in sys.path:
        sys.path.insert(0, folder)
    return __import__(module)
