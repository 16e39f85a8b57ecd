"""A backend that the command line names: one line where none has that name or it is for no device of this machine.

It is said before anything is negotiated: reasons about sizes that are the command's defaults would be beside it.
"""

from __future__ import annotations

from attncore.did_you_mean import did_you_mean
from attncore.errors import NoBackendError
from attncore.quoted import quoted
from attncore.registry.choice.runs_here import no_device_here
from attncore.registry.host.host import Host
from attncore.registry.plugins.known_backends import KNOWN, install_line
from attncore.registry.plugins.load import registry


def check_installed(argument: str, name: str) -> None:
    """NoBackendError, which begins with ``argument``, where no distribution installed here provides ``name``, or where
    the backend is for other devices."""
    records = registry().records
    names = sorted({record.name for record in records})
    if name in names:
        for record in records:
            if record.name != name or record.spec is None:
                continue
            if (reason := no_device_here(record.spec, Host.probe(), record.label)) is not None:
                raise NoBackendError(f"{argument}: {quoted(name)} cannot be used here: {reason}")
        return
    raise not_installed(argument, name)


def not_installed(argument: str, name: str) -> NoBackendError:
    """The error, which begins with ``argument``: no distribution installed here provides ``name``; which ones do, and
    which name may be meant."""
    names = sorted({record.name for record in registry().records})
    fix = f"; {install_line(name, Host.probe())}" if name in KNOWN else did_you_mean(name, {*names, *KNOWN})
    installed = ", ".join(names) or "none"
    return NoBackendError(f"{argument}: no backend {quoted(name)} is installed; installed: {installed}{fix}")
