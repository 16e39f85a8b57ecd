"""What a call of the backend leaves as it was, torch's settings, and of which kind its results are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from attncore.array_arguments import why_not_plain
from attncore.quoted import type_name
from attncore.registry.plugins.torch_settings import TorchSettings
from attncore.testing.harness.errors import ConformanceError


@contextlib.contextmanager
def same_torch_settings(who: str) -> Iterator[None]:
    """ConformanceError where ``who`` leaves a setting of torch changed, which is then set back."""
    settings = TorchSettings(who)
    yield
    if changed := settings.changed():
        settings.restore()
        said = "; ".join(f"{setting.name}: {now} found, {was} before" for setting, was, now in changed)
        raise ConformanceError(f"{who} left settings of torch changed, which are the engine's: {said}; put them back")


def check_plain(found: Any, method: str, what: str) -> None:
    """ConformanceError unless a result is a plain strided tensor."""
    if not isinstance(found, Tensor):
        raise ConformanceError(f"{method} gave {what} of type {type_name(found)}; the contract says a tensor")
    if (why := why_not_plain(found)) is not None:
        raise ConformanceError(
            f"{method} gave {what} {why}; the contract says a plain strided tensor, in which any operator of torch "
            "finds the numbers"
        )
