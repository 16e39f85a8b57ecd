"""Every kernel compiled for every architecture, on a machine that has none of them, and what the compiler says of it.

``python -m attn_rocm.crosscompile`` prints the table of the README.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attn_rocm import tiles
from attn_rocm.kernels.merge import merge_splits
from attn_rocm.kernels.unified import STEP_NUMBERS, STEP_POINTERS, unified_attention
from attncore import cache_kernels

ARCHITECTURES = (*tiles.ARCHITECTURES, "sm_90")
HEADS, KV_HEADS, PAGE = 32, 8, 16
BITS = {"bf16": 16, "fp16": 16, "fp32": 32}


@dataclass(frozen=True)
class Attention:
    """One variant of the attention kernel: what is asked of it, at 32 query heads over 8, blocks of 16 tokens."""

    name: str
    decode: bool = False
    """One token a sequence, with the architecture's tile for that; else its tile for prompts."""
    dtype: str = "bf16"
    size: int = 128
    splits: int = 1
    raw: bool = False
    table: bool = True
    causal: bool = True
    fp8: str = ""
    features: frozenset[str] = field(default_factory=frozenset)
    """Of WINDOW, SOFT_CAP, ALIBI, SINKS, LSE."""


EVERYTHING = frozenset(("WINDOW", "SOFT_CAP", "ALIBI", "SINKS", "LSE"))
VARIANTS = (
    Attention("decode bf16", decode=True),
    Attention("decode fp16, split keys", decode=True, dtype="fp16", splits=8),
    Attention("decode bf16, e4m3 cache, every feature", decode=True, fp8="e4m3", features=EVERYTHING),
    Attention("decode fp16, head size 256, e5m2 cache", decode=True, dtype="fp16", size=256, fp8="e5m2"),
    Attention("any step bf16"),
    Attention("any step fp16, head size 80, every feature", dtype="fp16", size=80, features=EVERYTHING),
    Attention("prompts of the list door bf16", raw=True),
    Attention("encoder bf16", raw=True, table=False, causal=False),
    Attention("any step fp16, head size 256", dtype="fp16", size=256),
    Attention("decode fp32", decode=True, dtype="fp32"),
    Attention("any step fp32, head size 256", dtype="fp32", size=256),
)
"""The bounded list that is compiled for every architecture, with ``merge`` and the cache writers."""
OTHERS = ("merge of split keys", "cache write bf16", "cache write e4m3")


@dataclass(frozen=True)
class Compiled:
    """What came of one kernel for one architecture."""

    name: str
    arch: str
    matrix: tuple[str, ...]
    """Matrix instructions in the assembly, sorted."""
    lds_bytes: int
    scratch_bytes: int
    """Private memory of a thread; -1 where the compiler does not say (NVIDIA)."""
    spills: int
    """Vector and scalar registers spilled; -1 where the compiler does not say."""
    registers: int
    binary_bytes: int

    @property
    def is_decode(self) -> bool:
        return self.name.startswith("decode")


def names() -> tuple[str, ...]:
    """Every kernel that is compiled, by name."""
    return (*(variant.name for variant in VARIANTS), *OTHERS)


def compile_kernel(name: str, arch: str) -> Compiled:
    """Compile the kernel ``name`` for ``arch``, a name of ARCHITECTURES. Needs no GPU."""
    if name in OTHERS:
        source, options = _other(name)
    else:
        source, options = _attention(next(one for one in VARIANTS if one.name == name), arch)
    if arch.startswith("sm_"):
        target = GPUTarget("cuda", int(arch[3:]), 32)
    else:
        target = GPUTarget("hip", arch, tiles.ARCHITECTURES[arch].wavefront)
    built = triton.compile(source, target=target, options=options)
    return _read(name, arch, built)


