"""What a backend leaves as it was, its configuration and torch's settings, and of which kind its results are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attncore.array_arguments import why_not_plain
from attncore.quoted import quoted, type_name
from attncore.registry.plugins.torch_settings import TorchSettings
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend, BackendConfig

_ITS_OWN = ("device", "options", "spec")
"""Fields of a configuration that a backend may state otherwise: as torch writes the device, say."""


@contextlib.contextmanager
def same_torch_settings(who: str) -> Iterator[None]:
    """ConformanceError where ``who`` leaves a setting of torch changed, which is then set back."""
    settings = TorchSettings(who)
    yield
    if changed := settings.changed():
        settings.restore()
        said = "; ".join(f"{setting.name}: {now} found, {was} before" for setting, was, now in changed)
        raise ConformanceError(f"{who} left settings of torch changed, which are the engine's: {said}; put them back")


def check_config(backend: AttentionBackend, given: BackendConfig) -> None:
    """ConformanceError unless a backend keeps the configuration that it was created for: tests draw their tensors by
    it, and an engine by what it has asked for."""
    for name in (one.name for one in fields(given) if one.name not in _ITS_OWN):
        found, wanted = getattr(backend.config, name), getattr(given, name)
        if found != wanted:
            raise ConformanceError(
                f"the backend was created for {name} {quoted(wanted)}, and its config.{name} is {quoted(found)}: it "
                "keeps the configuration that it is given"
            )


def check_plain(found: Any, method: str, what: str) -> None:
    """ConformanceError unless a result is a plain strided tensor."""
    if not isinstance(found, Tensor):
        raise ConformanceError(f"{method} gave {what} of type {type_name(found)}; the contract says a tensor")
    if (why := why_not_plain(found)) is not None:
        raise ConformanceError(
            f"{method} gave {what} {why}; the contract says a plain strided tensor, in which any operator of torch "
            "finds the numbers"
        )
