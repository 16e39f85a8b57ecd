"""On a CUDA or ROCm device: a step's attention does not wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from attncore.testing.engines.run_batches import engine_on_gpu
from attncore.testing.engines.steps_on_device import planned
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import ConformanceError
from attncore.testing.harness.subject import Subject

__all__ = ["test_forward_does_not_wait_for_the_device"]
READ = (
    "block_table", "slot_mapping", "seq_lens", "query_start_loc", "positions", "paged_kv_indptr", "paged_kv_indices",
    "paged_kv_last_page_len", "seq_start_loc",
)  # fmt: skip
"""Fields that layers read: each goes to the device when it is first read."""


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


@covers("no synchronisation", gpu=True)
def test_forward_does_not_wait_for_the_device(attncore_subject: Subject) -> None:
    """A step of decodes and a prompt, after one to warm up, with torch's synchronisation check on."""
    engine = engine_on_gpu(attncore_subject, "nothing can be waited for")
    size = engine.block_size
    names = {"a": 1, "b": size, "c": 2 * size + 1}
    for name, context in names.items():
        engine.add(name, context + 4)
    engine.fill(names)
    scheduled = dict.fromkeys(names, 1) if "decode" in engine.phases else dict.fromkeys(names, 2)
    engine.step(scheduled)
    metadata = planned(engine.backend, engine.builder.build(scheduled))
    given = engine.on_device(engine.drawn.query_key_value(metadata.num_tokens))
    for field in READ:
        getattr(metadata, field)
    with _no_synchronisation():
        engine.forward(given, metadata)
