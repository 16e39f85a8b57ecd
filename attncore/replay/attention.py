"""The model of a replay: nothing but its attention layers, each with a paged cache of its own."""

from __future__ import annotations

from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from attncore.replay.content import content_ids, own_content

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from attncore.replay.content import Content
    from attncore.replay.scheduler import Step


class AttentionLayers:
    """``num_layers`` layers of ``backend``, fed with ``content``. Importing this module needs no torch, using it does.

    Raises ValueError beginning with ``num_blocks`` where the caches do not fit in memory.
    """

    def __init__(self, backend: Any, content: Content, num_layers: int, num_blocks: int) -> None:
        import torch

        self.backend = backend
        self.content = content
        self.scale = content.head_size**-0.5
        self.impls = [backend.impl(f"layers.{layer}", scale=self.scale) for layer in range(num_layers)]
        try:
            self.kv_caches = [backend.allocate_kv_cache(num_blocks) for _ in self.impls]
        except (RuntimeError, MemoryError) as error:  # torch raises the first
            raise ValueError(
                f"num_blocks: {num_layers} caches of {num_blocks} blocks of {backend.config.block_size} do not fit in "
                f"memory ({str(error).splitlines()[0][:120]}); pass a smaller --num-blocks"
            ) from error
        self._dtype = getattr(torch, backend.config.dtype)
        self._inference_mode = torch.inference_mode

    @property
    def num_layers(self) -> int:
        return len(self.impls)

    def forward(self, step: Step, metadata: Any) -> tuple[list[Any], int]:
        """Each layer's output ``(num_tokens, num_heads, head_size)``, and the nanoseconds that all layers took.

        Positions are the metadata's, as in an engine: where they are wrong, so is what comes out.
        """
        positions = metadata.host.positions
        ids = step_content(step, metadata)
        outputs, elapsed = [], 0
        with self._inference_mode():
            for layer, (impl, kv_cache) in enumerate(zip(self.impls, self.kv_caches, strict=True)):
                query, key, value = (
                    self.backend.from_host(part).to(self._dtype) for part in self.content.tokens(ids, positions, layer)
                )
                start = perf_counter_ns()
                outputs.append(impl.forward(query, key, value, kv_cache, metadata))
                elapsed += perf_counter_ns() - start
        return outputs, elapsed


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch computes with ``count`` threads meanwhile.

    Replay's default is 1: a decode step is many small operations, whose threads wait for each other longer than they
    compute, much longer on a busy machine; and sums come out the same however many cores there are.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def step_content(step: Step, metadata: Any) -> npt.NDArray[np.int64]:
    """The content id of each of the step's tokens, int64, in the order of ``metadata``."""
    host = metadata.host
    own = np.array([own_content(row) for row in metadata.req_ids], dtype=np.int64)
    ids: npt.NDArray[np.int64] = own[host.token_to_req_indices]
    shared = [(running, count) for running, count in step.prefills if running.request.hash_ids is not None]
    if shared:
        index_of = {row: index for index, row in enumerate(metadata.req_ids)}
        for running, count in shared:
            start = int(host.query_start_loc[index_of[running.row]])
            ids[start : start + count] = content_ids(running.request, running.computed, running.computed + count)
    return ids
