"""Checks that what is given as a model is one: a configuration or a class is a plausible mistake."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from attncore.quoted import quoted


def check_model(model: Any, *, configured: bool = False) -> None:
    """TypeError where ``model`` is no module of torch, or, with ``configured``, has no ``config``."""
    if not isinstance(model, Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"model: {found} found; give a model of transformers, made of its configuration or loaded")
    if configured and not hasattr(model, "config"):
        raise TypeError(f"model: {quoted(type(model).__name__)} has no config; give a model of transformers")
