"""The attention backend ``flash``: FlashAttention 2, 3 and 4 behind attncore. Light: no torch, no library is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncore import hookimpl

if TYPE_CHECKING:
    from attncore import BackendSpec, Host


@hookimpl
def attncore_backend() -> BackendSpec:
    """The facts of all generations, less what the library installed here was found to lack (``probe_results``)."""
    from attn_flash.spec import make_spec

    return make_spec()


@hookimpl
def attncore_doctor(host: Host) -> dict[str, str]:
    """What is installed, and what came of calling it."""
    from attn_flash.doctor import facts

    return facts(host)
