"""What ``attncore --print-completion SHELL`` prints: a script for the shell, which ``shtab`` makes from the parsers.

The backends that it offers are those that are installed when it is printed: their names are read from metadata, and no
plugin is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from attncore.cli.argument_types import backend_name, backend_names
from attncore.cli.shells import SHELLS
from attncore.command import UsageError
from attncore.how_to_install import install_extra
from attncore.quoted import quoted
from attncore.registry.plugins.discover import find

FILES = ("CONFIG.json", "FILE", "TRACE")
"""The metavars of arguments that are completed by files' names; that of a folder is DIR."""

OLDEST = "1.10"
"""Of ``shtab``, as the extra ``completion`` says: some earlier ones do not know fish, or fail to write zsh's script."""

Configure = Callable[[argparse.ArgumentParser], None]


def completion_script(shell: str, commands: Mapping[str, tuple[str, Configure]]) -> str:
    """The script for ``shell``; ``commands`` are name -> (help, what adds its options to a parser)."""
    try:
        import shtab
    except ImportError:
        text = f"--print-completion: shtab is not installed: {install_extra('completion')}"
        raise UsageError(text) from None
    if _is_too_old(shtab):
        raise UsageError(f"--print-completion: shtab {shtab.__version__} is too old: {install_extra('completion')}")
    supported = [name for name in SHELLS if name in shtab.SUPPORTED_SHELLS]
    if not shell:
        raise UsageError(f"--print-completion: none given; give one of {', '.join(supported)}")
    if shell not in supported:
        raise UsageError(f"--print-completion: {quoted(shell)} is not one of {', '.join(supported)}")
    root = argparse.ArgumentParser(prog="attncore")
    root.add_argument("--version", action="store_true")
    root.add_argument("--print-completion", choices=supported)
    added = root.add_subparsers()
    backends = sorted({record.name for record in find() if record.state == "found"})
    for name, (text, configure) in commands.items():
        parser = added.add_parser(name, help=text)
        configure(parser)
        for action in parser._actions:
            if action.type in (backend_name, backend_names):
                action.choices = backends
            elif action.metavar in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar == "DIR":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return str(shtab.complete(root, shell))


def _is_too_old(shtab: Any) -> bool:
    """Whether an environment has a ``shtab`` from before the extra's bound; one that does not say is tried."""
    try:
        return Version(shtab.__version__) < Version(OLDEST)
    except (AttributeError, TypeError, InvalidVersion):
        return False
