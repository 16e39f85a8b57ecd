"""Latent caches on the CPU, the stand-in in FlashInfer's place: steps, captured sizes, what plans are given."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import flashinfer_standin as standin
import pytest
import torch
from attn_flashinfer import latent_run, modules
from attn_flashinfer.latent_wrappers import CapturedLatent
from attn_flashinfer.pages import Pages
from attn_flashinfer.wrappers import LayerSettings

from attncore.builder import InputBatch, MetadataBuilder
from attncore.testing.engines import captured_engine
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.captured_long_engine import CapturedLongEngine
from attncore.testing.engines.captured_reading_engine import WRITERS, CapturedReadingEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.reading_engine import ReadingEngine
from attncore.testing.engines.run_batches import run_batch
from attncore.testing.harness.errors import ConformanceError

MIXED = [(0, 9), (3, 3), (8, 1), (7, 1), (13, 1), (0, 1)]


@pytest.fixture
def sent_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_engine, "MetadataBuilder", partial(MetadataBuilder, transport="copy"))


@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_mixed_batches(block_size: int) -> None:
    recorder = standin.Recorder()
    engine = Engine(standin.latent_backend(recorder, block_size=block_size), num_blocks=80, junk=math.nan)
    run_batch(engine, MIXED)
    plan = recorder.of("latent.plan")[-1]
    assert (plan["head_dim_ckv"], plan["head_dim_kpe"], plan["page_size"]) == (512, 64, block_size)
    assert recorder.of("latent.replan")[-1]["causal"]
    engine.add("later", 5)
    engine.step({"later": 1})
    assert not recorder.of("latent.replan")[-1]["causal"], "a query of one token sees all keys"


def test_one_plan_serves_a_step_of_decodes_and_prefills() -> None:
    recorder = standin.Recorder()
    engine = Engine(standin.latent_backend(recorder))
    engine.add("a", 20)
    engine.fill({"a": 9})
    engine.add("b", 20)
    before = len(recorder.of("latent.replan"))
    engine.step({"a": 1, "b": 7})
    (plan,) = recorder.of("latent.replan")[before:]
    assert plan["starts"].tolist() == [0, 1, 8]
    assert plan["lens"].tolist() == [10, 7]


def test_chunks_behind_long_contexts_and_several_tokens() -> None:
    engine = Engine(standin.latent_backend(block_size=16, num_heads=2), num_blocks=300, junk=math.nan, with_lse=True)
    for name, context in {"long": 2049, "short": 3}.items():
        engine.add(name, context + 40)
        engine.fill({name: context})
    engine.step({"long": 1, "short": 1})
    engine.step({"long": 3, "short": 3})
    engine.step({"long": 20, "short": 1})


@pytest.mark.parametrize("scale", [1.0, 0.25, torch.tensor([0.25])], ids=str)
def test_an_fp8_cache(scale: Any) -> None:
    backend = standin.latent_backend(kv_cache_dtype="fp8_e4m3")
    run_batch(Engine(backend, k_scale=scale, v_scale=scale, with_lse=True), MIXED)


def test_keys_written_by_another_layer() -> None:
    for written_by in WRITERS:
        run_batch(ReadingEngine(standin.latent_backend(), written_by=written_by, junk=math.nan), MIXED)


def test_padding_and_slots_of_minus_1() -> None:
    engine = Engine(standin.latent_backend(), num_blocks=4)
    engine.free.sort()
    engine.add("a", 8)
    engine.add("b", 4)
    engine.fill({"a": 8, "b": 3})
    engine.step({"b": 1}, pad_tokens=3)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shows_its_module", [True, False])
def test_captured_sizes(sent_by_copies: None, tokens: int, shows_its_module: bool) -> None:
    recorder = standin.Recorder()
    backend = standin.latent_backend(recorder, shows_its_module=shows_its_module)
    engine = CapturedEngine(backend, tokens, junk=math.nan)
    for _ in range(8):
        engine.change()
        engine.replayed()
    whole = [one for one in recorder.of("latent.plan") if one["wrapper"].graph]
    assert (len(whole) == len(captured_engine.CAPTURED_SIZES)) is shows_its_module
    assert len({id(one["wrapper"]) for one in whole}) == len(captured_engine.CAPTURED_SIZES)
    assert backend.plan_of_captured == "host"


def test_captured_sizes_over_changing_lengths(sent_by_copies: None) -> None:
    for tokens in (1, 3):
        CapturedLongEngine(standin.latent_backend(block_size=16, num_heads=2), tokens).run()


@pytest.mark.parametrize("written_by", WRITERS)
def test_captured_sizes_without_writing(sent_by_copies: None, written_by: str) -> None:
    engine = CapturedReadingEngine(standin.latent_backend(), 1, written_by=written_by)
    for _ in range(4):
        engine.change()
        engine.replayed()


def test_rows_of_padding_do_not_change_the_plan_of_a_captured_size() -> None:
    """Clusters of thread blocks follow from the mean number of queries: with padding counted as none, four rows of 128
    heads would be planned for another grid when three of them are padding."""
    recorder = standin.Recorder()
    backend = standin.latent_backend(recorder, num_heads=128, shows_its_module=False)
    backend.impl("layers.0", scale=0.5)
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64, transport="copy")
    builder.capture(4)
    batch.add_request("a", [5, 6], 4)
    builder.build(bucket=4)
    rows = recorder.of("latent.plan")[-1]["metadata"]
    assert rows.qo_indptr.tolist() == [0, 1, 2, 3, 4]
    assert rows.kv_len_arr.tolist() == [5, 0, 0, 0]


def test_a_captured_size_that_is_planned_once_is_found(sent_by_copies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, whole = set(), CapturedLatent.plan

    def plan(self: CapturedLatent, pages: Pages) -> None:
        if self not in planned or not int(pages.indptr[-1]):
            whole(self, pages)
        if int(pages.indptr[-1]):
            planned.add(self)

    monkeypatch.setattr(CapturedLatent, "plan", plan)
    with pytest.raises(ConformanceError, match="it is as if a plan of an earlier step was replayed"):
        CapturedLongEngine(standin.latent_backend(block_size=16, num_heads=2), 1).run()


def test_a_profiling_run() -> None:
    backend = standin.latent_backend()
    impl = backend.impl("layers.0", scale=0.1)
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build_profile([3, 2])
    query, rows = torch.randn(5, 4, 576, dtype=torch.bfloat16), torch.randn(5, 1, 576, dtype=torch.bfloat16)
    nothing: Any = None
    found = impl.forward(query, rows, nothing, None, metadata)
    torch.testing.assert_close(found[0], rows[0, :, :512].expand(4, 512))
    assert not impl.forward(query, nothing, nothing, None, metadata, write=False).any()


def test_a_query_and_an_output_with_gaps() -> None:
    backend = standin.latent_backend()
    impl = backend.impl("layers.0", scale=0.1)
    cache = backend.allocate_kv_cache(4)
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    batch.add_request("a", [1])
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build({"a": 3})
    query, rows = torch.randn(3, 4, 580, dtype=torch.bfloat16)[..., 3:579], torch.randn(3, 1, 576).bfloat16()
    wide = torch.full((3, 4, 520), 7.0, dtype=torch.bfloat16)
    output, nothing = wide[..., :512], None
    assert impl.forward(query, rows, nothing, cache, metadata, output) is output  # type: ignore[arg-type]
    expected = impl.forward(query.contiguous(), rows, nothing, cache, metadata)  # type: ignore[arg-type]
    torch.testing.assert_close(output, expected)
    assert (wide[..., 512:] == 7.0).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_size_v": None}, "head_size_v: 576 found"),
        ({"head_size": 640}, "head_size: 640 found"),
        ({"num_heads": 20}, "num_heads: 20 found; over latent caches flashinfer takes 1, 2, 4"),
        ({"num_heads": 256}, "num_heads: 256 "),
        ({"use_mla": False, "num_kv_heads": 1}, "use_mla: False found"),
        ({"kv_cache_dtype": "fp8_e4m3", "dtype": "float16"}, "kv_cache_dtype: fp8_e4m3 found; latent caches of it"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype: fp8_e5m2 found"),
        ({"kv_cache_layout": "HND"}, "kv_cache_layout: "),
    ],
    ids=str,
)
def test_configurations_that_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        standin.latent_backend(**changes)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(("name", "value"), [("sliding_window", 5), ("logits_soft_cap", 2.0), ("sinks", [0.1] * 4)])
def test_layers_that_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: flashinfer does not support {name}"):
        standin.latent_backend().impl("layers.0", scale=1.0, **{name: value})
    by_hand = standin.latent_backend(spec=None, variant="")
    with pytest.raises(ValueError, match=f"^{name}: "):
        by_hand.impl("layers.0", scale=1.0, **{name: value})


def test_a_module_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = standin.latent_backend()
    monkeypatch.setattr(type(backend), "_is_cuda", True)
    monkeypatch.setattr(modules, "find", lambda name: None)
    monkeypatch.setattr(modules, "no_compiler", lambda: "nvcc not found")
    with pytest.raises(ValueError, match=r"use_mla: the module batch_mla_attention_dtype_q_bf16.* and nvcc not found"):
        backend.impl("layers.0", scale=1.0)


@pytest.mark.parametrize("shows_its_module", [True, False])
def test_a_layer_calls_the_module_where_it_is_shown(shows_its_module: bool) -> None:
    recorder = standin.Recorder()
    engine = Engine(standin.latent_backend(recorder, shows_its_module=shows_its_module), num_blocks=80, junk=math.nan)
    run_batch(engine, MIXED)
    has_lse = {call["has_lse"] for call in recorder.of("latent.run")}
    assert has_lse == ({False} if shows_its_module else {True}), "the wrapper's plans ask for it, the module's need not"


def test_a_module_of_a_version_that_is_not_known_is_not_called() -> None:
    recorder = standin.Recorder("0.9.0")
    run_batch(Engine(standin.latent_backend(recorder), num_blocks=80, junk=math.nan), MIXED)
    assert {call["has_lse"] for call in recorder.of("latent.run")} == {True}


def test_a_module_that_plans_otherwise_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = standin.Recorder()
    backend = standin.latent_backend(recorder)
    monkeypatch.setattr(latent_run.Module, "plan", lambda self, *_: self.module.plan(1, 2))
    run_batch(Engine(backend, num_blocks=80, junk=math.nan), MIXED)
    monkeypatch.setattr(latent_run.Module, "plan", lambda self, *given: [7])  # other places
    run_batch(Engine(standin.latent_backend(recorder), num_blocks=80, junk=math.nan), MIXED)
    assert {call["has_lse"] for call in recorder.of("latent.run")} == {True}


def test_steps_that_may_be_cut_into_too_many_pieces_are_planned_by_the_wrapper() -> None:
    """The module's own plan would write beyond its memory."""
    recorder = standin.Recorder()
    backend = standin.latent_backend(recorder, num_heads=128)
    backend.impl("layers.0", scale=0.1)
    batch = InputBatch(max_num_reqs=2, max_model_len=1 << 15, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=1 << 15)
    batch.add_request("a", list(range(1, 4200)))
    before = len(recorder.of("latent.plan"))
    builder.build({"a": 16000})
    assert len(recorder.of("latent.plan")) == before + 1, "the first one of the wrapper's life"
    builder.build({"a": 300})
    assert len(recorder.of("latent.plan")) == before + 1
    batch.rollback("a", 16300)
    builder.build({"a": 16384})
    assert len(recorder.of("latent.plan")) == before + 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"query": (3, 4, 575)}, "query: torch.bfloat16 (3, 4, 575) found; this backend was made for torch.bfloat16"),
        ({"query": (3, 3, 576)}, "query: torch.bfloat16 (3, 3, 576) found; "),
        ({"query": (2, 4, 576)}, "query: shape (2, 4, 576) found; the metadata has 3"),
        ({"output": (3, 4, 511)}, "output: torch.bfloat16 (3, 4, 511) found; "),
        ({"output": (2, 4, 512)}, "output: torch.bfloat16 (2, 4, 512) found; "),
        ({"dtype": torch.float32}, "query: torch.float32 (3, 4, 576) found; "),
        ({"cache": (9, 4, 575)}, "kv_cache: "),
        ({"cache": (9, 2, 576)}, "kv_cache: "),
        ({"cache_dtype": torch.float16}, "kv_cache: "),
        ({"offset": 4}, "kv_cache: strides (2304, 576, 1) at address 0x"),
    ],
    ids=str,
)
def test_tensors_that_the_kernels_cannot_take(changes: dict[str, Any], says: str) -> None:
    """The module checks none of it."""
    backend = standin.latent_backend()
    impl = backend.impl("layers.0", scale=0.1)
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    batch.add_request("a", [1])
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build({"a": 3})
    query = torch.zeros(changes.get("query", (3, 4, 576)), dtype=changes.get("dtype", torch.bfloat16))
    shape, offset = changes.get("cache", (9, 4, 576)), changes.get("offset", 0)
    cache = torch.zeros(math.prod(shape) + offset, dtype=changes.get("cache_dtype", torch.bfloat16))[offset:]
    rows, nothing = torch.zeros(3, 1, 576, dtype=torch.bfloat16), None
    output = torch.empty(changes["output"], dtype=torch.bfloat16) if "output" in changes else None
    with pytest.raises(ValueError) as caught:
        impl.forward(query, rows, nothing, cache.view(shape), metadata, output)  # type: ignore[arg-type]
    assert str(caught.value).startswith(says)


def test_more_tiles_than_a_plan_has_room_for() -> None:
    backend = standin.latent_backend(num_heads=128)
    with pytest.raises(ValueError, match="metadata: a captured size of num_reqs 9000, each of query length 1,"):
        CapturedLatent(
            backend.library(), backend.workspace, LayerSettings(backend.shape, 1.0, None, None),
            indices=torch.zeros(9000, dtype=torch.int32), num_reqs=9000, query_len=1,
        )  # fmt: skip
