"""A field of a model's configuration that is misspelt: transformers takes any, and a model of default size is made."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from attncore.did_you_mean import meant_by
from attncore.quoted import one_line


def misspelt_field(kind: Any, given: Iterable[str]) -> str:
    """What is wrong with the first of the fields ``given`` that is none of the configuration class ``kind`` and is
    spelt like one that is not given; empty where none is.

    Other unknown fields are left alone: published configurations have many, such as those of older classes.
    """
    names = set(given)
    known, other_names = fields_of(kind)
    present = names | {other_names[name] for name in names & other_names.keys()}
    lacking = {name for name in known if other_names.get(name, name) not in present}
    for name in sorted(names - known):
        if close := meant_by(name, lacking):
            return f"{one_line(name, 60)}: {kind.__name__} has no such field; did you mean {close}?"
    return ""


def fields_of(kind: Any) -> tuple[set[str], dict[str, str]]:
    """The fields of a configuration class, and those of them that are other names: name -> field."""
    other_names: dict[str, str] = dict(kind.attribute_map)
    parameters = inspect.signature(kind).parameters.values()
    known = {one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    with suppress(Exception):  # a few classes have no default
        known.update(kind().to_dict())  # some are set beside the parameters
    return known | other_names.keys() | set(other_names.values()), other_names
