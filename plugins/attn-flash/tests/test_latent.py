"""Latent caches (MLA) over FlashAttention 3: what is chosen, what the calls are given, what a build leaves out."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import flash_standin as standin
import pytest
import torch
from attn_flash import doctor, probe, probe_results
from attn_flash.latent_layer import LatentLayer
from attn_flash.probe_results import ProbeResult
from attn_flash.segments import packed_segment
from attn_flash.spec import make_spec

import attncore
from attncore import AttentionRequest, Host
from attncore.builder import CascadeRule, InputBatch, MetadataBuilder
from attncore.dense import dense_attention
from attncore.registry.choice.negotiate_installed import negotiate_installed

CPU = torch.device("cpu")
HEADS, ROW, VALUES, SIZE, SCALE = 16, 576, 512, 64, 0.06
LATENT: dict[str, Any] = {
    "num_heads": HEADS, "num_kv_heads": 1, "head_size": ROW, "head_size_v": VALUES, "use_mla": True,
    "dtype": "bfloat16",
}  # fmt: skip
FLASHINFER = {"flashinfer-python": "0.7.2", "apache-tvm-ffi": "0.1.12"}


@pytest.fixture(params=["3", "3_vllm"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> standin.Generation3:
    """The operator's stand-in of each package: vLLM's has ``sinks``."""
    made: standin.Generation3 = standin.install(monkeypatch, request.param, standin.MADE[request.param]())
    return made


class Engine:
    """Requests in the persistent batch, and layers over one cache. What was written is remembered."""

    def __init__(self, library: standin.Generation3, layers: int = 1, tables: Any = ((1, 2, 3), (4, 5, 6))) -> None:
        generation = "3_vllm" if library.sinks else "3"
        self.backend = standin.create(generation, **LATENT, block_size=SIZE)
        self.impls = [self.backend.impl(f"layers.{index}", scale=SCALE) for index in range(layers)]
        self.cache = self.backend.allocate_kv_cache(16)
        self.batch = InputBatch(max_num_reqs=4, max_model_len=256, block_size=SIZE)
        self.builder = MetadataBuilder(self.batch, self.backend, max_num_batched_tokens=512)
        for name, table in enumerate(tables):
            self.batch.add_request(name, list(table))
        self.said: dict[Any, list[torch.Tensor]] = {name: [] for name in range(len(tables))}

    def tensors(self, metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, rows = (torch.randn(metadata.num_tokens, heads, ROW).bfloat16() for heads in (HEADS, 1))
        starts = metadata.host.query_start_loc
        for row, name in enumerate(metadata.req_ids):
            self.said[name].append(rows[starts[row] : starts[row + 1]])
        return query, rows

    def expected(self, metadata: Any, query: torch.Tensor) -> torch.Tensor:
        """By dense attention over all that was written."""
        starts, found = metadata.host.query_start_loc, []
        for row, name in enumerate(metadata.req_ids):
            mine, keys = query[starts[row] : starts[row + 1]].float(), torch.cat(self.said[name]).float()
            found.append(dense_attention(mine, keys, keys[..., :VALUES], scale=SCALE))
        return torch.cat(found)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=3e-2, atol=3e-2)


def test_the_rotated_columns_are_keys_and_the_others_values(library: standin.Generation3) -> None:
    """Nothing of the cache is copied: the calls are given views of it."""
    torch.manual_seed(0)
    engine = Engine(library)
    for scheduled in ({0: 70, 1: 3}, {0: 1, 1: 1}, {0: 30, 1: 1}):
        metadata = engine.builder.build(scheduled)
        query, rows = engine.tensors(metadata)
        found = engine.impls[0].forward(query, rows, None, engine.cache, metadata)
        assert found.shape == (metadata.num_tokens, HEADS, VALUES)
        close(found, engine.expected(metadata, query))
        call = library.calls[-1]
        sizes = [call[name].shape[-1] for name in ("q", "k", "q_v", "v")]
        assert sizes == [ROW - VALUES, ROW - VALUES, VALUES, VALUES]
    cached = engine.cache.untyped_storage().data_ptr()
    assert {call[name].untyped_storage().data_ptr() for call in library.calls[1:] for name in "kv"} == {cached}


def test_a_profiling_run_has_no_cache(library: standin.Generation3) -> None:
    torch.manual_seed(0)
    engine = Engine(library)
    metadata = engine.builder.build({0: 70, 1: 3})
    query, rows = engine.tensors(metadata)
    close(engine.impls[0].forward(query, rows, None, None, metadata), engine.expected(metadata, query))
    assert library.calls[-1]["page_table"] is None


def test_layers_of_a_decode_share_a_schedule(library: standin.Generation3) -> None:
    """Made of the sizes of such calls: the stand-in refuses another's."""
    engine = Engine(library, layers=3)
    for scheduled in ({0: 70, 1: 3}, {0: 1, 1: 1}):
        metadata = engine.builder.build(scheduled)
        query, rows = engine.tensors(metadata)
        for impl in engine.impls:
            impl.forward(query, rows, None, engine.cache, metadata)
    schedules = [call["scheduler_metadata"] for call in library.calls[-3:]]
    assert schedules[0] is None
    assert schedules[1] is schedules[2]
    assert (schedules[1] is None) is not library.sinks


