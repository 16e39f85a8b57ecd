"""What `attncore doctor` and ``python -m attn_flash`` say: what is installed, and what came of calling it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from attn_flash import probe_results
from attncore import Host


def facts(host: Host) -> dict[str, str]:
    """Name -> text. Calls what is installed, where the host has a device for it and no findings are kept."""
    return {name: text for generation in probe_results.DISTRIBUTIONS for name, text in _of(generation, host)}


def _of(generation: str, host: Host) -> Iterator[tuple[str, str]]:
    label = f"variant fa{generation}"
    library, file = probe_results.library(generation), probe_results.library_file(generation)
    if library is None:
        yield label, f"{probe_results.DISTRIBUTIONS[generation]} is not installed"
        return
    yield label, f"{library}, {file or 'without its files'}"
    if why := probe_results.ignored(generation):
        yield f"{label} kept", f"ignored: {', '.join(why)}"
    if host.platform != "cuda" or file is None:
        return
    found = probe_results.read(generation, host.device_name)
    if found is None:
        import torch

        probe = importlib.import_module("attn_flash.probe")
        found = probe.found(generation, torch.device("cuda", torch.cuda.current_device()))
    yield f"{label} called", said(found)


def said(found: probe_results.ProbeResult) -> str:
    """One line: what calls have shown."""
    if found.fails:
        return f"fails on {found.device}: {found.fails}"
    lacks = [
        *found.missing(""),
        *(f"{kind} {name}" for kind in ("dtype", "kv_cache_dtype", "kv_cache") for name in found.missing(kind)),
    ]
    sizes = sorted(found.head_sizes)
    if sizes:
        has = [str(size) for size in probe_results.HEAD_SIZES if size not in found.head_sizes]
        lacks.append(f"all head sizes but {', '.join(has)}")
    text = f"runs on {found.device}; left out of this build: {', '.join(lacks) or 'nothing'}"
    return text + ("; its decode function waits for the device, so the other one is used" if found.synchronises else "")
