"""Draft trees by the real FlashInfer on a CUDA device: captured ones, which the kit has not, and long contexts."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from attn_flashinfer import modules
from captured_tree_engine import CapturedLongTreeEngine, CapturedTreeEngine
from tree_steps import DEEP, run
from unsynchronised import no_synchronisation

import attncore
from attncore import NoBackendError
from attncore.abstract import AttentionBackend
from attncore.builder import InputBatch, MetadataBuilder
from attncore.graphs import capturing, new_graph
from attncore.testing.engines.tree_engine import TreeEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer-python is not installed"),
]
LAYERS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 9},
    {"logits_soft_cap": 1.5},
    {"sliding_window": 33, "logits_soft_cap": 1.5},
]
TREES = {"deep": DEEP, "siblings": [-1] * 7, "wide": [*[-1] * 20, *range(20), *range(20)], "chain": [-1, 0, 1]}


def made(options: dict[str, Any] | None = None, **changes: Any) -> AttentionBackend:
    request = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", "block_size": 16} | changes
    asked = {"options": {"flashinfer": options}} if options else {}
    try:
        choice = attncore.select(**request, **asked, backend="flashinfer", features={"tree_mask"})
    except NoBackendError as error:
        if "have to be compiled" not in str(error):
            raise
        pytest.skip(f"a module is not built, and cannot be compiled here: {modules.no_compiler()}")
    return choice.create()


@pytest.mark.parametrize("features", LAYERS, ids=str)
@pytest.mark.parametrize("changes", [{}, {"kv_cache_layout": "HND", "num_heads": 8}, {"block_size": 1}], ids=str)
def test_eager_steps(changes: dict[str, Any], features: dict[str, Any]) -> None:
    run(TreeEngine(made(**changes), num_blocks=500, junk=math.nan, with_lse=True, **features))


@pytest.mark.parametrize("options", [{"decode": "xqa"}, {"decode": "cuda_cores"}, {"cascade": True}], ids=str)
def test_beside_other_kernels(options: dict[str, Any]) -> None:
    run(TreeEngine(made(options), num_blocks=100))


@pytest.mark.parametrize("features", [{}, {"sliding_window": 300}, {"sliding_window": 12}], ids=str)
def test_long_contexts(features: dict[str, Any]) -> None:
    """Keys in several parts, on some of which a tree's tokens see nothing."""
    engine = TreeEngine(made(), num_blocks=900, with_lse=True, **features)
    contexts = {"deep": 2500, "siblings": 17, "wide": 4000, "chain": 900, "one": 3000}
    for name, context in contexts.items():
        engine.add(name, context + 80)
    engine.fill(contexts)
    engine.tree_step({"one": 1}, TREES)
    paths = {"deep": [2, 5], "siblings": [6], "wide": [3, 23], "chain": [0]}
    engine.keep(paths, TREES)
    engine.step(dict.fromkeys(contexts, 1))


def test_an_fp8_cache() -> None:
    run(TreeEngine(made(kv_cache_dtype="fp8_e4m3"), num_blocks=100, k_scale=2.0, v_scale=4.0, scale=64**-0.5 / 2))


@pytest.mark.parametrize("features", LAYERS, ids=str)
@pytest.mark.parametrize("tokens", [2, 7, 24])
def test_every_replay_sees_the_trees_of_its_step(tokens: int, features: dict[str, Any]) -> None:
    engine = CapturedTreeEngine(made(block_size=4), tokens, others=(None, 5), num_blocks=300, **features)
    for _ in range(60):
        engine.change()
        engine.replayed()


@pytest.mark.parametrize("features", [{}, {"sliding_window": 300}], ids=str)
def test_captured_trees_over_changing_lengths(features: dict[str, Any]) -> None:
    CapturedLongTreeEngine(made(), 7, with_lse=True, **features).run()


def test_a_step_with_trees_does_not_wait_for_the_device() -> None:
    """Build, plan, send and run, with and without a graph, with torch's check on."""
    backend = made()
    impls = [backend.impl(f"layers.{i}", scale=0.125, sliding_window=window) for i, window in enumerate((None, 20))]
    cache = backend.allocate_kv_cache(64)
    batch = InputBatch(max_num_reqs=4, max_model_len=256, block_size=16, num_blocks=64)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64, decode_threshold=6, draft_trees=True)
    for name in range(3):
        batch.add_request(name, list(range(1 + 8 * name, 9 + 8 * name)), 20 * name + 5)
    tensors = [torch.randn(24, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2)]

    def layers(metadata: Any) -> None:
        for impl in impls:
            impl.forward(*(tensor[: metadata.num_tokens] for tensor in tensors), cache, metadata)

    captured = builder.capture(4, 6)
    layers(captured)
    torch.cuda.synchronize()
    graph = new_graph("cuda")
    with capturing(graph):
        captured.record()
        layers(captured)

    def step() -> None:
        trees = {0: [-1, -1, 0, 0, 1], 1: [-1] * 5, 2: [*range(-1, 4)]}
        builder.build(trees=trees, bucket=4).replay(graph)
        builder.keep_paths(dict.fromkeys(trees, ()))
        layers(builder.build(trees={0: [-1, -1], 1: [-1, 0, 0]}))
        builder.keep_paths({0: (), 1: ()})

    step()
    with no_synchronisation():
        step()
        step()
