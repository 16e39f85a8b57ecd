"""Steps with prefills, padded to a number of tokens, as CUDA graphs between which attention runs eagerly."""

from __future__ import annotations

from typing import Any

import torch

from attncore.integrations.transformers import capture_between_attention


class MixedSteps:
    """A worker's steps of up to ``num_tokens`` tokens and ``num_rows`` requests."""

    def __init__(self, worker: Any, num_tokens: int, num_rows: int) -> None:
        lengths = (num_tokens, num_tokens, num_rows)
        self.inputs = [torch.zeros(length, dtype=torch.int64, device=worker.device) for length in lengths]
        pool = worker.mixed[0].graph.pool if worker.mixed else None
        self.graph = capture_between_attention(lambda: worker.logits(*self.inputs), worker.caches, pool=pool)

    def holds(self, metadata: Any) -> bool:
        """Whether the step fits in; not one of padded decodes, whose graph is of another kind."""
        return (
            not metadata.use_cuda_graph
            and metadata.num_tokens <= len(self.inputs[0])
            and len(metadata.logits_indices) <= len(self.inputs[2])
        )

    def run(self, metadata: Any, *step: torch.Tensor) -> torch.Tensor:
        """The logits of the step's rows, from its input ids, positions and logits indices."""
        for tensor, given in zip(self.inputs, step, strict=True):
            tensor[: len(given)] = given
        return self.graph.replay(metadata)[: len(step[2])]


if __name__ == "__main__":
    raise SystemExit("mixed_steps.py is a module; run generate.py beside it")
