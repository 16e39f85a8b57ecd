"""Every kernel compiled for every architecture, on a machine that has none of them, and what the compiler says of it.

``python -m attn_rocm.crosscompile`` prints the tables of the README.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attn_rocm import tiles
from attn_rocm.kernels.merge import merge_splits
from attn_rocm.kernels.unified import STEP_NUMBERS, STEP_POINTERS, unified_attention
from attncore.ops.cache_writer_triton import store_both

FIRST = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_90")
MORE = ("gfx908", "gfx1151", "gfx1200", "sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")
ARCHITECTURES = (*FIRST, *MORE)
"""What the README's tables have, a table each."""
KV_HEADS, PAGE = 8, 16
BITS = {"bf16": 16, "fp16": 16, "fp32": 32}


@dataclass(frozen=True)
class Attention:
    """One variant of the attention kernel: what is asked of it, at blocks of 16 tokens."""

    name: str
    decode: bool = False
    """Few tokens a sequence, with the architecture's tile for that; else its tile for prompts."""
    drafts: bool = False
    """Decodes of more than one token a sequence."""
    heads: tuple[int, int] = (32, 8)
    """Query heads, key heads."""
    dtype: str = "bf16"
    size: int = 128
    splits: int = 1
    raw: bool = False
    written: bool = False
    table: bool = True
    causal: bool = True
    fp8: str = ""
    features: frozenset[str] = field(default_factory=frozenset)
    """Of WINDOW, SOFT_CAP, ALIBI, SINKS, LSE, TREE, SPANS."""


EVERYTHING = frozenset(("WINDOW", "SOFT_CAP", "ALIBI", "SINKS", "LSE"))
VARIANTS = (
    Attention("decode bf16", decode=True),
    Attention("decode fp16, split keys", decode=True, dtype="fp16", splits=8),
    Attention("decode bf16, e4m3 cache, every feature", decode=True, fp8="e4m3", features=EVERYTHING),
    Attention("decode fp16, head size 256, e5m2 cache", decode=True, dtype="fp16", size=256, fp8="e5m2"),
    Attention("decode bf16, head size 256", decode=True, size=256),
    Attention(
        "decode bf16, head size 256, e4m3 cache, every feature, split keys",
        decode=True, size=256, fp8="e4m3", features=EVERYTHING, splits=8,
    ),
    Attention("decode bf16, drafts, every feature", decode=True, drafts=True, features=EVERYTHING),
    Attention(
        "decode fp16, draft trees, every feature",
        decode=True, drafts=True, dtype="fp16", features=EVERYTHING | {"TREE"},
    ),
    Attention("decode bf16, head size 256, 128 heads over 1", decode=True, size=256, heads=(128, 1)),
    Attention("decode fp32", decode=True, dtype="fp32"),
    Attention("decode fp32, every feature", decode=True, dtype="fp32", features=EVERYTHING),
    Attention("decode fp32, head size 256", decode=True, dtype="fp32", size=256),
    Attention("any step bf16"),
    Attention("any step fp16, head size 80, every feature", dtype="fp16", size=80, features=EVERYTHING),
    Attention("any step bf16, spans, window", features=frozenset(("WINDOW", "SPANS"))),
    Attention("prompts of the list builder bf16", raw=True),
    Attention("prompts of the list builder bf16, written before", raw=True, written=True),
    Attention("encoder bf16", raw=True, table=False, causal=False),
    Attention("any step fp16, head size 256", dtype="fp16", size=256),
    Attention("any step fp32, head size 256", dtype="fp32", size=256),
)  # fmt: skip
"""The bounded list that is compiled for every architecture, with ``merge`` and the cache writers."""
OTHERS = ("merge of split keys", "cache write fp16", "cache write bf16", "cache write e4m3")


@dataclass(frozen=True)
class Compiled:
    """What came of one kernel for one architecture."""

    name: str
    arch: str
    matrix: tuple[str, ...]
    """Matrix instructions in the assembly, sorted."""
    lds_bytes: int
    scratch_bytes: int
    """Private memory of a thread, to which registers are spilled."""
    spills: int
    """Vector registers spilled; -1 where the compiler does not say (NVIDIA)."""
    scalar_spills: int
    """Scalar registers spilled: kept in lanes of a vector register, not in memory, where there is no scratch."""
    registers: int
    """Of a thread."""
    binary_bytes: int

    @property
    def is_decode(self) -> bool:
        return self.name.startswith("decode")


def names(arch: str | None = None) -> tuple[str, ...]:
    """Every kernel that is compiled, by name; for ``arch`` those of the dtypes that the spec declares there."""
    every = (*(variant.name for variant in VARIANTS), *OTHERS)
    number = tiles.capability(arch or "") or 1000
    without = (("bf16",) if number < 80 else ()) + (("e4m3", "e5m2") if number < 89 else ())
    return tuple(name for name in every if not any(word in name for word in without))


def compile_kernel(name: str, arch: str, *, small_cache: bool = False) -> Compiled:
    """Compile the kernel ``name`` for ``arch``, a name of ARCHITECTURES. Needs no GPU.

    A launch tells AMD's compiler which tensors are smaller than 2 GiB, and it then reads those by offsets of 32 bits.
    Here these are all but the cache, and with ``small_cache`` the cache too.
    """
    if name in OTHERS:
        source, options = _other(name, arch)
    else:
        source, options = _attention(next(one for one in VARIANTS if one.name == name), arch)
    if not arch.startswith("sm_"):
        _mark_small(source, small_cache)
    if arch.startswith("sm_"):
        target = GPUTarget("cuda", int(arch[3:]), 32)
    else:
        target = GPUTarget("hip", arch, tiles.architecture(arch).wavefront)
    built = triton.compile(source, target=target, options=options)
    return _read(name, arch, built)