def _attention(variant: Attention, arch: str) -> tuple[ASTSource, dict[str, int]]:
    group, size = HEADS // KV_HEADS, variant.size
    padded = max(16, tiles.power_of_two(size))
    tile = tiles.tile(arch, group=group, padded_size=padded, itemsize=BITS[variant.dtype] // 8, decode=variant.decode)
    element, cache = f"*{variant.dtype}", "*u8" if variant.fp8 else f"*{variant.dtype}"
    out = "*fp32" if variant.splits > 1 else element
    signature: dict[str, str | None] = {
        "query_ptr": element,
        "key_cache_ptr": cache if variant.table else None,
        "value_cache_ptr": cache if variant.table else None,
        "key_ptr": element if variant.raw else None,
        "value_ptr": element if variant.raw else None,
        "out_ptr": out,
        "lse_ptr": "*fp32" if variant.splits > 1 or "LSE" in variant.features else None,
        "table_ptr": "*i32" if variant.table else None,
        "lengths_ptr": "*i32",
        "starts_ptr": "*i32",
        "key_starts_ptr": "*i32" if variant.raw else None,
        "slopes_ptr": "*fp32" if "ALIBI" in variant.features else None,
        "sinks_ptr": "*fp32" if "SINKS" in variant.features else None,
        **dict.fromkeys(("scale", "raw_scale", "v_scale", "cap"), "fp32"),
    }
    constants: dict[str, Any] = {
        "HEADS": HEADS, "GROUP": group, "SIZE": size, "PAGE": PAGE, "ROWS": tile.rows, "D": padded, "N": tile.keys,
        "SPLITS": variant.splits, "DECODE": variant.decode, "CAUSAL": variant.causal, "TABLE": variant.table,
        "RAW": variant.raw, "FP8": variant.fp8, "INTERPRET": False,
        **{name: name in variant.features for name in EVERYTHING},
    }  # fmt: skip
    return _source(unified_attention, signature, constants), {"num_warps": tile.warps, "num_stages": tile.stages}


def _other(name: str) -> tuple[ASTSource, dict[str, int]]:
    if name == "merge of split keys":
        merge = {"part_ptr": "*fp32", "part_lse_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": None}
        sizes = {"HEADS": HEADS, "SIZE": 128, "D": 128, "SPLITS": 8, "LSE": False}
        return _source(merge_splits, merge, sizes), {"num_warps": 4}
    fp8 = name.endswith("e4m3")
    cache = "*fp8e4nv" if fp8 else "*bf16"
    store: dict[str, str | None] = {"key": "*bf16", "value": "*bf16", "key_cache": cache, "value_cache": cache}
    store |= {"slots": "*i64", "k_scale": "fp32", "v_scale": "fp32"}
    numbers: dict[str, Any] = {
        "block_size": PAGE, "largest": 448.0 if fp8 else 0.0, "heads": KV_HEADS, "size": 128, "size_v": 128,
        "heads_up": KV_HEADS, "size_up": 128, "size_v_up": 128,
    }  # fmt: skip
    return _source(cache_kernels._store_both, store, numbers), {"num_warps": 4}


def _source(kernel: Any, types: dict[str, str | None], constants: dict[str, Any]) -> ASTSource:
    """What a launch would compile: arguments that are absent are constants, those not named are aligned strides."""
    signature, fixed, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind = types.get(name, "i32")
        if name in constants or kind is None:
            signature[name] = "constexpr"
            fixed[(index,)] = constants.get(name)
            continue
        signature[name] = kind
        if name not in STEP_NUMBERS and name not in STEP_POINTERS and kind != "fp32":
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)


def _read(name: str, arch: str, built: Any) -> Compiled:
    assembly = built.asm.get("amdgcn") or built.asm["ptx"]
    words = set(re.findall(r"\b(?:v_mfma|v_wmma|v_smfmac|wgmma\.mma|mma\.sync)[\w.:]*", assembly))
    binary = built.asm.get("hsaco") or built.asm["cubin"]
    scratch = spills = registers = -1
    if "amdgcn" in built.asm:
        scratch = _number(assembly, r"\.private_segment_fixed_size:\s*(\d+)")
        spills = _number(assembly, r"\.vgpr_spill_count:\s*(\d+)") + _number(assembly, r"\.sgpr_spill_count:\s*(\d+)")
        registers = _number(assembly, r"\.vgpr_count:\s*(\d+)")
    return Compiled(name, arch, tuple(sorted(words)), built.metadata.shared, scratch, spills, registers, len(binary))


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the assembly has no {pattern}: another compiler than this reader knows")
    return int(found.group(1))


def table(compiled: Iterator[Compiled]) -> str:
    """Markdown: a row a kernel, a column an architecture."""
    cells: dict[str, dict[str, str]] = {}
    for one in compiled:
        kinds = sorted({word.split("_f32")[0].split(".sync")[0] for word in one.matrix})
        parts = [*kinds, f"{one.lds_bytes / 1024:g} KiB"]
        if one.scratch_bytes >= 0:
            parts.append(f"{one.registers} VGPRs" + (f", {one.scratch_bytes} B scratch" if one.scratch_bytes else ""))
        cells.setdefault(one.name, {})[one.arch] = ", ".join(parts)
    lines = ["| kernel | " + " | ".join(ARCHITECTURES) + " |", "|---" * (len(ARCHITECTURES) + 1) + "|"]
    for name, row in cells.items():
        lines.append(f"| {name} | " + " | ".join(row[arch] for arch in ARCHITECTURES) + " |")
    return "\n".join(lines)


def main() -> None:
    """Compile everything and print the table."""
    sys.stdout.write(table(compile_kernel(name, arch) for name in names() for arch in ARCHITECTURES) + "\n")


if __name__ == "__main__":
    main()