def test_a_prefix_that_is_read_once(library: standin.Generation3) -> None:
    torch.manual_seed(0)
    engine = Engine(library, tables=[(1, 2, 3)])
    impl = engine.impls[0]
    metadata = engine.builder.build({0: 2 * SIZE})
    query, rows = engine.tensors(metadata)
    impl.forward(query, rows, None, engine.cache, metadata)
    for name in (1, 2):
        engine.batch.add_request(name, [1, 2, 3 + name], 2 * SIZE)
        engine.said[name] = engine.said[0][:1]
    metadata = engine.builder.build({0: 1, 1: 1, 2: 5})
    query, rows = engine.tensors(metadata)
    rule = CascadeRule(min_requests=2, min_prefix_tokens=1, min_saving=0.0)
    cascade = engine.backend.cascade(metadata, rule)
    assert cascade is not None
    found = impl.forward_cascade(query, rows, None, engine.cache, metadata, cascade)
    close(found, engine.expected(metadata, query))
    close(impl.forward_cascade(query, None, None, engine.cache, metadata, cascade, write=False), found)


def test_a_step_without_tokens(library: standin.Generation3) -> None:
    engine = Engine(library, tables=())
    metadata = engine.builder.build()
    output = torch.full((2, HEADS, VALUES), 7.0, dtype=torch.bfloat16)
    nothing = torch.empty(0, 1, ROW, dtype=torch.bfloat16)
    query = torch.randn(2, HEADS, ROW).bfloat16()
    found, lse = engine.impls[0].forward_with_lse(query, nothing, None, engine.cache, metadata, output)
    assert found is output
    assert not found.any()
    assert lse.shape == (2, HEADS)
    assert lse.isneginf().all()


def test_partial_outputs_stay_within_the_workspace(library: standin.Generation3) -> None:
    """A part of a row's keys takes 2 KiB a head and token; a few short rows have as many parts as the library likes."""
    engine = Engine(library)
    layer = LatentLayer(
        library.library(), num_heads=128, cores=132, scale=1.0, sliding_window=None, logits_soft_cap=None,
        alibi_slopes=None, sinks=None, causal=True,
    )  # fmt: skip
    segment = packed_segment(torch.zeros(1, dtype=torch.int32), 1, 1, 1)
    for tokens, most in ((1, 0), (2, 128), (64, 4), (256, 1), (4096, 1)):
        assert layer._splits(segment._replace(stop=tokens, max_seq_len=32768)) == most
        partial_outputs = (most or 132) * tokens * 128 * VALUES * 4
        assert most == 1 or partial_outputs <= engine.backend.spec.workspace_bytes  # one part is none
    for unsplit in ({"max_query_len": 2048, "max_seq_len": 2048}, {"max_query_len": 1, "max_seq_len": 256}):
        assert layer._splits(segment._replace(stop=2048, **unsplit)) == 0  # by the library either


def where(device: str, **packages: str) -> Host:
    return Host.assume(device, packages={**standin.packages(), **packages})


