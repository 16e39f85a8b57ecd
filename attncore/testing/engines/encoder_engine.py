"""The small engine for layers of type ``encoder`` and ``encoder_only``: not causal, without a cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attncore.abstract import AttentionType
from attncore.builder import CommonMetadataBuilder, InputBatch, KVCacheGroup, MetadataBuilder, SequenceGroup
from attncore.builder import Sequence as OneSequence
from attncore.testing.engines.compare import EncoderStepRequest, StepRequest
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.metadata_snapshot import MetadataSnapshot
from attncore.testing.engines.requests import History
from attncore.testing.engines.steps_on_device import planned, reads_page_lists
from attncore.testing.harness.errors import ConformanceError, RefusedStepError, may_be_refused

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend
    from attncore.builder import CommonAttentionMetadata


class EncoderEngine(Engine):
    """Requests whose tokens see one another, through a layer of type ``attn_type``."""

    causal = False

    def __init__(self, backend: AttentionBackend, attn_type: str, **given: Any) -> None:
        super().__init__(backend, attn_type=AttentionType(attn_type), **given)
        self.attn_type = attn_type

    def encode(
        self, lengths: Sequence[int], *, cached: bool = False, extra: int = 0, persistent: bool = False
    ) -> Tensor:
        """A step of prompts of ``lengths`` tokens (for ``encoder``: prompts whose encoders have so many tokens).

        With ``cached`` the layer is handed a cache, of which nothing may change. The step is the list builder's, or the
        ``persistent`` one's, in which rows have tables and slots, those of decoder layers beside this one; that, too,
        where the backend refuses the list builder's.
        """
        self._require_length(max(lengths, default=0))
        if not persistent:
            with suppress(RefusedStepError), may_be_refused():
                return self._encode(self._of_a_list(lengths), lengths, cached=cached, extra=extra)
        return self._encode(*self._of_a_batch(lengths), cached=cached, extra=extra)

    def _encode(self, step: CommonAttentionMetadata, lengths: Sequence[int], *, cached: bool, extra: int) -> Tensor:
        metadata = planned(self.backend, step)
        query, key, value = self.drawn.query_key_value(sum(lengths) + extra)
        self.fill_padding((query, key, value), sum(lengths))
        expected: list[tuple[Tensor, Tensor]] = []
        requests: list[StepRequest] = []
        start = 0
        for name, length in enumerate(lengths):
            tokens = slice(start, start + length)
            self.history[name] = History(key[tokens], value[tokens])
            expected.append(self.dense(query[tokens], *self.history[name]))
            requests.append(EncoderStepRequest(name, length, length))
            start += length
        before, fields = self.cache_view.snapshot(), MetadataSnapshot(metadata)
        whole = self.kv_cache
        self.kv_cache = whole if cached else None
        try:
            answer = self.called(self.on_device((query, key, value)), metadata)
        finally:
            self.kv_cache = whole
        fields.check("forward")
        changed, stray = self.cache_view.changed(before)
        if stray or changed[: self.num_blocks].any():
            raise ConformanceError(
                f"a layer of type {self.attn_type} changed its cache, which holds another layer's keys"
            )
        self.compare(answer, expected, requests, query)
        return answer

    def _of_a_list(self, lengths: Sequence[int]) -> CommonAttentionMetadata:
        encoder = self.attn_type == "encoder"
        # the layout flashinfer has no encoder fields
        layout = "flashinfer" if reads_page_lists(self.config.spec) and not encoder else "common"
        builder = CommonMetadataBuilder(self.block_size, layout, encoder_decoder=encoder)
        return builder.build([
            SequenceGroup(True, [OneSequence(i, 1 if encoder else n, 0, None)], False, n if encoder else None)
            for i, n in enumerate(lengths)
        ])  # fmt: skip

    def _of_a_batch(self, lengths: Sequence[int]) -> tuple[CommonAttentionMetadata, list[int]]:
        """The step, and the lengths in the order of its rows."""
        encoder, size, longest, tokens = self.attn_type == "encoder", self.block_size, max(lengths), sum(lengths)
        groups = [KVCacheGroup("own", size), *([KVCacheGroup("cross", size, cross=True)] if encoder else [])]
        batch = InputBatch(
            max_num_reqs=len(lengths), max_model_len=longest, max_encoder_len=longest if encoder else None,
            groups=groups,
        )  # fmt: skip
        held: dict[Hashable, int] = dict(enumerate(lengths))
        for name, count in held.items():
            blocks = {group.name: list(range(1, -(-longest // size) + 1)) for group in groups}
            batch.add_request(name, blocks, encoder_seq_len=count if encoder else 0)
        builder = MetadataBuilder(
            batch, max_num_batched_tokens=tokens, max_num_encoder_tokens=tokens if encoder else None
        )
        step = builder.build(dict.fromkeys(held, 1) if encoder else held)
        return step.groups["cross" if encoder else "own"], [held[name] for name in step.req_ids]
