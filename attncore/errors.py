"""attncore's own exceptions. A mistake in an argument is a ValueError or TypeError that begins with its name instead."""

from __future__ import annotations


class AttncoreError(Exception):
    """Base of what attncore raises for reasons other than a caller's argument."""


class NoBackendError(AttncoreError):
    """No installed backend satisfies the request; the text lists every candidate with its reasons."""


class PluginError(AttncoreError):
    """A plugin failed; raised instead of recorded under ``ATTNCORE_STRICT_PLUGINS=1``. The cause is chained."""


class ConcurrentUseError(AttncoreError):
    """A builder or its batch was entered while another thread was inside it."""


class CaptureError(AttncoreError, RuntimeError):
    """A capture, a plan or a replay of a CUDA graph at the wrong moment, or of a size that was not captured."""
