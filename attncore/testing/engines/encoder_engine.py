"""The small engine for layers that are not causal: encoders, and decoder queries over the cached keys of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncore.abstract import AttentionType
from attncore.builder import CommonMetadataBuilder, InputBatch, KVCacheGroup, MetadataBuilder, SequenceGroup
from attncore.builder import Sequence as OneSequence
from attncore.testing.engines import planned_steps as steps
from attncore.testing.engines.compare import Row
from attncore.testing.engines.engine import Engine
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

LONGEST = 64  # tokens of a request, on the decoder's side


class EncoderRow(Row):
    """A row of a layer that is not causal: its tokens, and the encoder tokens that they see."""

    def __str__(self) -> str:
        return f"{self.tokens} queries over {self.context} encoder tokens"


class CrossEngine(Engine):
    """Requests with encoder tokens, whose keys lie in the cache, and steps of a layer of type ``encoder_decoder``.

    ``said`` are the encoder's keys and values. The blocks of the decoder's own cache are numbers only.
    """

    causal = False

    def __init__(self, backend: AttentionBackend, **given: Any) -> None:
        super().__init__(backend, attn_type=AttentionType.ENCODER_DECODER, **given)
        size = self.block_size
        groups = [
            KVCacheGroup("self", size),
            KVCacheGroup("cross", size, cross=True, num_blocks=self.num_blocks),
        ]
        longest = self.num_blocks * size
        self.batch = InputBatch(max_num_reqs=64, max_model_len=LONGEST, groups=groups, max_encoder_len=longest)
        self.builder = MetadataBuilder(self.batch, max_num_batched_tokens=64 * LONGEST, max_num_encoder_tokens=longest)
        self.lengths: dict[Any, int] = {}
        self.tables: dict[Any, list[int]] = {}
        self._decoder: tuple[Any, Any] | None = None

    def add(self, name: Any, tokens: int, **_: Any) -> None:
        """A request with ``tokens`` encoder tokens, and blocks for them."""
        cross = [self.free.pop() for _ in range(-(-tokens // self.block_size))]
        self.shared.update(dict.fromkeys(cross, 1))
        own = list(range(1, -(-LONGEST // self.block_size) + 1))
        self.batch.add_request(name, {"self": own, "cross": cross}, encoder_seq_len=tokens)
        self.lengths[name], self.tables[name] = tokens, cross

    def remove(self, name: Any) -> None:
        """The request leaves, and its blocks go back to the pool."""
        self.batch.remove_request(name)
        self.said.pop(name, None)
        del self.lengths[name]
        for block in self.tables.pop(name):
            self.shared[block] = 0
            self.written[block] = False
            self.free.insert(0, block)

    def cross_step(self, scheduled: Mapping[Any, int], *, extra: int = 0) -> Tensor:
        """A step of the persistent door; who runs for the first time has its encoder tokens computed in it."""
        names = dict.fromkeys(self.batch.req_ids, 0)
        step = self.builder.build({**names, **scheduled})
        rows = [(name, scheduled[name]) for name in step.req_ids]
        return self.run_rows(steps.planned(self.backend, step.groups["cross"]), rows, extra=extra)

    def cross_list_step(
        self, prompts: Mapping[Any, int], decodes: Sequence[Any], *, pad: int = -1, profiling: bool = False
    ) -> Tensor:
        """A step of the list door: tokens of prompts by request, whose encoder tokens are computed in it; decodes."""
        layout = "flash" if self.config.spec is None or "page_list" not in self.config.spec.needs else "flashinfer"
        builder = CommonMetadataBuilder(
            self.block_size, layout, encoder_decoder=True, max_seq_len_to_capture=self.num_blocks * self.block_size
        )
        groups = []
        rows = [*prompts.items(), *((name, 1) for name in decodes)]
        for index, (name, count) in enumerate(rows):
            is_prompt = name in prompts
            table, cross = (None, None) if profiling else ([1] * LONGEST, self.tables[name])
            sequence = OneSequence(index, count, 0 if is_prompt else 1, table)
            groups.append(SequenceGroup(is_prompt, [sequence], False, self.lengths[name], cross))
        metadata = steps.planned(self.backend, builder.build(groups, pad))
        if not profiling:
            self._decode_first(metadata)
        return self.run_rows(metadata, rows)

    def _decode_first(self, metadata: Any) -> None:
        """A decoder layer runs over the step before the cross layer, as in a model, with a cache of its own: what it
        keeps beside the metadata is not the cross layer's.
        """
        if self._decoder is None:
            cache = self.backend.allocate_kv_cache(self.num_blocks)
            self._decoder = self.backend.impl("layers.0.self", scale=0.25), cache
        layer, cache = self._decoder
        dtype = getattr(torch, self.config.dtype)
        query, key, value = (tensor.to(self.config.device, dtype) for tensor in self.tensors(metadata.num_tokens))
        layer.forward(query, key, value, cache, metadata)

    def run_rows(self, metadata: Any, members: Sequence[tuple[Any, int]], *, extra: int = 0) -> Tensor:
        """Run a step of (request, queries), and check the output and the cache."""
        host = metadata.host
        fresh_starts = host.encoder_query_start_loc.tolist()
        queries = sum(count for _, count in members)
        padded = max(queries, metadata.num_tokens)
        query = self._heads(padded + extra, "q")
        key, value = (self._heads(fresh_starts[-1], kind) for kind in ("kv", "v"))
        expected: list[tuple[Tensor, Tensor]] = []
        rows: list[Row] = []
        start = 0
        for index, (name, count) in enumerate(members):
            new = slice(fresh_starts[index], fresh_starts[index + 1])
            if new.start < new.stop or name not in self.said:
                self.said[name] = (key[new], value[new])
            expected.append(self.dense(query[start : start + count], *self.said[name]))
            rows.append(EncoderRow(name, count, len(self.said[name][0])))
            start += count
        answer = self.checked((query, key, value), metadata, host.cross_slot_mapping)
        self.compare(answer, expected, rows)
        return answer

    def forward(self, tensors: Iterable[Any], metadata: Any) -> Tensor:
        """As of any layer; without encoder tokens in the step, key and value are None."""
        query, key, value = tensors
        return super().forward((query, key, value) if len(key) else (query, None, None), metadata)


class EncoderEngine(Engine):
    """Rows of tokens that see one another, through a layer of type ``encoder`` or ``encoder_only``."""

    causal = False

    def __init__(self, backend: AttentionBackend, kind: str, **given: Any) -> None:
        super().__init__(backend, attn_type=AttentionType(kind), **given)
        self.kind = kind

    def encode(self, lengths: Sequence[int], *, cached: bool = False, extra: int = 0) -> Tensor:
        """A step of prompts of ``lengths`` tokens (for ``encoder``: whose encoders have so many tokens).

        ``cached`` hands a cache over, of which nothing may change.
        """
        spec, dtype = self.config.spec, getattr(torch, self.config.dtype)
        needs = set() if spec is None else spec.needs
        encoder = self.kind == "encoder"
        layout = "flashinfer" if "page_list" in needs and not encoder else "common"  # it knows of no encoders
        builder = CommonMetadataBuilder(self.block_size, layout, encoder_decoder=encoder)
        groups = [
            SequenceGroup(True, [OneSequence(i, 1 if encoder else n, 0, None)], False, n if encoder else None)
            for i, n in enumerate(lengths)
        ]
        metadata = steps.planned(self.backend, builder.build(groups))
        query, key, value = self.tensors(sum(lengths) + extra)
        expected: list[tuple[Tensor, Tensor]] = []
        rows: list[Row] = []
        start = 0
        for row, length in enumerate(lengths):
            tokens = slice(start, start + length)
            expected.append(self.dense(query[tokens], key[tokens], value[tokens]))
            rows.append(EncoderRow(row, length, length))
            start += length
        before = self.pages.snapshot()
        given = [tensor.to(self.config.device, dtype) for tensor in (query, key, value)]
        whole = self.kv_cache
        self.kv_cache = whole if cached else None
        try:
            answer = self.forward(given, metadata).cpu()
        finally:
            self.kv_cache = whole
        changed, stray = self.pages.changed(before)
        if stray or changed[: self.num_blocks].any():
            raise ConformanceError(f"a layer of type {self.kind} changed its cache, which holds another layer's keys")
        self.compare(answer, expected, rows)
        return answer
