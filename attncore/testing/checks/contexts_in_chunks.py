"""Contexts in chunks: keys that no cache holds, those of a context and a step's own, attended in parts and merged."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from attncore.abstract import AttentionType
from attncore.builder import (
    CommonAttentionMetadata,
    ContextChunks,
    InputBatch,
    MetadataBuilder,
    context_chunk_metadata,
    context_chunks,
    new_tokens_metadata,
)
from attncore.merge import merge_attention
from attncore.testing.engines.compare import EncoderStepRequest, StepRequest
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.requests import History
from attncore.testing.engines.steps_on_device import planned, reads_page_lists
from attncore.testing.harness.covers import covers
from attncore.testing.harness.crossed import named
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = ["test_contexts_in_chunks"]
_BLOCKS = 10
"""Of a prompt, and enough where a block is one token."""
Part = tuple[Tensor, Tensor]
"""An output and its log-sum-exp."""


@covers("lse")
@pytest.mark.parametrize("workspace", ["of a block each", "of all"])
def test_contexts_in_chunks(attncore_subject: Subject, workspace: str) -> None:
    """A causal layer attends over new tokens of prompts, a cross layer over a chunk of their contexts: keys that are
    given, whether or not the layer's cache is. Each part is right, and merged they are attention over all keys."""
    for feature in ("lse", "encoder_decoder"):
        attncore_subject.require(feature)
    attncore_subject.require_phase("prefill")
    if reads_page_lists(attncore_subject.form):
        raise UnsupportedError("the keys of a chunk are in no page")
    for cached in (False, True):
        with named("the layer's cache given, which is neither written nor read") if cached else nullcontext():
            prompts = _Prompts(attncore_subject, cached=cached)
            chunks = prompts.chunks(3 if workspace == "of a block each" else 64)
            parts = [prompts.new_tokens(), *(prompts.chunk(chunks, index) for index in range(chunks.num_chunks))]
            prompts.check_merged(*merge_attention(*zip(*parts, strict=True)))


class _Prompts:
    """A step of four prompts: behind no context, behind one token, behind a block and behind more than two.

    ``cached``: layers are given their caches, full of NaN; None otherwise.
    """

    def __init__(self, subject: Subject, *, cached: bool) -> None:
        self.own = Engine(subject.backend(), with_lse=True, junk=math.nan)
        # A backend of its own, as docs/building-blocks.md has it: a plan is for all layers of a backend.
        across = subject.backend()
        self.across = Engine(across, with_lse=True, junk=math.nan, attn_type=AttentionType.ENCODER_DECODER)
        self.across.causal = False
        if not cached:
            self.own.kv_cache = self.across.kv_cache = None
        self.size = size = self.own.block_size
        tokens = {"new": 3, "short": size + 1, "block": 2, "long": 5}
        contexts = {"new": 0, "short": 1, "block": size, "long": 2 * size + 3}
        batch = InputBatch(max_num_reqs=len(tokens), max_model_len=_BLOCKS * size, block_size=size)
        for index, (name, context) in enumerate(contexts.items()):
            batch.add_request(name, list(range(1 + _BLOCKS * index, 1 + _BLOCKS * (index + 1))), context)
        built = MetadataBuilder(batch, max_num_batched_tokens=sum(tokens.values())).build(tokens)
        prefills = built.prefill_metadata
        assert prefills is not None
        self.step: CommonAttentionMetadata = prefills
        self.names = built.req_ids
        self.counts = [tokens[name] for name in self.names]
        bounds = itertools.pairwise(itertools.accumulate(self.counts, initial=0))
        self.tokens = [slice(*pair) for pair in bounds]
        self.tensors = self.own.drawn.query_key_value(sum(self.counts))
        drawn = self.across.drawn
        self.own.history = dict.fromkeys(self.names, History(drawn.draw(0, "key"), drawn.draw(0, "value")))
        self.contexts = [History(drawn.draw(contexts[n], "key"), drawn.draw(contexts[n], "value")) for n in self.names]

    def chunks(self, blocks: int) -> ContextChunks:
        host = self.step.host
        return context_chunks(host.block_table, host.context_lens, self.size, blocks * self.size)

    def new_tokens(self) -> Part:
        """The part of the step's own tokens, checked."""
        own, metadata = self.own, planned(self.own.backend, new_tokens_metadata(self.step))
        requests = [StepRequest(name, count, 0) for name, count in zip(self.names, self.counts, strict=True)]
        expected = own.expected(self.tensors, requests)
        answer = own.checked_forward(self.tensors, metadata, metadata.host.slot_mapping)
        own.compare(answer, expected, requests, self.tensors[0])
        part = self._part(own, answer)
        with named("write=False"):
            query, key, value = own.on_device(self.tensors)
            answer = own.impl.forward(query, key, value, own.kv_cache, metadata, write=False).cpu()
            own.lse = None
            own.compare(answer, expected, requests, self.tensors[0])
        return part

    def chunk(self, chunks: ContextChunks, index: int) -> Part:
        """The part of a chunk, checked."""
        across, query = self.across, self.tensors[0]
        metadata = planned(across.backend, context_chunk_metadata(self.step, chunks, index))
        starts, lens = chunks.chunk_starts[index].tolist(), chunks.chunk_seq_lens[index].tolist()
        seen = [
            History(*(part[start : start + length] for part in context))
            for context, start, length in zip(self.contexts, starts, lens, strict=True)
        ]
        requests: list[StepRequest] = [
            EncoderStepRequest(*one) for one in zip(self.names, self.counts, lens, strict=True)
        ]
        across.history = dict(zip(self.names, seen, strict=True))
        expected = [across.dense(query[tokens], *some) for tokens, some in zip(self.tokens, seen, strict=True)]
        keys, values = (torch.cat(parts) for parts in zip(*seen, strict=True))
        answer = across.checked_forward((query, keys, values), metadata, metadata.host.cross_slot_mapping)
        across.compare(answer, expected, requests, query)
        return self._part(across, answer)

    def check_merged(self, output: Tensor, lse: Tensor) -> None:
        own = self.own
        own.history = dict(zip(self.names, self.contexts, strict=True))
        requests = [
            StepRequest(name, count, own.context(name)) for name, count in zip(self.names, self.counts, strict=True)
        ]
        expected = own.expected(self.tensors, requests)
        own.lse = lse
        own.compare(output, expected, requests, self.tensors[0])

    @staticmethod
    def _part(engine: Engine, answer: Tensor) -> Part:
        assert engine.lse is not None
        return answer, engine.lse.cpu()
