"""The hooks that a plugin may implement, to register its spec and to diagnose failures.

``hookimpl`` is what a plugin's author imports, as ``attncore.hookimpl``.
"""

from __future__ import annotations

from collections.abc import Mapping

import pluggy

from attncore.registry.host.host import Host
from attncore.registry.spec.backend_spec import BackendSpec

PROJECT = "attncore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """The hooks of contract 1. A hook grows by arguments; an implementation names those it wants."""

    @hookspec
    def attncore_backend(self) -> BackendSpec:  # type: ignore[empty-body]
        """The spec of the one backend that this entry point provides.

        Called when specs are first needed (``list``, ``explain``, ``select``), and again only where sys.path or a
        variable that filters plugins has changed. It must be cheap: no torch, no kernel library, no GPU. What it raises
        becomes a row of `attncore list`.
        """

    @hookspec
    def attncore_doctor(self, host: Host) -> Mapping[str, str]:  # type: ignore[empty-body]
        """Facts that help to explain a failure (versions, paths, compiled modules found), each a name and a text.

        Called by `attncore doctor` only, in a child process with a time limit; heavy imports are allowed. ``host`` is
        the machine as attncore probes it.
        """