def _attention(variant: Attention, arch: str) -> tuple[ASTSource, dict[str, int]]:
    heads, size = variant.heads[0], variant.size
    group = heads // variant.heads[1]
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
        "k_scale_ptr": None,
        "v_scale_ptr": None,
        "tree_ptr": "*i64" if "TREE" in variant.features else None,
        "span_ptr": "*i32" if "SPANS" in variant.features else None,
        **dict.fromkeys(("scale", "raw_scale", "v_scale", "cap"), "fp32"),
    }
    constants: dict[str, Any] = {
        "HEADS": heads, "GROUP": group, "SIZE": size, "PAGE": PAGE, "ROWS": tile.rows, "D": padded, "N": tile.keys,
        "SPLITS": variant.splits, "DECODE": variant.decode and not variant.drafts, "CAUSAL": variant.causal,
        "TABLE": variant.table, "RAW": variant.raw, "WRITTEN": variant.written, "FP8": variant.fp8, "INTERPRET": False,
        "K_SCALES": 0, "V_SCALES": 0, "WIDE": False,
        "TAKEN": tile.heads(group), "SLICE": tile.slice,
        **{name: name in variant.features for name in (*EVERYTHING, "TREE", "SPANS")},
    }  # fmt: skip
    return _source(unified_attention, signature, constants), {"num_warps": tile.warps, "num_stages": tile.stages}


def _other(name: str, arch: str) -> tuple[ASTSource, dict[str, int]]:
    element = "*bf16" if "cache write bf16" in names(arch) and not name.endswith("fp16") else "*fp16"
    if name == "merge of split keys":
        merge = {"part_ptr": "*fp32", "part_lse_ptr": "*fp32", "out_ptr": element, "lse_ptr": None}
        sizes = {"HEADS": 32, "SIZE": 128, "D": 128, "SPLITS": 8, "LSE": False}
        return _source(merge_splits, merge, sizes), {"num_warps": 4}
    fp8 = name.endswith("e4m3")
    cache = "*fp8e4nv" if fp8 else element
    store: dict[str, str | None] = {"key": element, "value": element, "key_cache": cache, "value_cache": cache}
    store |= {"slots": "*i64", "k_scale": "fp32", "v_scale": "fp32"}
    numbers: dict[str, Any] = {
        "block_size": PAGE, "largest": 448.0 if fp8 else 0.0, "heads": KV_HEADS, "size": 128, "size_v": 128,
        "heads_up": KV_HEADS, "size_up": 128, "size_v_up": 128, "k_scales": 0, "v_scales": 0,
        "wide": False,
    }  # fmt: skip
    return _source(store_both, store, numbers), {"num_warps": 4}


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


def _mark_small(source: ASTSource, small_cache: bool) -> None:
    """What a launch adds for AMD: the range of offsets into tensors below 2 GiB."""
    for index, name in enumerate(source.fn.arg_names):
        if source.signature[name].startswith("*") and (small_cache or "cache" not in name):
            source.attrs.setdefault((index,), []).append(["tt.pointer_range", 32])


def _read(name: str, arch: str, built: Any) -> Compiled:
    assembly = built.asm.get("amdgcn") or built.asm["ptx"]
    words = set(re.findall(r"\b(?:v_mfma|v_wmma|v_smfmac|wgmma\.mma|mma\.sync|tcgen05\.mma)[\w.:]*", assembly))
    binary = built.asm.get("hsaco") or built.asm["cubin"]
    spills = scalar_spills = -1
    if "cubin" in built.asm:
        scratch, registers = _resources(binary)
    else:
        scratch = _number(assembly, r"\.private_segment_fixed_size:\s*(\d+)")
        spills = _number(assembly, r"\.vgpr_spill_count:\s*(\d+)")
        scalar_spills = _number(assembly, r"\.sgpr_spill_count:\s*(\d+)")
        registers = _number(assembly, r"\.vgpr_count:\s*(\d+)")
    return Compiled(
        name, arch, tuple(sorted(words)), built.metadata.shared, scratch, spills, scalar_spills, registers, len(binary)
    )  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int]:
    """Bytes of local memory and registers of a thread, as CUDA's cuobjdump, which Triton brings, says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return _number(text, r"STACK:(\d+)") + _number(text, r"LOCAL:(\d+)"), _number(text, r"REG:(\d+)")


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the assembly has no {pattern}: another compiler than this reader knows")
    return int(found.group(1))


def table(compiled: Iterator[Compiled], columns: Sequence[str]) -> str:
    """Markdown: a row a kernel, a column an architecture; ``-``: its dtypes are not declared there."""
    cells: dict[str, dict[str, str]] = {}
    for one in compiled:
        kinds = sorted({re.split(r"_f32|\.sync|\.cta", word)[0] for word in one.matrix})
        parts = [*kinds, f"{one.lds_bytes / 1024:g} KiB"]
        parts.append(f"{one.registers} registers" if one.arch.startswith("sm_") else f"{one.registers} VGPRs")
        if one.scratch_bytes:
            parts.append(f"{one.scratch_bytes} B scratch")
        cells.setdefault(one.name, {})[one.arch] = ", ".join(parts)
    lines = ["| kernel | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in cells.items():
        lines.append(f"| {name} | " + " | ".join(row.get(arch, "-") for arch in columns) + " |")
    return "\n".join(lines)


def main() -> None:
    """Compile everything and print the tables."""
    for columns in (FIRST, MORE):
        every = (compile_kernel(name, arch) for name in names() for arch in columns if name in names(arch))
        sys.stdout.write(table(every, columns) + "\n\n")


if __name__ == "__main__":
    main()
