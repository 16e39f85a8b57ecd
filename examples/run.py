"""What the engine has launched and not read yet: runs of steps, and the tokens that they sample on the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from request import Request


class Run:
    """One step, or ``num_steps`` that the device makes out of the first: who runs how many tokens in that one.

    A request that leaves is taken out of ``counts``; what was sampled for it is not read."""

    def __init__(self, counts: dict[Request, int]) -> None:
        self.counts, self.num_steps, self.tokens = counts, 1, Tokens(torch.empty(0, device="cpu"), None)
        self.ends = {request: request.launched + count for request, count in counts.items()}

    def launched(self, num_steps: int, tokens: Tokens) -> None:
        self.num_steps, self.tokens = num_steps, tokens
        for request, count in self.counts.items():
            request.launched = self.ends[request] = request.launched + count + num_steps - 1


class Tokens:
    """A copy of ``SampledTokens`` on its way to the host."""

    def __init__(self, copy: torch.Tensor, event: Any) -> None:
        self.copy, self.event = copy, event

    def tolist(self) -> list[list[int]]:
        """By place, and position modulo ``kept``; waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        return self.copy.tolist()


class SampledTokens:
    """The last ``kept`` tokens of each request that were sampled, on the device: what the next step's inputs are.

    A request has a place of its own, in the field ``place`` of each step, whatever its row; rows of padding have place
    0. The token of a position is at that position modulo ``kept``. Two copies may be on their way to the host."""

    def __init__(self, max_num_reqs: int, kept: int, device: str) -> None:
        on_gpu = device.startswith("cuda")
        self.kept, self.free = kept, list(range(max_num_reqs, 0, -1))
        self.ring = torch.zeros(max_num_reqs + 1, kept, dtype=torch.int64, device=device)
        said: Any = {"dtype": torch.int64, "device": "cpu", "pin_memory": on_gpu}
        copies = [torch.empty(self.ring.shape, **said) for _ in range(2)]
        self.copies = deque((copy, torch.cuda.Event() if on_gpu else None) for copy in copies)

    def inputs(self, metadata: Any) -> torch.Tensor:
        """The step's input ids: where the host has -1, since it does not know them yet, what was sampled."""
        ids, place = metadata.input_ids, metadata.place
        if metadata.max_query_len > 1:
            place = place[metadata.token_to_req_indices]
        return torch.where(ids < 0, self.ring[place, metadata.positions % self.kept], ids)

    def keep(self, metadata: Any, sampled: torch.Tensor) -> None:
        """Notes what a step has sampled: by row the token behind the step's."""
        behind = metadata.positions[self._rows(metadata)] + 1
        self.ring[metadata.place, behind % self.kept] = sampled

    @staticmethod
    def _rows(metadata: Any) -> Any:
        """Where the last token of each row is: everywhere in a step of decodes. A captured size of prompts may have as
        many tokens as rows."""
        return metadata.logits_indices if metadata.max_query_len > 1 else ...

    def fetch(self) -> Tokens:
        """Sends the host a copy, behind everything that was launched."""
        copy, event = self.copies[0]
        self.copies.rotate()
        copy.copy_(self.ring, non_blocking=True)
        if event is not None:
            event.record()
        return Tokens(copy, event)


if __name__ == "__main__":
    raise SystemExit("run.py is a module; run generate.py beside it")
