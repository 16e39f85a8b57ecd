"""A step's plan: the segments that it is cut into, and how the calls of a generation attend them.

A slice of a tensor costs the host microseconds, and a layer has few. So the first causal layer of a step makes its
plan, and the others find it in ``metadata.kept``. A plan of decodes outlasts its step: it is good as long as the
step's tensors are the same (builders keep their addresses, and make others where a size changes) and the longest
length ends in the same block. So there is nothing to make for most steps of an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_flash.generation2 import Call
from attn_flash.generation3 import StepArguments
from attn_flash.generations import Layer
from attn_flash.segments import Segment, decoder_segments
from attncore import AttentionMetadata

Caches = tuple[Tensor, Tensor] | None

LASTING = 8
"""Plans of decodes that are kept: those of a builder's arenas and sizes, and some that are over."""


class StepPlan:
    """The segments of a step, those of whole steps' tokens before ``decode``. Layers keep their calls by it: it holds
    nothing of theirs.
    """

    __slots__ = ("_arguments", "_tokens", "num_tokens", "packed", "segments", "single")

    lasts = False
    """Whether it may be good for a later step."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.single = len(segments) == 1
        self.packed = any(segment.entry == "packed" for segment in segments)
        """Whether a call attends over this step's own keys."""
        self.num_tokens = max(segment.stop for segment in segments)
        self._arguments: list[Any] = []
        self._tokens = [(segment.entry == "decode", segment.tokens) for segment in segments]

    def bound(self, layer: Layer, caches: Caches) -> tuple[Call, ...]:
        """The calls of a layer, one a segment: what ``attend`` takes."""
        if not self._arguments:  # all layers share them
            self._arguments = [layer.arguments(segment) for segment in self.segments]
        if self.single:
            return (layer.bound(self.segments[0], self._arguments[0], caches),)
        pairs = zip(self.segments, self._arguments, strict=True)
        return tuple([layer.bound(segment, arguments, caches) for segment, arguments in pairs])

    def renew(self) -> None:
        """Before it is used for a later step: what the layers share of a step alone is forgotten."""
        for arguments in self._arguments:
            if isinstance(arguments, StepArguments):
                arguments.renew()

    def attend(self, calls: Sequence[Call], query: Tensor, key: Any, value: Any) -> Tensor:
        """The output of all segments, (tokens of ``query``, heads, head size): the library's own tensor where there is
        one segment. What belongs to none may hold anything. A single segment's query has its tokens alone
        (``without_padding``).
        """
        if self.single:
            return calls[0](query, key, value)
        output: Tensor | None = None
        for call, (decode, tokens) in zip(calls, self._tokens, strict=True):
            if decode:
                found = call(query[tokens], key, value)
            else:
                found = call(query, key, value)
                if output is None:  # filled up with the other segments
                    output = found
                    continue
                found = found[tokens]
            if output is None:
                output = found.new_empty((len(query), *found.shape[1:]))
            output[tokens] = found
        if output is None:
            raise ValueError("metadata: a step of no rows")
        return output

    def attend_with_lse(
        self, layer: Layer, caches: Caches, tensors: tuple[Tensor, Any, Any], places: Any
    ) -> tuple[Tensor, Tensor]:
        """``attend``, and the log-sum-exp (tokens, heads); ``tensors`` are query, key and value."""
        query, key, value = tensors
        if self.single:
            return layer.with_lse(self.segments[0], caches, tensors, places)
        output: Tensor | None = None
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        for segment in self.segments:
            mine = segment.tokens
            if segment.entry == "decode":
                found, found_lse = layer.with_lse(segment, caches, (query[mine], key, value), places)
            else:
                found, found_lse = layer.with_lse(segment, caches, tensors, places)
                found, found_lse = found[mine], found_lse[mine]
            if output is None:
                output = found.new_empty((len(query), *found.shape[1:]))
            output[mine], lse[mine] = found, found_lse
        if output is None:
            raise ValueError("metadata: a step of no rows")
        return output, lse

    def without_padding(self, query: Tensor) -> Tensor:
        """``query`` as ``attend`` takes it: a call of ``decode`` takes the segment's tokens alone."""
        if self.single and self.segments[0].entry == "decode" and len(query) != self.num_tokens:
            return query[: self.num_tokens]
        return query

    def with_a_key_each(self, layer: Layer) -> StepPlan | None:
        """A plan whose rows have one key at least where ``layer`` takes none without keys; None where it takes all."""
        takes = layer.rows_without_keys
        if all(segment.entry in takes for segment in self.segments):
            return None
        return StepPlan([one if one.entry in takes else one.with_a_key_each() for one in self.segments])


