"""A backend that the command line names: one line where none has that name, before anything is negotiated."""

from __future__ import annotations

from attncore.did_you_mean import did_you_mean
from attncore.errors import NoBackendError
from attncore.quoted import quoted
from attncore.registry.host.host import Host
from attncore.registry.plugins.known_backends import KNOWN, install_line
from attncore.registry.plugins.load import registry


def check_installed(argument: str, name: str) -> None:
    """NoBackendError, which begins with ``argument``, where no distribution installed here provides ``name``."""
    names = sorted({record.name for record in registry().records})
    if name in names:
        return
    fix = f"; {install_line(name, Host.probe())}" if name in KNOWN else did_you_mean(name, {*names, *KNOWN})
    installed = ", ".join(names) or "none"
    raise NoBackendError(f"{argument}: no backend {quoted(name)} is installed; installed: {installed}{fix}")
