"""The small engine for layers of type ``encoder_decoder``: decoder queries over an encoder's keys in the cache."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attncore.abstract import AttentionType
from attncore.builder import CommonMetadataBuilder, InputBatch, KVCacheGroup, MetadataBuilder, SequenceGroup
from attncore.builder import Sequence as OneSequence
from attncore.testing.engines.compare import EncoderStepRequest, StepRequest
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.requests import MAX_REQUESTS, History
from attncore.testing.engines.steps_on_device import planned, reads_page_lists
from attncore.testing.harness.errors import may_be_refused

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend, AttentionImpl
    from attncore.builder import CommonAttentionMetadata

MAX_DECODER_TOKENS = 64  # of a request


class CrossEngine(Engine):
    """Requests with encoder tokens, whose keys lie in the cache of a KV-cache group of their own.

    ``history`` holds the encoder's keys and values. The blocks of the decoder's own cache are ids only.
    """

    causal = False

    def __init__(self, backend: AttentionBackend, **given: Any) -> None:
        super().__init__(backend, attn_type=AttentionType.ENCODER_DECODER, **given)
        size = self.block_size
        groups = [KVCacheGroup("self", size), KVCacheGroup("cross", size, cross=True, num_blocks=self.num_blocks)]
        longest = self.num_blocks * size
        self.batch = InputBatch(
            max_num_reqs=MAX_REQUESTS, max_model_len=MAX_DECODER_TOKENS, groups=groups, max_encoder_len=longest
        )
        self.builder = MetadataBuilder(
            self.batch, max_num_batched_tokens=MAX_REQUESTS * MAX_DECODER_TOKENS, max_num_encoder_tokens=longest
        )
        self.lengths: dict[Hashable, int] = {}
        self.tables: dict[Hashable, list[int]] = {}
        self._decoder: tuple[AttentionImpl, Any] | None = None

    def add(self, name: Hashable, tokens: int, **_: Any) -> None:
        """Add a request with ``tokens`` encoder tokens, and blocks for them."""
        self._require_length(tokens)
        cross = self.take_blocks(-(-tokens // self.block_size))
        own = list(range(1, -(-MAX_DECODER_TOKENS // self.block_size) + 1))
        self.batch.add_request(name, {"self": own, "cross": cross}, encoder_seq_len=tokens)
        self.lengths[name], self.tables[name] = tokens, cross

    def remove(self, name: Hashable) -> None:
        """Remove a request; its blocks go back to the pool."""
        self.batch.remove_request(name)
        self.history.pop(name, None)
        del self.lengths[name]
        for block in self.tables.pop(name):
            self.holders[block] = 0
            self.give_back(block)

    def cross_step(self, scheduled: Mapping[Any, int], *, extra: int = 0) -> Tensor:
        """A step of the persistent builder; a request's encoder tokens are computed in its first step."""
        step = self.builder.build(self.scheduled(dict(scheduled)))
        queries = [(name, scheduled[name]) for name in step.req_ids]
        return self.run_cross_step(planned(self.backend, step.groups["cross"]), queries, extra=extra)

    def cross_list_step(
        self, prompts: Mapping[Any, int], decodes: Sequence[Any], *, pad: int = -1, profiling: bool = False
    ) -> Tensor:
        """A step of the list builder: ``prompts`` with their numbers of tokens, whose encoder tokens are computed in
        it, then ``decodes``. RefusedStepError where the backend refuses it."""
        layout = "flashinfer" if reads_page_lists(self.config.spec) else "flash"
        builder = CommonMetadataBuilder(
            self.block_size, layout, encoder_decoder=True, max_seq_len_to_capture=self.num_blocks * self.block_size
        )
        groups = []
        queries = [*prompts.items(), *((name, 1) for name in decodes)]
        for index, (name, count) in enumerate(queries):
            is_prompt = name in prompts
            table, cross = (None, None) if profiling else ([1] * MAX_DECODER_TOKENS, self.tables[name])
            sequence = OneSequence(index, count, 0 if is_prompt else 1, table)
            groups.append(SequenceGroup(is_prompt, [sequence], False, self.lengths[name], cross))
        with may_be_refused():
            metadata = planned(self.backend, builder.build(groups, pad))
            if not profiling:
                self._run_decoder_layer(metadata)
            return self.run_cross_step(metadata, queries)

    def _run_decoder_layer(self, metadata: CommonAttentionMetadata) -> None:
        """Run a decoder layer with a cache of its own over the step, as a model does before its cross layer: what the
        backend keeps for that layer must not reach the cross layer."""
        if self._decoder is None:
            cache = self.backend.allocate_kv_cache(self.num_blocks)
            self._decoder = self.backend.impl("layers.0.self", scale=0.25), cache
        layer, cache = self._decoder
        query, key, value = self.on_device(self.drawn.query_key_value(metadata.num_tokens))
        layer.forward(query, key, value, cache, metadata)

    def run_cross_step(
        self, metadata: CommonAttentionMetadata, queries: Sequence[tuple[Hashable, int]], *, extra: int = 0
    ) -> Tensor:
        """Run a planned step of (request, number of queries), and check the output and the cache."""
        host = metadata.host
        new_starts = host.encoder_query_start_loc.tolist()
        num_queries = max(sum(count for _, count in queries), metadata.num_tokens)
        query = self.drawn.draw(num_queries + extra, "query")
        key, value = self.drawn.draw(new_starts[-1], "key"), self.drawn.draw(new_starts[-1], "value")
        self.fill_padding([query], sum(count for _, count in queries))
        expected: list[tuple[Tensor, Tensor]] = []
        requests: list[StepRequest] = []
        start = 0
        for index, (name, count) in enumerate(queries):
            new = slice(new_starts[index], new_starts[index + 1])
            if new.start < new.stop or name not in self.history:
                self.history[name] = History(key[new], value[new])
            expected.append(self.dense(query[start : start + count], *self.history[name]))
            requests.append(EncoderStepRequest(name, count, self.context(name)))
            start += count
        answer = self.checked_forward((query, key, value), metadata, host.cross_slot_mapping)
        self.compare(answer, expected, requests, query)
        return answer

    def forward(self, tensors: Iterable[Tensor], metadata: CommonAttentionMetadata) -> Tensor:
        """As of any layer; in a step without encoder tokens key and value are None."""
        query, key, value = tensors
        given: tuple[Any, Any, Any] = (query, key, value) if len(key) else (query, None, None)
        return super().forward(given, metadata)
