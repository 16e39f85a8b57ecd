"""What ``attncore doctor`` is told."""

from __future__ import annotations

import os
from collections.abc import Mapping

from attn_rocm import settings, spec
from attn_rocm.tiles import SUPPORTED, known
from attncore import Host


def facts(host: Host) -> Mapping[str, str]:
    """Name -> fact. aiter is imported where an AMD GPU is, which is how it is found out whether it can be."""
    found = {}
    here = known(host.arch)
    if here is not None:
        found["architecture"] = (
            f"{host.arch}: wavefronts of {here.wavefront}, {here.lds_bytes // 1024} KiB of local memory, tiles "
            f"{here.decode} and {here.prefill}"
        )
    else:
        found["architecture"] = f"{host.arch}: not one of {SUPPORTED}"
    versions = {name: spec.version_on(host, name) for name in (*spec.TRITON, "amd-aiter", "flash-attn")}
    found |= {name: version for name, version in versions.items() if version}
    if host.platform == "rocm" and versions["amd-aiter"]:
        found["import aiter"] = spec.import_problem("aiter.ops.triton.unified_attention") or "works"
    for name in (settings.KERNEL, settings.DEV_DEVICE, spec.TRITON_BUILD):
        if name in os.environ:
            found[name] = os.environ[name]
    return found
