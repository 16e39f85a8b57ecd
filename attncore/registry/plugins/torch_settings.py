"""torch's settings for the whole process, as a table: how one is asked for and set, and what torch begins with."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from threading import active_count
from types import ModuleType
from typing import Any, NamedTuple

from attncore.logged import logged
from attncore.registry.plugins.half_imported import is_half_imported

logger = logging.getLogger(__name__)
_UNKNOWN: Any = object()
"""In the place of what cannot be asked for, or is not the same in every process."""


class _Setting(NamedTuple):
    name: str
    ask: Callable[[Any], Any]
    put: Callable[[Any, Any], object]
    first: Callable[[Any], Any] = lambda torch: _UNKNOWN
    """What it is where torch has just been imported."""
    of_thread: bool = False
    """Whether each thread has its own."""

    def asked(self, torch: ModuleType) -> Any:
        """What it is now."""
        return _or_unknown(self.ask, torch)


def _or_unknown(ask: Callable[[Any], Any], torch: ModuleType) -> Any:
    try:
        return ask(torch)
    except Exception:  # of an older torch, or another module under its name
        return _UNKNOWN


def _imported_torch() -> ModuleType | None:
    """torch; None where it is not imported, or not yet to its end.

    Half of it, which another thread is importing, is not asked: its functions import what it lacks, in this thread, and
    the import of that thread fails then, or ends the process.
    """
    torch = sys.modules.get("torch")
    return None if is_half_imported(torch) else torch


def _put_device(torch: Any, found: Any) -> None:
    torch.set_default_device(None)
    if torch.get_default_device() != found:
        torch.set_default_device(found)


def _precision(torch: Any) -> str:
    return "high" if os.environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1" else "highest"


def _put_autocast(torch: Any, device: str, found: tuple[bool, Any]) -> None:
    torch.set_autocast_enabled(device, found[0])
    torch.set_autocast_dtype(device, found[1])


def _autocast(device: str) -> _Setting:
    return _Setting(
        f"autocast on {device}",
        lambda torch: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        lambda torch, found: _put_autocast(torch, device, found),
        lambda torch: (False, torch.bfloat16 if device == "cpu" else torch.float16),
        of_thread=True,
    )


def _attention(kind: str) -> _Setting:
    """Whether scaled_dot_product_attention may use one of its implementations."""
    return _Setting(
        f"scaled_dot_product_attention by {kind}",
        lambda torch: getattr(torch.backends.cuda, f"{kind}_sdp_enabled")(),
        lambda torch, found: getattr(torch.backends.cuda, f"enable_{kind}_sdp")(found),
        lambda torch: True,
    )


def _flag(place: str, name: str, first: bool) -> _Setting:
    return _Setting(
        f"backends.{place}.{name}",
        lambda torch: getattr(getattr(torch.backends, place), name),
        lambda torch, found: setattr(getattr(torch.backends, place), name, found),
        lambda torch: first,
    )


_SETTINGS = (
    _Setting(
        "default dtype",
        lambda torch: torch.get_default_dtype(),
        lambda torch, found: torch.set_default_dtype(found),
        lambda torch: torch.float32,
    ),
    _Setting(
        "default device",
        lambda torch: torch.get_default_device(),
        _put_device,
        lambda torch: torch.device("cpu"),
        of_thread=True,
    ),
    _Setting(
        "gradients",
        lambda torch: torch.is_grad_enabled(),
        lambda torch, found: torch.set_grad_enabled(found),
        lambda torch: True,
        of_thread=True,
    ),
    _Setting(
        "number of threads",
        lambda torch: torch.get_num_threads(),
        lambda torch, found: torch.set_num_threads(found),
    ),
    _Setting(
        "deterministic algorithms",
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, found: torch.use_deterministic_algorithms(found[0], warn_only=found[1]),
        lambda torch: (False, False),
    ),
    _Setting(
        "float32 matmul precision",
        lambda torch: torch.get_float32_matmul_precision(),
        lambda torch, found: torch.set_float32_matmul_precision(found),
        _precision,
    ),
    _Setting(
        "flushed denormal numbers",
        lambda torch: sys.float_info.min / 2 == 0,  # of the processor, which torch does not tell
        lambda torch, found: torch.set_flush_denormal(found),
        lambda torch: False,
        of_thread=True,
    ),
    _Setting(
        "anomaly detection",
        lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda torch, found: torch.set_anomaly_enabled(*found),
        lambda torch: (False, True),
    ),
    *map(_autocast, ("cpu", "cuda")),
    *map(_attention, ("math", "flash", "mem_efficient", "cudnn")),
    _flag("mkldnn", "enabled", True), _flag("cudnn", "enabled", True),
    _flag("cudnn", "deterministic", False), _flag("cudnn", "benchmark", False),
)  # fmt: skip


class TorchSettings:
    """``restore`` has torch's settings as they were found before code of ``plugin`` ran, and logs what was changed.

    Those of the whole process stay where other threads of Python ran before: one of them may have changed them, such as
    the default dtype while it makes a model. Where the plugin has imported torch, they become what torch begins with,
    but for the number of threads, which it takes from the machine. ``restore`` may be interrupted, and called again.
    """

    def __init__(self, plugin: str) -> None:
        self._plugin, self._torch, self._alone = plugin, _imported_torch(), active_count() == 1
        torch = self._torch
        self._found = [] if torch is None else [setting.asked(torch) for setting in _SETTINGS]

    def changed(self) -> list[tuple[_Setting, Any, Any]]:
        """Those that are others now: each, what it was and what it is."""
        torch = _imported_torch() if self._torch is None else self._torch
        if torch is None:
            return []
        found = self._found or [_or_unknown(setting.first, torch) for setting in _SETTINGS]
        asked = [(setting, was, setting.asked(torch)) for setting, was in zip(_SETTINGS, found, strict=True)]
        return [one for one in asked if _UNKNOWN not in one[1:] and one[1] != one[2]]

    def restore(self) -> None:
        """As they were found; one that cannot be set again stays."""
        torch = _imported_torch() if self._torch is None else self._torch
        changed: dict[str, list[str]] = {}
        for setting, value, _ in self.changed():
            if setting.of_thread or self._alone:
                with contextlib.suppress(Exception):
                    setting.put(torch, value)
                changed.setdefault("are put back", []).append(setting.name)
            else:
                changed.setdefault("stay, since other threads may have changed them", []).append(setting.name)
        for what, names in changed.items():
            words = "%s leaves settings of torch changed, which %s: %s"
            logged(logger, logging.WARNING, words, self._plugin, what, ", ".join(names))
