"""What a step comes to for all causal layers of a generation: made by the first of them, good for the others.

A slice of a tensor costs the host microseconds, and a layer has few. Whatever is cut lies beside the metadata, and is
made again where the step is another one. A step of decodes is the same one as long as its tensors are (builders keep
their addresses, and make others where a size changes) and its longest length ends in the same block: so there is
nothing to make for most steps of an engine.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_flash.calls import Layer
from attn_flash.parts import Part, decoder_parts
from attn_flash.rows import Rows, rows_of


class Plan:
    """The parts of a step with their rows. Layers keep their calls by it: it holds nothing of theirs."""

    __slots__ = (
        "above", "arguments", "counts", "lengths", "longest", "ones", "parts", "shape", "single", "step", "table",
        "tokens",
    )  # fmt: skip

    def __init__(self, metadata: Any, block_size: int, layer: Layer, windowed: bool) -> None:
        self.table: Tensor = metadata.block_table
        self.lengths: Tensor = metadata.seq_lens
        self.counts = metadata.num_prefills, metadata.max_query_len, metadata.use_cuda_graph
        self.step: int | None = metadata.step if self.counts[0] and hasattr(metadata, "step") else None
        columns = -(-metadata.max_seq_len // block_size) or 1
        self.above, self.longest = (columns - 1) * block_size, columns * block_size
        parts = decoder_parts(metadata, block_size=block_size, together=layer.together, windowed=windowed)
        self.parts: list[tuple[Part, Rows]] = []
        for part in parts:
            if len(parts) == 1 and not self.counts[0]:  # all decodes: good for all lengths of the last block
                part = part._replace(max_seq_len=self.longest)
            narrow = layer.splits_by_width and part.entry == "decode" and not self.counts[2]
            needed = -(-part.max_seq_len // block_size) or 1
            self.parts.append((part, rows_of(metadata, part, columns=needed if narrow else None)))
        self.arguments = [layer.arguments(*each) for each in self.parts]
        """Of the parts' calls, as far as all layers share them."""
        part = self.parts[0][0]
        self.ones = len(parts) == 1 and part.query_len == 1
        self.single = part if len(parts) == 1 else None
        self.tokens = max(part.stop for part in parts)
        self.shape = (part.last - part.first, part.query_len)

    def good_for(self, metadata: Any) -> bool:
        """Whether the metadata's step is still what this was made for."""
        if self.lengths is not metadata.seq_lens or self.table is not metadata.block_table:
            return False
        if self.step is not None:  # a step with prefills of the persistent door
            return bool(self.step == metadata.step)
        if not self.above < metadata.max_seq_len <= self.longest:
            return False
        # With as many rows and tokens as then, and one a row, it is that again.
        return self.ones or self.counts == (metadata.num_prefills, metadata.max_query_len, metadata.use_cuda_graph)
