"""Importing a backend's factory and calling it: the one place where a plugin's library is loaded."""

from __future__ import annotations

import importlib
import os
from typing import Any

from attncore.abstract import AttentionBackend, BackendConfig
from attncore.errors import PluginError
from attncore.process_end import end_if_forked
from attncore.quoted import describe_error
from attncore.registry.plugins.left_as_found import Wakeup
from attncore.registry.plugins.torch_settings import TorchSettings
from attncore.registry.spec.backend_spec import BackendSpec


def create_backend(spec: BackendSpec, config: BackendConfig, label: str) -> AttentionBackend:
    """The backend that the factory of ``spec`` makes for ``config``; ``label`` names it in errors.

    PluginError, with the cause chained, where the factory cannot be imported or asks the process to end; TypeError
    where it makes no AttentionBackend; whatever else the factory raises. Settings of torch, and the descriptor that
    signals are written to, are then as before. A child process that it has forked ends here, where it would go on as a
    second one of the caller.
    """
    settings, wakeup, process = TorchSettings(label), Wakeup(), os.getpid()
    try:
        return _created(spec, config, label)
    finally:
        end_if_forked(process)
        wakeup.restore()
        settings.restore()


def _created(spec: BackendSpec, config: BackendConfig, label: str) -> AttentionBackend:
    module, _, path = spec.factory.partition(":")
    try:
        factory: Any = importlib.import_module(module)
        for part in path.split("."):
            factory = getattr(factory, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(f"{label}: importing {spec.factory} failed: {describe_error(error)}") from error
    try:
        backend = factory(config)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit: a library does not end the process that asked for it
        raise PluginError(f"{label}: {spec.factory} failed: {describe_error(error)}") from error
    if not isinstance(backend, AttentionBackend):
        raise TypeError(f"factory: {spec.factory} made a {type(backend).__name__}, not an AttentionBackend")
    return backend