@pytest.mark.parametrize(
    ("host", "fields", "backend", "variant"),
    [
        (where("sm_90", vllm="0.33.0"), {}, "flash", "fa3_vllm_latent"),
        (where("sm_90", **{"flash-attn-3": "3.0.0"}), {}, "flash", "fa3_latent"),
        (where("sm_90", vllm="0.33.0", **FLASHINFER), {}, "flash", "fa3_vllm_latent"),
        (where("sm_90", vllm="0.33.0", **FLASHINFER), {"dtype": "float16"}, "flash", "fa3_vllm_latent"),
        (where("sm_90", vllm="0.33.0", **FLASHINFER), {"num_heads": 20}, "flash", "fa3_vllm_latent"),
        (where("sm_90", vllm="0.33.0", **FLASHINFER), {"cuda_graph": "always"}, "flash", "fa3_vllm_latent"),
        (where("sm_90", vllm="0.33.0", **FLASHINFER), {"kv_cache_dtype": "fp8"}, "flashinfer", "latent_jit"),
        (where("sm_80", vllm="0.33.0", **FLASHINFER), {}, "flashinfer", "latent_jit"),
        (where("sm_90", **{"flash-attn": "2.8.3"}, **FLASHINFER), {}, "flashinfer", "latent_jit"),
    ],
)
def test_which_backend_reads_latent_caches(host: Host, fields: dict[str, Any], backend: str, variant: str) -> None:
    found = attncore.select(AttentionRequest(**{**LATENT, **fields}), host=host)
    assert (found.name, found.variant) == (backend, variant)


@pytest.mark.parametrize(
    ("host", "fields", "words"),
    [
        (where("sm_80", vllm="0.33.0"), {}, "cuda:sm_90"),
        (where("sm_90", vllm="0.33.0"), {"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8_e4m3"),
        (where("sm_90", vllm="0.33.0"), {"head_size": 320, "head_size_v": 256}, "head_size 320"),
        (where("sm_90", vllm="0.33.0"), {"head_size_v": None}, "head_size_v 576"),
        (where("sm_90", vllm="0.33.0"), {"sinks": True}, "sinks"),
        (where("sm_90", vllm="0.33.0"), {"options": {"flash": {"generation": "2"}}}, "options ask for generation 2"),
    ],
)
def test_the_reason_where_it_does_not(host: Host, fields: dict[str, Any], words: str) -> None:
    negotiation = negotiate_installed(AttentionRequest(**{**LATENT, **fields}), host=host)
    reasons = [reason for one in negotiation.rejected if one.name == "flash" for reason in one.reasons]
    assert [reason for reason in reasons if words in str(reason)], reasons


def test_calls_find_a_build_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a reason then, the plain variants stay, and a creation that knows of no findings is refused by name."""
    lacks = probe.generation3_lacks(standin.Generation3(("kv_cache latent",)).library(), CPU)
    assert lacks.keys() == {"kv_cache latent"}
    found = ProbeResult("vllm 0.33.0", "a GPU", lacks=lacks)
    assert doctor.said(found) == "runs on a GPU; left out of this build: kv_cache latent"
    host = where("sm_90", vllm="0.33.0")
    choice = attncore.select(AttentionRequest(**{**LATENT, "backend": "flash"}), host=host)
    standin.install(monkeypatch, "3_vllm", standin.Generation3())
    monkeypatch.setattr(import_module("attn_flash.latent").LatentBackend, "_found", lambda self: found)
    with pytest.raises(
        ValueError, match=r"^use_mla: the kernel of latent rows was left out of this build of vllm 0\.33\.0"
    ):
        choice.create(device="cpu")
    monkeypatch.setattr(probe_results, "read", lambda generation, device="": found if generation == "3_vllm" else None)
    (variant,) = (one for one in make_spec().variants if one.name == "fa3_vllm_latent")
    check = variant.facts["check"]
    reasons = list(check(AttentionRequest(**LATENT), host))
    assert ["use_mla: this build of vllm 0.33.0 leaves it out" in str(reason) for reason in reasons] == [True]
    plain = AttentionRequest(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16")
    assert list(check(plain, host)) == []


def test_a_build_without_windows_has_none_over_latent_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ProbeResult("vllm 0.33.0", "a GPU", lacks={"sliding_window": "no local attention"})
    monkeypatch.setattr(probe_results, "read", lambda generation, device="": found if generation == "3_vllm" else None)
    (variant,) = (one for one in make_spec().variants if one.name == "fa3_vllm_latent")
    assert "sliding_window" not in variant.facts["features"]
    assert "no local attention" in variant.facts["unsupported"]["sliding_window"]
    assert variant.facts["head_sizes"] == {ROW}
