"""Steps whose nodes were launched when an interrupt came, and another while the step was taken back."""

import contextlib
import sys
from pathlib import Path

import pytest
from interrupted_calls import AtOpcode, Interrupt

from attncore import InputBatch, MetadataBuilder
from attncore.kernels import load_kernels

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the transport with nodes needs triton's module")

pytestmark = pytest.mark.skipif(load_kernels().IMPLEMENTATION != "cython", reason="numba's kernels serve no device")


def test_the_device_reads_the_step_behind_one_whose_taking_back_was_interrupted(monkeypatch):
    """The nodes of an interrupted build have run: they are told so in several steps, any of which may be the last."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3] / "benchmarks"), *sys.path])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    from gpu_work import Backend
    from nodes_on_host import nodes_on_host

    interrupts = []

    def around(call, name):
        def launched(*args):
            call(*args)
            if interrupts:
                interrupts.pop().__enter__()
                raise Interrupt

        return launched

    batch = InputBatch(max_num_reqs=4, max_model_len=4096, block_size=4)
    backend = Backend("cpu", 4, needs=("paged_kv_indptr", "paged_kv_last_page_len"))
    with nodes_on_host(around):
        builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8, transport="graph")
        batch.add_request("a", list(range(1, 1025)), 3)
        for count in range(4000):
            second = AtOpcode(count)
            interrupts.append(second)
            with contextlib.suppress(Interrupt):
                builder.build()
            second.__exit__(None, None, None)
            metadata = builder.build()
            found = metadata.positions.tolist(), metadata.slot_mapping.tolist()
            assert found == (metadata.host.positions.tolist(), metadata.host.slot_mapping.tolist()), count
            if not second.fired:
                break
        else:
            pytest.fail("no roll-back came to its end")
    assert count > 20
