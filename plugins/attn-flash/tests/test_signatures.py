"""The stand-ins' signatures against the libraries' own sources, where they can be found.

``ATTN_FLASH_SOURCES`` names folders (separated by ``:``) that hold ``flash_attn/flash_attn_interface.py`` or
``flash_attn/cute/interface.py``: generation 4's first, for generation 2's source holds an older one of that too.
Installed libraries are found by themselves. Nothing of them is imported.
"""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path
from typing import Any

import flash_standin as standin
import pytest
from attn_flash import probe_results

CASES = [
    ("flash_attn/flash_attn_interface.py", standin.Generation2.flash_attn_with_kvcache),
    ("flash_attn/flash_attn_interface.py", standin.Generation2.flash_attn_varlen_func),
    ("flash_attn/cute/interface.py", standin.Generation4.flash_attn_varlen_func),
]


def source(path: str) -> Path | None:
    """The file, of an installed library or of a folder that the variable names."""
    places = [Path(place) for place in os.environ.get("ATTN_FLASH_SOURCES", "").split(os.pathsep) if place]
    generation = "4" if "cute" in path else "2"
    own = probe_results.library_file(generation)
    if own is not None:
        places.append(own.parents[2] if generation == "4" else own.parent)
    return next((place / path for place in places if (place / path).exists()), None)


@pytest.mark.parametrize(("path", "function"), CASES, ids=lambda case: getattr(case, "__qualname__", None))
def test_the_stand_in_takes_what_the_library_takes(path: str, function: Any) -> None:
    file = source(path)
    if file is None:
        pytest.skip(f"no {path} here: neither is the library installed, nor does ATTN_FLASH_SOURCES name its source")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function.__name__)
    wanted = [one.arg for one in found.args.args]
    parameters = list(inspect.signature(function).parameters.values())[1:]
    assert [one.name for one in parameters] == wanted
    defaults = {
        one.arg: ast.literal_eval(value)
        for one, value in zip(reversed(found.args.args), reversed(found.args.defaults), strict=False)
    }
    assert {one.name: one.default for one in parameters if one.default is not one.empty} == defaults
