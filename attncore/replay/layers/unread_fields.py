"""Numbers of a configuration that its model does not read, such as ``num_kv_heads`` of a Llama: they change nothing."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from attncore.quoted import one_line
from attncore.replay.layers.misspelt_field import fields_of
from attncore.show import counted

MOST = 6
"""Fields that a note names."""


def note_of_unread_fields(model: Any, fields: Mapping[str, Any]) -> str:
    """A sentence that names the whole numbers among ``fields`` which are none of the configuration's class and stand
    nowhere in its code and the model's; empty where there is none.

    Texts, switches and fractions that are not read say nothing of a size: published configurations have some, of
    loaders and of training. Fields that are read and declared nowhere are not rare (``head_dim`` of a Qwen3 MoE).
    """
    kind = type(model.config)
    known, _ = fields_of(kind)
    unknown = [name for name, value in fields.items() if type(value) is int and name not in known]
    words = _words_of_code(model) if unknown else frozenset()
    unread = [one_line(name, 60) for name in unknown if name not in words]
    if not unread:
        return ""
    more = f" and {counted(len(unread) - MOST, 'more field')}" if len(unread) > MOST else ""
    what, verb = ("field", "changes") if len(unread) == 1 else ("fields", "change")
    return f"{', '.join(unread[:MOST])}{more}: {kind.__name__} has no such {what}, which {verb} nothing"


def _words_of_code(model: Any) -> frozenset[str]:
    """The words in the modules of a configuration's classes, and in those of transformers' models among the model's."""
    modules = {one.__module__ for one in type(model.config).__mro__}
    modules |= {type(one).__module__ for one in model.modules()}
    words: set[str] = set()
    for name in modules:
        if name.startswith("transformers."):
            with suppress(OSError, TypeError):  # installed without its source
                words.update(re.findall(r"\w+", inspect.getsource(sys.modules[name])))
    return frozenset(words)
