"""Decodes over latent caches (MLA) where the partial outputs of split rows have more or less room. On a GPU.

    python plugins/attn-flash/benchmarks/latent_splits.py [--save FILE.json]

Rows of the report are settings of query heads and decodes (contexts of 1 to 4,800), columns the room in MiB: the
device's microseconds of a layer, of a graph of eight, and the MiB that a call takes beside what is there before it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import attn_flash.latent_layer
import forward
import torch

import attncore

ROOM = (0, 64, 128, 256, 1 << 30)
"""MiB; the last is more than the library counts."""
LAYERS = 8


def measured(heads: int, kind: str, room: int) -> tuple[float, int]:
    attn_flash.latent_layer.LATENT_WORKSPACE = room << 20
    fields = forward.latent(str(heads))._asdict()
    backend: Any = attncore.select(**fields, dtype="bfloat16", backend="flash", block_size=64).create()
    case = forward.Case(backend, kind)
    impls = [backend.impl(f"step.{index}", scale=forward.SCALE) for index in range(LAYERS)]

    def step() -> None:
        for impl in impls:
            impl.forward(*case.tensors, case.cache, case.metadata)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    graph, times = forward.captured(step, 1), []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / LAYERS)
    return round(statistics.median(times), 1), taken >> 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "us_and_mib": {}}
    with torch.inference_mode():
        for heads in (16, 128):
            for kind in ("decode 1", "decode 64", "decode 256"):
                row = {str(room): measured(heads, kind, room) for room in ROOM}
                found["us_and_mib"][f"heads {heads}, {kind}"] = row
                print(heads, kind, json.dumps(row), flush=True)
                torch.cuda.empty_cache()
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
