"""On a CUDA or ROCm device: decodes captured by torch alone, with metadata of plain tensors, and replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attncore.testing.engines.compare import StepRequest, compare
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import engine_on_gpu
from attncore.testing.engines.steps_on_device import planned, reads_page_lists
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = ["test_a_captured_graph_replays_with_new_lengths"]
REFILLED = ("slot_mapping", "block_table", "seq_lens", "query_start_loc", "positions", "paged_kv_indptr")
"""Fields whose captured tensors get the numbers of each step."""


@covers("captured graph", gpu=True)
def test_a_captured_graph_replays_with_new_lengths(attncore_subject: Subject) -> None:
    """Decodes captured once, replayed after another plan with other lengths in the same tensors."""
    attncore_subject.require_graphs("decode")
    if reads_page_lists(attncore_subject.form):
        raise UnsupportedError("captured page lists are laid out by the library's own state, which this test has not")
    engine = engine_on_gpu(attncore_subject, "no graph can be captured")
    names = {"a": 1, "b": engine.block_size, "c": engine.block_size + 1}
    for name in names:
        engine.add(name, 4 * engine.block_size)
    engine.fill(names)
    scheduled = dict.fromkeys(names, 1)
    captured = planned(engine.backend, engine.builder.build(scheduled))
    captured.max_seq_len = engine.num_blocks * engine.block_size  # what is baked in must hold for every replay
    given = engine.on_device(engine.drawn.query_key_value(len(names)))
    graph, output = _captured(engine, len(names), lambda: engine.forward(given, captured))
    for name in names:  # the capture's step is in no history: take it back
        engine.batch.rollback(name, 1)
    for _ in range(engine.block_size + 1):
        step = engine.builder.build(scheduled)
        fresh = engine.drawn.query_key_value(len(names))
        for held, new in zip(given, fresh, strict=True):
            held.copy_(new)
        metadata = planned(engine.backend, step)
        for field in REFILLED:
            getattr(captured, field).copy_(getattr(metadata, field))
        graph.replay()
        requests = [StepRequest(name, 1, engine.context(name)) for name in step.req_ids]
        expected = [answer for answer, _ in engine.expected(fresh, requests)]
        compare(output.cpu(), expected, requests, engine)


def _captured(engine: Engine, num_reqs: int, forward: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of ``forward``, after a warm-up, and the tensor that its replays write."""
    state = engine.backend.get_state_cls()(engine.backend)
    with state.graph_capture(num_reqs):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output = forward()
    return graph, output
