"""Every tensor is made on a device that is said: torch's default device is the caller's, and may be a GPU."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKES = {
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
FILES = [
    file
    for place in ("attncore", "plugins/*/src", "examples")
    for folder in ROOT.glob(place)
    for file in folder.rglob("*.py")
    if "testing" not in file.parts  # the kit compares on the host, in a process of its own
]


def test_a_device_is_said():
    missing = [
        f"{file.relative_to(ROOT)}:{call.lineno}: torch.{call.func.attr}"
        for file in FILES
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in MAKES
        and not {"device", None} & {word.arg for word in call.keywords}  # None: **options
    ]
    assert len(FILES) > 100
    assert not missing


def test_an_engine_runs_whatever_the_default_device_is():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from engine import Engine
    from integrations.models import decoder

    model, prompts = decoder("llama"), [[5] * 9, [7, 8]]
    expected = Engine(model, num_blocks=16).complete(prompts, 4)
    torch.set_default_device("meta")
    try:
        assert Engine(model, num_blocks=16).complete(prompts, 4) == expected
    finally:
        torch.set_default_device(None)