class DecoderPlan(StepPlan):
    """The plan of a step in causal layers."""

    __slots__ = ("_above", "_counts", "_lengths", "_longest", "_one_token_each", "_table", "lasts")

    def __init__(
        self, metadata: AttentionMetadata, block_size: int, layer: Layer, *, windowed: bool, write: bool = True
    ) -> None:
        self._table, self._lengths = metadata.block_table, metadata.seq_lens
        self._counts = metadata.max_query_len, metadata.use_cuda_graph
        self.lasts = not metadata.num_prefills and self._table.shape[1] > 0
        columns = -(-metadata.max_seq_len // block_size) or 1
        self._above, self._longest = (columns - 1) * block_size, columns * block_size
        segments = []
        for segment in decoder_segments(
            metadata, block_size=block_size, together=layer.together, windowed=windowed, cached=not write
        ):
            if self.lasts:  # all decodes: good for all lengths of the last block
                segment = segment._replace(max_seq_len=self._longest)
            if segment.entry == "decode" and not metadata.use_cuda_graph:
                if layer.splits_by_width:
                    segment = segment.with_columns(-(-segment.max_seq_len // block_size) or 1)
            elif segment.query_len > 1 and layer.captured_by_starts:
                segment = segment._replace(entry="paged")
            segments.append(segment)
        super().__init__(segments)
        self._one_token_each = self.single and segments[0].query_len == 1

    def good_for(self, metadata: AttentionMetadata) -> bool:
        """Whether a later step of the same tensors is still what this was made for."""
        if metadata.num_prefills or not self._above < metadata.max_seq_len <= self._longest:
            return False
        if metadata.num_tokens != self.num_tokens:  # of adopted steps, whose rows may have more tokens than last time
            return False
        # With as many rows and tokens as then, and one a row, it is that again.
        return self._one_token_each or self._counts == (metadata.max_query_len, metadata.use_cuda_graph)


class DecoderPlans:
    """The plans that the causal layers of a backend share: those with a window (``windowed``), or those without; those
    that ``write``, whose prompts read the step's own keys, or those that find all in the cache.
    """

    def __init__(self, block_size: int, *, windowed: bool, write: bool = True) -> None:
        self._block_size, self._windowed, self._write = block_size, windowed, write
        self._lasting: dict[tuple[int, int], DecoderPlan] = {}
        """By the addresses of their lengths and tables, which they keep alive."""

    def reused(self, metadata: AttentionMetadata) -> DecoderPlan | None:
        """The plan of an earlier step that is good for this one, which it is kept with; None where there is none."""
        plan = self._lasting.get((id(metadata.seq_lens), id(metadata.block_table)))
        if plan is None or not plan.good_for(metadata):
            return None
        plan.renew()
        metadata.kept[self] = plan
        return plan

    def plan(self, metadata: AttentionMetadata, layer: Layer) -> DecoderPlan:
        """The plan of a step: the one that is kept with it, one of an earlier step, or a new one."""
        found: DecoderPlan | None = metadata.kept.get(self) or self.reused(metadata)
        if found is not None:
            return found
        plan = DecoderPlan(metadata, self._block_size, layer, windowed=self._windowed, write=self._write)
        metadata.kept[self] = plan
        if plan.lasts:
            place = id(metadata.seq_lens), id(metadata.block_table)
            self._lasting.pop(place, None)
            if len(self._lasting) >= LASTING:
                del self._lasting[next(iter(self._lasting))]
            self._lasting[place] = plan
        return plan
