"""Errors of a replay through a whole model, and of memory that does not suffice."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from attncore.quoted import MOST, one_line
from attncore.replay.backend_code import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator


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
def errors_as_model_errors(path: str) -> Iterator[None]:
    """ModelError for whatever transformers raises: it does not check a configuration, and computes with it.

    A BackendError stays one: a model's layers attend by a backend.

    Imports torch.
    """
    import torch

    try:
        yield
    except (ModelError, BackendError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "allocate memory" in str(error):  # torch's on a CPU: memory_error_as_model_error says what to do
            raise
        if isinstance(error, ZeroDivisionError):
            raise ModelError(f"{path}: transformers divides by a number of it that is 0 ({error})") from error
        # Of a configuration's class: what is wrong stands behind the names of Python's parts of it.
        strict = any(kind.__name__ == "StrictDataclassError" for kind in type(error).__mro__)
        reason = error.__cause__ if strict else None
        name = "" if reason or isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ModelError(f"{path}: {name}{one_line(reason or error, MOST) or 'no reason given'}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, printable and cut to 200 characters; its type where it has no text."""
    return one_line((str(error).splitlines() or [type(error).__name__])[0], MOST)
