"""Plugins for tests, planted as installed distributions: a folder on sys.path with their modules and their metadata."""

import importlib
import sys
from pathlib import Path

import pytest

from attncore.registry.plugins import discover, load

OURS = {"attn-flash", "attn-flashinfer", "attn-rocm"}
SPEC = """
from attncore import BackendSpec, MultipleOf, hookimpl

@hookimpl
def attncore_backend():
    return BackendSpec(
        name={name!r}, api=1, factory="{module}_heavy:Backend", devices={{"any": 5}}, dtypes={{"float32", "bfloat16"}},
        head_sizes={{64, 128}}, block_sizes=MultipleOf(16),{extra}
    )
"""
HEAVY = """
from attncore import AttentionBackend, AttentionImpl

class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None):
        return query

class Backend(AttentionBackend):
    impl_class = Impl
    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (num_blocks, 2, block_size, num_kv_heads, head_size)
"""


class Site:
    """A folder of installed distributions."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.modules: set[str] = set()
        self.distributions: set[str] = set()

    def module(self, name: str, source: str) -> None:
        """Write a module that can be imported."""
        (self.folder / f"{name}.py").write_text(source)
        self.modules.add(name)
        importlib.invalidate_caches()

    def plugin(self, name, source=None, *, distribution=None, version="1.0", module=None, extra="", heavy=HEAVY):
        """Plant a plugin named ``name``: a good one, or one whose light module is ``source``."""
        distribution = distribution or f"attn-{name}"
        module = module or distribution.replace("-", "_")
        self.distributions.add(distribution)
        self.module(module, SPEC.format(name=name, module=module, extra=extra) if source is None else source)
        self.module(f"{module}_heavy", heavy)
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[attncore.backends]\n{name} = {module}\n")
        load.forget()
        return info


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A Site on sys.path for one test; the variables that say what may load are unset.

    The plugins of this repository, which the development environment has, are not seen.
    """
    for variable in ("ATTNCORE_BACKEND", "ATTNCORE_PLUGINS", "ATTNCORE_DISABLE_PLUGINS", "ATTNCORE_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    planted, entry_points = Site(tmp_path), discover._entry_points

    def others():
        hidden = OURS - planted.distributions
        return (record for record in entry_points() if record.distribution not in hidden)

    monkeypatch.setattr(discover, "_entry_points", others)
    load.forget()
    yield planted
    for name in planted.modules:
        sys.modules.pop(name, None)
    load.forget()


BAD = {  # name -> (its light module, state, what its reason must hold)
    "raises": ("raise RuntimeError('no licence file')", "broken", "RuntimeError: no licence file"),
    "exits": ("raise SystemExit(7)", "broken", "SystemExit: 7"),
    "absent": ("import a_library_that_is_not_there", "broken", "a_library_that_is_not_there"),
    "hookless": ("x = 1", "broken", "implements no attncore_backend"),
    "undecorated": ("def attncore_backend(): return None", "broken", "decorate it with @attncore.hookimpl"),
    "misspelt": (
        "import attncore\n@attncore.hookimpl\ndef attncore_bakend(): return None",
        "broken",
        "did you mean attncore_backend?",
    ),
    "argument": (
        "import attncore\n@attncore.hookimpl\ndef attncore_backend(gpu): return None",
        "broken",
        "PluginValidationError",
    ),
    "nothing": (
        "import attncore\n@attncore.hookimpl\ndef attncore_backend(): return None",
        "broken",
        "must return a BackendSpec",
    ),
    "dictionary": (
        "import attncore\n@attncore.hookimpl\ndef attncore_backend(): return {'name': 'dictionary'}",
        "broken",
        "returned a dict",
    ),
    "misnamed": (SPEC.format(name="other", module="m", extra=""), "broken", "the entry point 'misnamed'"),
    "later": (
        SPEC.format(name="later", module="m", extra="hologram=True").replace("api=1", "api=2"),
        "incompatible",
        "built for contract 2; this attncore speaks 1",
    ),
    "earlier": (
        SPEC.format(name="earlier", module="m", extra="").replace("api=1", "api=0"),
        "incompatible",
        "built for contract 0",
    ),
    "nonsense": (
        SPEC.format(name="nonsense", module="m", extra="").replace("{64, 128}", "{-64}").replace('"any"', '"tpu:v5"'),
        "broken",
        "head_sizes: -64 is not a positive integer",
    ),
    "unprintable": (
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
        "broken",
        "without a message",
    ),
}


def zoo(site: Site) -> dict[str, tuple[str, str]]:
    """Plant one of every bad plugin that does not hang or crash; name -> (state, what its reason must hold)."""
    for name, (source, _, _) in BAD.items():
        site.plugin(name, source, distribution=f"zoo-{name}")
    site.plugin("good", distribution="zoo-good")
    site.plugin("taken", distribution="zoo-taken-a")
    site.plugin("taken", distribution="zoo-taken-b")
    site.plugin("reference", distribution="zoo-thief")
    expected = {name: (state, text) for name, (_, state, text) in BAD.items()}
    return {**expected, "taken": ("duplicate", "claims the name 'taken'")}
