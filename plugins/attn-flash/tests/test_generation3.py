"""What generation 3 has of its own: schedules that layers share, queries of fp8, sinks of bfloat16, two packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flash_standin as standin
import pytest
import torch
from attn_flash import generation3, generation3_vllm, probe, probe_results
from attn_flash.generation3 import StepArguments

from attncore.builder import InputBatch, MetadataBuilder

CPU = torch.device("cpu")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> standin.Generation3:
    made: standin.Generation3 = standin.install(monkeypatch, "3_vllm", standin.Generation3())
    return made


class Engine:
    """Two requests that have decoded some tokens, and layers over one cache."""

    def __init__(self, windows: tuple[int | None, ...], **fields: Any) -> None:
        self.backend = standin.create("3_vllm", **fields)
        self.impls = [
            self.backend.impl(f"layers.{index}", scale=0.25, sliding_window=window)
            for index, window in enumerate(windows)
        ]
        self.cache = self.backend.allocate_kv_cache(32)
        self.batch = InputBatch(max_num_reqs=4, max_model_len=256, block_size=16)
        self.builder = MetadataBuilder(self.batch, self.backend, max_num_batched_tokens=256)
        for index in range(2):
            self.batch.add_request(index, [1 + 4 * index + block for block in range(4)])
        self.run(self.builder.build({0: 20, 1: 7}))

    def run(self, metadata: Any) -> None:
        tensors = [torch.randn(metadata.num_tokens, heads, 16).bfloat16() for heads in (4, 2, 2)]
        for impl in self.impls:
            impl.forward(*tensors, self.cache, metadata)


def schedules(library: standin.Generation3) -> list[Any]:
    found = [call["scheduler_metadata"] for call in library.calls]
    library.calls.clear()
    return found


def test_every_tile_of_a_layer_with_a_window_is_masked(library: standin.Generation3) -> None:
    """Left alone, vLLM's build lets queries see later keys; without a window, it would see none."""
    engine = Engine((None, 21, 500))  # of these the second alone is shorter than the prompts
    steps = ({0: 90, 1: 70}, {0: 4, 1: 4}, {0: 1, 1: 1})
    engine.batch.remove_request(1)
    engine.batch.add_request(1, [20 + block for block in range(12)])
    engine.batch.append_blocks(0, [10 + block for block in range(6)])
    library.calls.clear()
    for step in steps:
        engine.run(engine.builder.build(step))
    ends = [call["cp_tot_seqused_k"] for call in library.calls]
    assert [one is not None for one in ends] == [False, True, False] * 2 + [False] * 3
    assert all(one.shape == (2,) and bool((one < -(1 << 29)).all()) for one in ends if one is not None)


def test_the_layers_of_a_decode_share_a_schedule_from_the_second_on(library: standin.Generation3) -> None:
    engine = Engine((None,) * 4)
    assert schedules(library) == [None] * 4  # prompts: nothing is split
    for _ in range(3):  # the plan outlasts its step, the schedule does not: another's raises in the stand-in
        engine.run(engine.builder.build({0: 1, 1: 1}))
        first, second, third, fourth = schedules(library)
        assert first is None
        assert second is not None
        assert third is second
        assert fourth is second


def test_layers_of_another_kind_have_a_schedule_of_their_own(library: standin.Generation3) -> None:
    engine = Engine((None, 8, None, 8, None, 8))
    schedules(library)
    engine.run(engine.builder.build({0: 1, 1: 1}))
    found = schedules(library)
    assert found[:2] == [None, None]
    assert found[4] is found[2]
    assert found[5] is found[3]
    assert found[3] is not found[2]


def test_a_step_that_runs_again_is_scheduled_again(library: standin.Generation3) -> None:
    """A graph that is captured after a run to warm up: what it holds has to write the schedule."""
    engine = Engine((None,) * 3)
    schedules(library)
    metadata = engine.builder.build({0: 1, 1: 1})
    engine.run(metadata)
    warm = schedules(library)
    engine.run(metadata)
    again = schedules(library)
    assert again[0] is None
    assert again[1] is again[2]
    assert again[1] is not warm[1]


