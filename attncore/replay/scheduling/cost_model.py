"""CostModel: what a step is taken to cost in virtual time, so that a replay depends on no machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from attncore.arguments import real_number
from attncore.quoted import quoted

MAX_COST = 1e9  # microseconds: no model takes a quarter of an hour for one token


@dataclass(frozen=True)
class CostModel:
    """Microseconds of virtual time: each step, each prompt token computed, each decode, each token of context read.

    The defaults have the order of magnitude of an 8-billion-parameter model on one datacentre GPU.
    """

    step: float = 6000.0
    prefill: float = 30.0
    decode: float = 30.0
    context: float = 0.04

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """The model that ``step=6000,prefill=30`` states; parts not named keep their defaults.

        Raises ValueError, beginning with ``clock``, for an unknown part and for a cost outside 0 .. ``MAX_COST``.
        """
        names = [field.name for field in fields(cls)]
        costs: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            name = name.strip()
            if name not in names:
                raise ValueError(f"clock: {quoted(part)} is not NAME=MICROSECONDS with a name of {', '.join(names)}")
            if name in costs:
                raise ValueError(f"clock: {name} is given twice")
            try:
                cost = real_number(value.strip())
            except ValueError:
                cost = -1.0
            if not 0 <= cost <= MAX_COST:
                raise ValueError(
                    f"clock: {name} is {quoted(value)}, not a number of microseconds from 0 to {MAX_COST:g}"
                )
            costs[name] = cost
        return cls(**costs)

    def seconds(self, prefill_tokens: int, decodes: int, context_tokens: int) -> float:
        """How long one step takes; ``context_tokens`` is the sum of its requests' lengths."""
        tokens = self.prefill * prefill_tokens + self.decode * decodes + self.context * context_tokens
        return (self.step + tokens) * 1e-6

    def __str__(self) -> str:
        return ",".join(f"{name}={cost:.15g}" for name, cost in asdict(self).items())
