"""Plans of captured sizes that the device makes: the kernel in Triton's interpreter, and when the host plans."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys

import flashinfer_standin as standin
import pytest
import torch
from attn_flashinfer import device_plan
from attn_flashinfer.device_plan import Layout, Sizes, layout_of, prove, table_row
from flashinfer_standin_plan import PlanFacts, write_plan

from attncore.builder import InputBatch, MetadataBuilder

HERE = pathlib.Path(__file__).parent
SIZES = Sizes(4, 1, 4, 2, 16, -1, 11)


@pytest.mark.parametrize("script", ["interpreted_plans.py 120", "interpreted_captures.py", "interpreted_divisions.py"])
def test_in_tritons_interpreter(script: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, *script.split()],
        cwd=HERE,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip() == "equal", done.stderr


def _capture(recorder: standin.Recorder, **options: str) -> standin.FlashInferBackend:
    backend = standin.backend(recorder, options=options)
    backend.impl("layers.0", scale=0.5)
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64, transport="copy")
    for size in (2, 4):
        builder.capture(size)
    return backend


def test_other_versions_are_planned_on_the_host_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        backend = _capture(standin.Recorder("0.8.1"))
    assert backend.plan_of_captured == "host"
    assert backend.why_plan == "plans of FlashInfer 0.8.1 were not compared, those of 0.7.x were"
    assert [record.message for record in caplog.records] == [
        f"flashinfer: captured decodes are planned on the host: {backend.why_plan}"
    ]


def test_the_option_plan() -> None:
    recorder = standin.Recorder("0.7.2")
    backend = _capture(recorder, plan="host")
    assert (backend.plan_of_captured, backend.why_plan) == ("host", "asked for by the option plan")
    assert len(recorder.of("fast_decode_plan")) == 2, "nothing is compared"
    with pytest.raises(ValueError, match="options: plan=device asked for, but plans of FlashInfer"):
        _capture(standin.Recorder("0.8.1"), plan="device")


def test_a_kernel_that_fails_leaves_the_host_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no PTX\nfor this device")

    monkeypatch.setattr(device_plan, "DevicePlan", broken)
    recorder = standin.Recorder("0.7.2")
    backend = _capture(recorder)
    assert (backend.plan_of_captured, backend.why_plan) == ("host", "RuntimeError: no PTX")
    last = recorder.of("fast_decode_plan")[-1]
    assert last["global_override_indptr_cpu"].tolist() == [0, 0, 0, 0, 0], "the step itself is planned last"


class _Node:
    """In the kernel's place: writes a plan in plain Python, with or without a fault."""

    fault = -1

    def __init__(self, indptr: torch.Tensor, workspace: torch.Tensor, facts: PlanFacts) -> None:
        self._indptr, self._workspace, self._facts = indptr, workspace, facts

    def __call__(self) -> None:
        write_plan(self._indptr.tolist(), self._facts, self._workspace.numpy())
        if self.fault >= 0:
            self._workspace[self.fault] += 1


@pytest.mark.parametrize("tensor_cores", [True, False])
@pytest.mark.parametrize("array", ["", *Layout._fields[:8]])
def test_one_word_that_differs_leaves_the_host_to_plan(
    array: str, tensor_cores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = PlanFacts(*SIZES[:5], tensor_cores=tensor_cores)
    workspace = torch.zeros(1 << 12, dtype=torch.uint8)

    def plan(indptr: torch.Tensor) -> list[int]:
        return write_plan(indptr.tolist(), facts, workspace.numpy())

    layout = layout_of(plan(torch.tensor([0, 1, 2, 3, 4])), SIZES)
    place = getattr(layout, array) if array else -1
    if array and place < 0:
        return  # DecodePlan has no such array

    def node(indptr: torch.Tensor, rows: object) -> _Node:
        made = _Node(indptr, workspace, facts)
        made.fault = place
        return made

    monkeypatch.setattr(device_plan, "DevicePlan", node)
    found, why = prove(plan, workspace, SIZES, 9)
    if array:
        assert found is None
        assert "of a plan on the device is not FlashInfer's, for pages 9, 9, 9, 9" in why
    else:
        assert found == layout
        assert why == "8 plans of each captured size were FlashInfer's own, word for word"


def test_descriptions_that_are_not_known() -> None:
    for info, why in (
        (None, "described by 0 numbers"),
        ([0] * 12, "described by 12 numbers"),
        ([0] * 15, "is not known"),
        ([0] * 10, "is not known"),
    ):
        with pytest.raises(ValueError, match=why):
            layout_of(info, SIZES)
    layout = Layout(0, 0, 0, 0, 0, 2, 0, 0, 1, 1, 1, 1, 1, empty=True)
    with pytest.raises(ValueError, match="chunk begins at byte 2, which is no multiple of 4"):
        table_row(layout, SIZES, 0)


def test_offsets_that_change_leave_the_host_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, workspace = PlanFacts(*SIZES[:5]), torch.zeros(1 << 12, dtype=torch.uint8)
    monkeypatch.setattr(device_plan, "DevicePlan", lambda indptr, rows: _Node(indptr, workspace, facts))
    calls = []

    def plan(indptr: torch.Tensor) -> list[int]:
        calls.append(indptr)
        info = write_plan(indptr.tolist(), facts, workspace.numpy())
        info[0] += len(calls) // 3
        return info

    assert prove(plan, workspace, SIZES, 9) == (None, "the plan's offsets change with the lengths")
