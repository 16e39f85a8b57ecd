"""On a GPU: the backends that are there give the same output on the same saved steps, and read each other's cache.

Compared are ``reference``, both generations of ``flash``, ``flashinfer`` and ``rocm``'s Triton kernels, as far as they
can be used on the machine; the test says which (``-rP`` shows it) and why not the others. All of them take a cache as a
pair, keys and values, each (blocks, block size, key/value heads, head size): by that they share one.
"""

from __future__ import annotations

import itertools
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

import attncore
from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.cli import main
from attncore.errors import AttncoreError
from attncore.json_lines.list_builder import parse_batch
from attncore.testing.engines.tolerances import tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # of FlashAttention 4 while it compiles
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
]

BLOCK, HEADS, KV_HEADS, SIZE, DTYPE = 256, 32, 8, 128, "bfloat16"
LAYER = {"scale": SIZE**-0.5}
CANDIDATES: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"},
    "flash, generation 2": {"backend": "flash", "options": {"flash": {"generation": "2"}}},
    "flash, generation 4": {"backend": "flash", "options": {"flash": {"generation": "4"}}},
    "flashinfer": {"backend": "flashinfer"},
    "rocm": {"backend": "rocm", "options": {"rocm": {"kernel": "triton"}}},
}
LIBRARIES = {
    "flash, generation 2": "flash-attn",
    "flash, generation 4": "flash-attn-4",
    "flashinfer": "flashinfer-python",
    "rocm": "attn-rocm",
}


@pytest.fixture(scope="module")
def backends() -> dict[str, Any]:
    """Those that can be used here, each with its layer; at least two."""
    found: dict[str, Any] = {}
    missing = {}
    for name, fields in CANDIDATES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # whatever a library's import warns of
                backend = attncore.select(
                    num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=DTYPE, block_size=BLOCK,
                    kv_cache_layout="NHD", **fields,
                ).create(device="cuda:0")  # fmt: skip
            found[name] = backend, backend.impl("layers.0", **LAYER)  # before a step is built: some plan for layers
        except (AttncoreError, ValueError, ImportError) as error:
            missing[name] = str(error).splitlines()[0]
    print("compared:", "; ".join(found))
    for name, why in missing.items():
        print(f"not here: {name} ({why})")
    for name in missing:
        assert not installed(LIBRARIES[name]), f"{name}: {LIBRARIES[name]} is installed, but {missing[name]}"
    if len(found) < 2:
        pytest.skip(f"only {', '.join(found)} can be used here: nothing to compare with")
    return found


def installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def pair(num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of ``num_blocks``, as keys and values apart, zeroed."""
    shape = (num_blocks, BLOCK, KV_HEADS, SIZE)
    dtype = getattr(torch, DTYPE)
    return torch.zeros(shape, dtype=dtype, device="cuda"), torch.zeros(shape, dtype=dtype, device="cuda")


def tensors(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(count, heads, SIZE, device="cuda", generator=generator).to(getattr(torch, DTYPE))
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, over one plus the size."""
    one, other = found.float(), expected.float()
    return float(((one - other).abs() / (1 + other.abs())).max())


def attend(one: Any, groups: list[SequenceGroup], cache: Any, seed: int, *, chunked: bool = True) -> torch.Tensor:
    backend, impl = one
    metadata = CommonMetadataBuilder(BLOCK, "flashinfer", chunked_prefill=chunked, backend=backend).build(groups)
    return impl.forward(*tensors(metadata.num_tokens, seed), cache, metadata)


def test_the_same_saved_steps(backends: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A workload's steps, saved by `attncore replay`: prompts, chunks, decodes, mixed, run in turn by each backend."""
    saved = tmp_path / "steps.jsonl"
    words = ["replay", "--requests", "12", "--block-size", str(BLOCK), "--num-blocks", "128", "--metadata-only"]
    assert main([*words, "--max-num-batched-tokens", "1024", "--save-steps", str(saved)]) == 0
    capsys.readouterr()
    steps = [parse_batch(line) for line in saved.read_bytes().splitlines()]
    mixed = sum(len({group.is_prompt for group in step.groups}) == 2 for step in steps)
    assert mixed > 5
    steps = steps[:300]
    caches = {name: pair(128) for name in backends}
    differences = dict.fromkeys(backends, 0.0)
    first = next(iter(backends))
    for seed, step in enumerate(steps):
        outputs = {
            name: attend(backend, step.groups, caches[name], seed, chunked=step.chunked_prefill)
            for name, backend in backends.items()
        }
        for name, found in outputs.items():
            assert not found.isnan().any(), f"{name}, step {seed}"
            differences[name] = max(differences[name], worst(found, outputs[first]))
    for name, cache in caches.items():
        assert all(torch.equal(mine[1:-1], wanted[1:-1]) for mine, wanted in zip(cache, caches[first], strict=True)), (
            name
        )
    print(f"{len(steps)} steps, {mixed} mixed; against {first}: {differences}")
    assert max(differences.values()) <= tolerance(DTYPE, "auto")


def test_prefill_by_one_and_decode_by_another_on_one_cache(backends: dict[str, Any]) -> None:
    """Two prompts, one of them in two chunks, then three decodes, over the edge of a block; each pair of backends."""
    lengths, tables = (BLOCK - 1, 300), ([1, 4], [3, 2])

    def run(prefill: Any, decode: Any) -> list[torch.Tensor]:
        cache, found = pair(6), []
        chunks = [((0, 0), (100, 300)), ((100, 300), (BLOCK - 1, 300))]
        for seed, (before, after) in enumerate(chunks):
            groups = [
                SequenceGroup(True, [Sequence(i, after[i] - before[i], before[i], tables[i])])
                for i in range(2)
                if after[i] > before[i]
            ]
            found.append(attend(prefill, groups, cache, seed))
        for step in range(3):
            groups = [SequenceGroup(False, [Sequence(i, 1, lengths[i] + step, tables[i])]) for i in range(2)]
            found.append(attend(decode, groups, cache, 10 + step))
        return found

    first = next(iter(backends.values()))
    expected = run(first, first)
    for one, other in itertools.permutations(backends, 2):
        found = run(backends[one], backends[other])
        difference = max(worst(mine, wanted) for mine, wanted in zip(found, expected, strict=True))
        print(f"prefill by {one}, decode by {other}: {difference:.2g}")
        assert difference <= tolerance(DTYPE, "auto"), (one, other)
