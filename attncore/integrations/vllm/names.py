"""The names of attncore's backends in vLLM, registered once in each process, and pickled into spawned ones.

vLLM keeps the names of backends in an enum. A member that is added while the program runs is unknown to a process that
is spawned later, when the configuration that holds it is unpickled there before any plugin was loaded. Therefore these
members are pickled as a call of ``member``, which adds them.
"""

from __future__ import annotations

import copyreg
import re
from typing import Any

PREFIX = "ATTNCORE_"
CLASSES = "attncore.integrations.vllm.backend_classes"
"""The module of the classes that the names stand for."""
CUSTOM = "CUSTOM"
"""vLLM's own name for a foreign backend: attncore's own choice."""


def member_name(backend: str) -> str:
    """The name in vLLM of an attncore backend: ``ATTNCORE_FLASHINFER`` of ``flashinfer``."""
    return PREFIX + re.sub(r"[^0-9A-Za-z]", "_", backend).upper()


def backend_of(name: str) -> str | None:
    """The installed attncore backend with this name in vLLM; None where there is none, or more than one."""
    from attncore.registry.plugins.discover import find

    records = [record for record in find() if member_name(record.name) == name]
    # A name that is none, such as ACME, takes none from acme.
    found = sorted({one.name for one in records if one.state != "broken"} or {one.name for one in records})
    return found[0] if len(found) == 1 else None


def member(name: str) -> Any:
    """vLLM's member of this name, which is added where it is missing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if name not in AttentionBackendEnum.__members__:
        register_backend(name, f"{CLASSES}.{name}")
    return AttentionBackendEnum[name]


def pickle_by_name() -> None:
    """Has members of attncore pickled by their names, and all others as before."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    copyreg.pickle(AttentionBackendEnum, _reduced)


def _reduced(one: Any) -> tuple[Any, tuple[Any, ...]]:
    if str(one.value).startswith(f"{CLASSES}."):
        return member, (one.name,)
    return type(one), (one.value,)
