"""attncore's own exceptions. A bad argument is a ValueError or TypeError that begins with the argument's name.

Exceptions of one topic stand with it: ``ContractVersionError`` in ``attncore.registry.spec.backend_spec``,
``TraceError`` in ``attncore.replay.traces.trace``, ``ModelError`` in ``attncore.replay.model_error``, ``BackendError``
in ``attncore.replay.backend_code``, ``UsageError`` of the commands in ``attncore.command``, ``ConformanceError`` and
``UnsupportedError`` of the conformance kit in ``attncore.testing.harness.errors``.
"""

from __future__ import annotations


class AttncoreError(Exception):
    """Base of the exceptions that attncore raises for other reasons than a bad argument."""


class NoBackendError(AttncoreError):
    """No installed backend satisfies the request; the text lists the candidates with their reasons."""


class FallbackWarning(UserWarning):
    """The backend that was named cannot be used, and ``policy="fallback"`` took another one."""


class PluginError(AttncoreError):
    """A plugin failed; raised instead of recorded under ``ATTNCORE_STRICT_PLUGINS=1``. The cause is chained."""


class ConcurrentUseError(AttncoreError):
    """A builder or its batch was called while another thread was using it."""


class CaptureError(AttncoreError, RuntimeError):
    """A capture, a plan or a replay of a CUDA graph at the wrong moment, or of a size that was not captured."""
