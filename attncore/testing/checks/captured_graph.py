"""On a CUDA or ROCm device: no hidden synchronisation in a step, and captured graphs where they are declared."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from attncore.testing.engines import planned_steps as steps
from attncore.testing.engines.compare import Row, compare
from attncore.testing.engines.engine import Engine
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import ConformanceError, UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = ["test_a_captured_graph_replays_with_new_lengths", "test_forward_does_not_wait_for_the_device"]


def _on_device(subject: Subject, otherwise: str) -> Engine:
    engine = Engine(subject.backend())
    if torch.device(engine.config.device).type != "cuda":
        raise UnsupportedError(f"the backend runs on {engine.config.device}, where {otherwise}")
    return engine


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" in str(error):
            raise ConformanceError(f"forward waits for the device: {error}") from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _tensors(engine: Engine, tokens: int) -> list[Any]:
    dtype = getattr(torch, engine.config.dtype)
    return [tensor.to(engine.config.device, dtype) for tensor in engine.tensors(tokens)]


@covers("no synchronisation", gpu=True)
def test_forward_does_not_wait_for_the_device(attncore_subject: Subject) -> None:
    """A step of decodes and a prompt, after one to warm up, with torch's synchronisation check on."""
    engine = _on_device(attncore_subject, "nothing can be waited for")
    size = engine.block_size
    names = {"a": 1, "b": size, "c": 2 * size + 1}
    for name, context in names.items():
        engine.add(name, context + 4)
    engine.fill(names)
    scheduled = dict.fromkeys(names, 1) if "decode" in engine.phases else dict.fromkeys(names, 2)
    engine.step(scheduled)
    metadata = steps.planned(engine.backend, engine.builder.build(scheduled))
    given = _tensors(engine, metadata.num_tokens)
    _ = metadata.block_table, metadata.slot_mapping, metadata.seq_lens, metadata.query_start_loc  # on the device now
    for name in ("positions", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "seq_start_loc"):
        getattr(metadata, name)
    with _no_synchronisation():
        engine.forward(given, metadata)


@covers("captured graph", gpu=True)
def test_a_captured_graph_replays_with_new_lengths(attncore_subject: Subject) -> None:
    """Decodes captured once, replayed after another plan with other lengths in the same tensors."""
    if attncore_subject.form.cuda_graph == "never":
        raise UnsupportedError("its spec says cuda_graph='never'")
    attncore_subject.require_phase("decode")
    if "page_list" in attncore_subject.form.needs:
        raise UnsupportedError("captured page lists are laid out by the library's own state, which this test has not")
    engine = _on_device(attncore_subject, "no graph can be captured")
    names = {"a": 1, "b": engine.block_size, "c": engine.block_size + 1}
    for name in names:
        engine.add(name, 4 * engine.block_size)
    engine.fill(names)
    scheduled = dict.fromkeys(names, 1)
    captured = steps.planned(engine.backend, engine.builder.build(scheduled))
    captured.max_seq_len = engine.num_blocks * engine.block_size  # what is baked in must hold for every replay
    given = _tensors(engine, 3)
    state = engine.backend.get_state_cls()(engine.backend)

    def forward() -> Any:
        return engine.forward(given, captured)

    with state.graph_capture(3):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output = forward()
    for name in names:  # the capture's step was never said: take it back
        engine.batch.rollback(name, 1)
    for _ in range(engine.block_size + 1):
        step = engine.builder.build(scheduled)
        fresh = _tensors(engine, 3)
        for held, new in zip(given, fresh, strict=True):
            held.copy_(new)
        metadata = steps.planned(engine.backend, step)
        for name in ("slot_mapping", "block_table", "seq_lens", "query_start_loc", "positions", "paged_kv_indptr"):
            getattr(captured, name).copy_(getattr(metadata, name))
        graph.replay()
        rows, expected = [], []
        for i, name in enumerate(step.req_ids):
            old = engine.said[name]
            new = [tensor[i : i + 1].float().cpu() for tensor in fresh]
            engine.said[name] = (torch.cat((old[0], new[1])), torch.cat((old[1], new[2])))
            rows.append(Row(name, 1, len(old[0])))
            expected.append(engine.dense(new[0], *engine.said[name])[0])
        compare(output.cpu(), expected, rows, engine)
