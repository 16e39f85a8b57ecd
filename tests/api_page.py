"""The signatures of docs/api.md, from the code. ``python tests/api_page.py --write`` puts them there."""

import enum
import inspect
import pathlib
import re
import sys
import typing

import numpy as np

import attncore
from attncore import slots
from attncore.builder.fields import FIELDS
from attncore.builder.persistent.columns import KeepsColumns
from attncore.builder.persistent.run_ahead import RunsAhead

PARTS = (KeepsColumns, RunsAhead)
"""Classes that hold a part of another's methods; the page has them there."""

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "api.md"
BLOCK = re.compile(r"(<!-- api: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


FIELD_TABLE = re.compile(r"(<!-- fields -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(text):
    """The page's text with every block of signatures, and the table of fields, as the code has them."""
    text = FIELD_TABLE.sub(lambda match: f"{match[1]}{field_table()}\n{match[2]}", text)
    return BLOCK.sub(lambda match: f"{match[1]}```python\n{block(match[2].split())}\n```\n{match[3]}", text)


def field_table():
    """Every array of metadata: dtype and length, and what each builder makes of it."""
    rows = ["| field | dtype, length | persistent builder | list builder |", "|---|---|---|---|"]
    for name, field in FIELDS.items():
        if not field.internal:
            kind, (persistent, lists) = np.dtype(field.dtype).name, field.builders
            rows.append(f"| `{name}` | {kind}[{field.length.value}] | {persistent} | {lists or 'no'} |")
    return "\n".join(rows)


def names(text):
    """Every public name that the page has a block for."""
    return [name for match in BLOCK.finditer(text) for name in match[2].split()]


def block(wanted):
    return "\n".join("\n".join(lines(name)) for name in wanted)


def lines(name):
    if name == "slots":
        return [
            f"slots.{signature(name, value)}"
            for name, value in ((name, getattr(slots, name)) for name in slots.__all__)
            if inspect.isfunction(value)
        ]
    value = getattr(attncore, name)
    if not inspect.isclass(value):
        return [signature(name, value)] if callable(value) else [f"{name}: {type(value).__name__}"]
    if value.__name__ != name:
        return [f"{name} = {value.__name__}"]
    if issubclass(value, Exception):
        return [f"class {name}({value.__bases__[0].__name__})"]
    return [f"class {heading(name, value)}", *(f"    {line}" for line in members(value))]


def heading(name, value):
    if typing.is_typeddict(value):
        return f"{name}({', '.join(value.__annotations__)})"
    return name if getattr(value, "_is_protocol", False) or hasattr(value, "__members__") else signature(name, value)


def members(value):
    parts = [base for base in value.__bases__ if base in PARTS]
    for name, member in (item for part in (value, *parts) for item in vars(part).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, (classmethod, staticmethod)):
            yield signature(name, getattr(value, name))
        elif inspect.isfunction(member):
            yield signature(name, member)
        elif isinstance(member, property):
            result = inspect.signature(member.fget).return_annotation
            yield f"{name}: {plain(result)}" if result is not inspect.Signature.empty else name


def signature(name, value):
    parameters = []
    star = False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        if parameter.default is not parameter.empty:
            text += f"={default(parameter.default)}"
        parameters.append(text)
    result = inspect.signature(value).return_annotation
    arrow = "" if result in (inspect.Signature.empty, None, "None") else f" -> {plain(result)}"
    return f"{name}({', '.join(parameters)}){arrow}"


def plain(annotation):
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def default(value):
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    text = getattr(value, "__name__", None) or repr(value)
    return re.sub(r"mappingproxy\((.*)\)", r"\1", text)


if __name__ == "__main__":
    text = rendered(PAGE.read_text())
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(text)
    else:
        print(text)
