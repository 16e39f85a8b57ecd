"""Errors of a replay through a whole model, and of memory that does not suffice."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attncore.quoted import MOST, one_line
from attncore.replay.backend_code import BackendError, backend_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


SMALLER_STEPS = "pass a smaller --max-num-batched-tokens or --num-blocks"
"""What helps where memory does not suffice for a step."""


class ModelError(ValueError):
    """The configuration file makes no model that can be replayed, or memory does not suffice for it or for a step."""


@contextmanager
def memory_error_as_model_error(what: str, advice: str) -> Iterator[None]:
    """ModelError, with ``advice``, where memory does not suffice for ``what``. Imports torch."""
    import torch

    try:
        yield
    except (RuntimeError, MemoryError) as error:  # on a CPU torch raises the plain first
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error):
            raise ModelError(f"{what} does not fit in memory ({first_line(error)}); {advice}") from error
        raise


@contextmanager
def errors_as_model_errors(path: str, fields: Mapping[str, Any] | None = None) -> Iterator[None]:
    """ModelError for whatever transformers raises: it does not check a configuration, and computes with it. A word that
    it looks up in vain is named by its field, of ``fields``.

    A BackendError stays one: a model's layers attend by a backend.

    Imports torch.
    """
    import torch

    try:
        yield
    except (ModelError, BackendError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if (named := backend_error(error)) is not None:
            raise named from error
        if "allocate memory" in str(error):  # torch's on a CPU: memory_error_as_model_error says what to do
            raise
        if isinstance(error, ZeroDivisionError):
            raise ModelError(f"{path}: transformers divides by a number of it that is 0 ({error})") from error
        word = error.args[0] if isinstance(error, KeyError) and error.args else None
        if isinstance(word, str) and (field := _field_of(word, fields or {})):
            raise ModelError(f"{path}: {field}: {one_line(word, MOST)!r} is no word that transformers knows") from error
        # Of a configuration's class: what is wrong stands behind the names of Python's parts of it.
        strict = any(kind.__name__ == "StrictDataclassError" for kind in type(error).__mro__)
        reason = error.__cause__ if strict else None
        name = "" if reason or isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ModelError(f"{path}: {name}{one_line(reason or error, MOST) or 'no reason given'}") from error


def _field_of(word: str, fields: Mapping[str, Any]) -> str:
    """The field that holds ``word``, such as ``rope_scaling.rope_type`` of one around it; empty where none does."""
    for name, value in fields.items():
        if value == word:
            return one_line(name, MOST)
        if isinstance(value, dict) and (inner := _field_of(word, value)):
            return f"{one_line(name, MOST)}.{inner}"
    return ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, printable and cut to 200 characters; its type where it has no text."""
    return one_line((str(error).splitlines() or [type(error).__name__])[0], MOST)
