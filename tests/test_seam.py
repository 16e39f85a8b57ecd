"""The seam to plugins: they, and the template that new ones begin with, use public names of the core alone."""

import ast
import re
from pathlib import Path

import pytest
from public_modules import PUBLIC_MODULES

import attncore

ROOT = Path(__file__).parents[1]
TEMPLATE = sorted((ROOT / "attncore" / "template").rglob("*.py.txt"))
SOURCES = [*sorted(ROOT.glob("plugins/*/src/**/*.py")), *TEMPLATE]
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
OF_LIBRARIES = {"_plan_info", "_mask_indptr_buf", "_vllm_fa3_C"}
"""FlashInfer's description of a plan, which has no public name: where it is missing, plans stay the host's; and where
the masks of an eager step begin, which its plan computes wrongly: where it is missing, draft trees are refused. Of vLLM
the name under which its library of FlashAttention 3 registers its operators.
"""
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


def is_private(name):
    """One underscore ahead (``_plan``), but for the public names of named tuples and what a library alone has."""
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES | OF_LIBRARIES


def faults(source):
    """What is wrong with a module's source: (line, sentence)."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
            yield node.lineno, f"{ast.unparse(node)}: a private name of another object"
        elif isinstance(node, ast.Call):
            yield from by_name(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and of_vars(node.value):
            if is_private(str(node.slice.value)):
                yield node.lineno, f"{ast.unparse(node)}: a private name of another object"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(node)


def is_own(value):
    """``self``, ``cls``, ``super()``."""
    if isinstance(value, ast.Call):
        value = value.func
        return isinstance(value, ast.Name) and value.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def by_name(call):
    """``getattr(object, "_name")`` and the like, also by an f-string that begins so."""
    named = isinstance(call.func, ast.Name) and call.func.id in BY_NAME and len(call.args) > 1
    if not named or is_own(call.args[0]):
        return
    name = call.args[1]
    if isinstance(name, ast.JoinedStr) and name.values:
        name = name.values[0]
    if isinstance(name, ast.Constant):
        if is_private(str(name.value)):
            yield call.lineno, f"{ast.unparse(call)}: a private name of another object"
    elif call.func.id in ("setattr", "delattr"):
        yield (
            call.lineno,
            f"{ast.unparse(call)}: a name that is not plain; use metadata.kept",
        )


def of_vars(value):
    """``vars(other)`` and ``other.__dict__``."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "vars":
        return not (value.args and is_own(value.args[0]))
    return isinstance(value, ast.Attribute) and value.attr == "__dict__" and not is_own(value.value)


def imports(node):
    names = [alias.name for alias in node.names]
    modules = names if isinstance(node, ast.Import) else [node.module or ""]
    for module in modules:
        if module.split(".")[0] == "attncore" and module not in PUBLIC_MODULES:
            yield node.lineno, f"{module} is no public module of the core"
    if isinstance(node, ast.ImportFrom):
        for name in names:
            if is_private(name) and node.module != "__future__":
                yield node.lineno, f"{node.module}.{name} is private"
            elif node.module == "attncore" and name not in attncore.__all__:
                yield node.lineno, f"attncore.{name} is no public name of the core"


def code_of(path):
    """A module's source; a template's placeholders are filled in."""
    return re.sub(r"\{\{\w+\}\}", "Acme", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_plugin_uses_public_names_alone(path):
    assert not [f"{path}:{line}: {what}" for line, what in faults(code_of(path))]


def test_every_plugin_and_the_template_are_read():
    folders = {path.relative_to(ROOT).parts[1] for path in SOURCES}
    assert folders == {"attn-flash", "attn-flashinfer", "attn-rocm", "template"}
    assert len(TEMPLATE) == 5


@pytest.mark.parametrize(
    "planted",
    [
        "array = metadata._wrap(array)",
        "keys = self.backend._plan_keys",
        'setattr(metadata, "_flash2_plan", plan)',
        'setattr(metadata, f"_flash{generation}_plan", plan)',
        "setattr(metadata, self._plan_name, plan)",
        'plan = getattr(metadata, "_plan", None)',
        'plan = vars(metadata)["_plan"]',
        'metadata.__dict__["_plan"] = plan',
        "kernel = store._store_both",
        "from attncore.ops.cache_writer_triton import _store",
        "from attncore.builder.blocks.cascade import CascadePass",
        "from attncore.abstract import PlanKey",
        "import attncore.registry.plugins.load",
        "from attncore import abstract",
    ],
)
def test_a_planted_fault_is_found(planted):
    assert len(list(faults(planted))) == 1


@pytest.mark.parametrize(
    "sound",
    [
        "self._plans = {}",
        "cls._made = None",
        "super()._attend(query)",
        "tile._replace(rows=16)",
        "plan = metadata.kept.get(self._plans)",
        "from attncore import AttentionBackend, PlanKey",
        "from attncore.builder import CascadeRule",
        "from __future__ import annotations",
        'getattr(torch, "bfloat16")',
        "type(self).__name__",
    ],
)
def test_what_is_sound_is_no_fault(sound):
    assert not list(faults(sound))
