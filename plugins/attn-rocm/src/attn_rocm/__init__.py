"""The attention backend rocm: what it is. Light: no torch, no Triton, no kernel library here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attncore import BackendSpec, hookimpl

if TYPE_CHECKING:
    from attncore import Host


@hookimpl
def attncore_backend() -> BackendSpec:
    """The facts by which attncore chooses, and which its conformance kit probes."""
    from attn_rocm.spec import make_spec

    return make_spec()


@hookimpl
def attncore_doctor(host: Host) -> Mapping[str, str]:
    """What is there of the libraries, and what the plugin knows of the device."""
    from attn_rocm.doctor import facts

    return facts(host)