def test_a_schedule_that_is_kept_too_long_is_seen(
    library: standin.Generation3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that the tests above are to find, planted."""

    class NeverCleared(dict[int, Any]):
        def clear(self) -> None: ...

    def never_renewed(self: StepArguments, given: tuple[Any, ...], ends: Any = None) -> None:
        self.given, self.ends, self._shared = given, ends, NeverCleared()

    monkeypatch.setattr(StepArguments, "__init__", never_renewed)
    engine = Engine((None,) * 3)

    def decodes() -> None:
        for _ in range(6):  # a builder writes its steps into several places by turns
            engine.run(engine.builder.build({0: 1, 1: 1}))

    with pytest.raises(RuntimeError, match="the schedule is of another step"):
        decodes()


def test_queries_over_an_fp8_cache_are_cut_off(library: standin.Generation3) -> None:
    engine = Engine((None,), kv_cache_dtype="fp8_e4m3")
    metadata = engine.builder.build({0: 1, 1: 1})
    query = torch.full((2, 4, 16), 1e4).bfloat16()
    query[1] = -1e4
    key = torch.randn(2, 2, 16).bfloat16()
    found = engine.impls[0].forward(query, key, key, engine.cache, metadata)
    assert library.calls[-1]["q"].dtype == torch.float8_e4m3fn
    assert library.calls[-1]["q"].float().unique().tolist() == [-448.0, 448.0]
    assert found.isfinite().all()


@pytest.mark.parametrize("scales", [(2.0, 0.5), ([2.0, 4.0], [0.5, 8.0])], ids=["numbers", "per_head"])
def test_scales_are_written_to_where_a_captured_graph_reads_them(library: standin.Generation3, scales: Any) -> None:
    engine = Engine((None,), kv_cache_dtype="fp8_e4m3")
    (impl,) = engine.impls
    engine.run(engine.builder.build({0: 1, 1: 1}))
    names = ("q_descale", "k_descale", "v_descale")
    before = [library.calls[-1][name] for name in names]
    impl.set_scales(*(one if isinstance(one, float) else torch.tensor(one) for one in scales))
    found = [one[0].tolist() for one in before]  # what the graph's calls were given
    assert found == [[1.0, 1.0], *([one] * 2 if isinstance(one, float) else one for one in scales)]


def test_sinks_that_are_written_to_in_place(library: standin.Generation3) -> None:
    backend = standin.create("3_vllm", sinks=True)
    impl = backend.impl("layers.0", scale=0.25, sinks=[1.0, 2.0, 3.0, 4.0])
    kept = impl._layer._sinks
    impl.set_sinks([0.5, 0.25, 0.125, 3.0])
    assert impl._layer._sinks is kept  # a captured graph reads it
    assert kept.tolist() == [0.5, 0.25, 0.125, 3.0]


def test_sinks_far_above_every_score(library: standin.Generation3) -> None:
    """The kernel's log-sum-exp is infinite there, and that of the layer the sink."""
    backend = standin.create("3_vllm", sinks=True)
    sinks = [-80.0, 3.0, -80.0, 3.0]
    impl = backend.impl("layers.0", scale=1.0, sinks=sinks)
    batch = InputBatch(max_num_reqs=1, max_model_len=64, block_size=16)
    batch.add_request("a", [1])
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=64).build({"a": 5})
    query, key, value = torch.full((5, 4, 16), -3.0), torch.full((5, 2, 16), 2.0), torch.randn(5, 2, 16)
    cache = backend.allocate_kv_cache(2)
    output, lse = impl.forward_with_lse(query.bfloat16(), key.bfloat16(), value.bfloat16(), cache, metadata)
    expected = torch.logaddexp(torch.tensor(sinks), -96.0 + torch.arange(1.0, 6.0).log()[:, None])
    torch.testing.assert_close(lse, expected)
    assert output.isfinite().all()


@pytest.mark.parametrize("sinks", [True, False], ids=["vllm", "own"])
def test_calls_find_what_a_build_leaves_out(sinks: bool) -> None:
    def lacks(*names: str) -> dict[str, str]:
        return probe.generation3_lacks(standin.Generation3(names, sinks=sinks).library(), CPU)

    assert lacks() == {}
    assert lacks("sliding_window", "head_size 96").keys() == {"sliding_window", "head_size 96"}
    assert lacks("fp8").keys() == {"kv_cache_dtype fp8_e4m3"}
    assert lacks("sinks").keys() == ({"sinks"} if sinks else set())


def test_the_files_of_both_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found without an import: a package that is imported here would end the test."""
    files = {"3": "flash_attn_3/_C.abi3.so", "3_vllm": "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"}
    for file in files.values():
        path = tmp_path / file
        path.parent.mkdir(parents=True)
        path.touch()
        (tmp_path / file.split("/")[0] / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {name: probe_results.library_file(name) for name in files} == {
        name: tmp_path / file for name, file in files.items()
    }


def test_a_vllm_without_the_library_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_results, "library_file", lambda generation: None)
    with pytest.raises(ImportError, match="vllm is installed without its library of FlashAttention 3"):
        generation3_vllm.load()


def test_rows_of_one_token_start_where_they_are_counted() -> None:
    assert generation3._counted("cpu")[:4].tolist() == [0, 1, 2, 3]
    assert generation3._counted("cpu") is generation3._counted("cpu")


def test_a_layer_that_is_made_in_inference_mode_takes_scales_and_sinks_outside_of_it(
    library: standin.Generation3,
) -> None:
    with torch.inference_mode():
        backend = standin.create("3_vllm", kv_cache_dtype="fp8_e4m3", head_size=64)
        impl = backend.impl("layers.0", scale=0.25, sinks=[0.5] * 4)
    impl.set_scales(2.0, 4.0)
    impl.set_sinks([1.0] * 4)
    assert impl._descales.unique().tolist() == [1.0, 2.0, 4.0]
