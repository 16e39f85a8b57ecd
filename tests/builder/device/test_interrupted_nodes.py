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


def test_the_step_before_is_lost_where_a_field_beside_the_nodes_was_sent(monkeypatch):
    """No node has run, but the place of the field on the device has the number of the step that was not built."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3] / "benchmarks"), *sys.path])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    from gpu_work import Backend
    from nodes_on_host import nodes_on_host

    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4)
    with nodes_on_host(lambda call, name: call):
        builder = MetadataBuilder(
            batch, Backend("cpu", 4, needs=("seq_lens",)), max_num_batched_tokens=8, transport="graph"
        )
        batch.add_request("a", list(range(1, 17)), 3)
        _ = builder.build().query_lens  # no backend declares it: from now on it is sent with each step
        last, copy = builder.build(), builder._assembly.side._copy
        assert builder.last_metadata is last

        def interrupted(*args):
            copy(*args)
            raise Interrupt

        with monkeypatch.context() as patched:
            patched.setattr(builder._assembly.side, "_copy", interrupted)
            with pytest.raises(Interrupt):
                builder.build({"a": 5})
        assert (builder.last_step, builder.last_metadata) == (1, None)
        metadata = builder.build({"a": 2})
        assert (metadata.step, metadata.query_lens.tolist(), builder.last_metadata) == (2, [2], metadata)
