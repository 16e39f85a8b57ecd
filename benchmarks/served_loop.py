"""The stand-in engine of benchmarks/served_step.py: a loop over a batch and a builder, whose model only takes time."""

import itertools
import random
from functools import partial

import numpy as np
from gpu_work import CalledAgain

from attncore import InputBatch, MetadataBuilder

KINDS = ("decode", "named", "come and go", "chunk", "speculative")
DRAFTS, CHUNK, CHUNKS_OF_A_PROMPT = 3, 512, 4
LIFE = 64
"""Tokens that a request of the kind "come and go" runs on average."""


class Served:
    """A request: its tokens, how many of them are computed, and how many blocks it holds."""

    def __init__(self, context, temperature):
        self.tokens, self.computed, self.held, self.temperature = [5] * (context + 1), context, 0, temperature


class Loop:
    """``step`` runs one step of ``kind`` over ``rows`` requests, with a graph where the kind has one."""

    def __init__(self, kind, rows, backend, device, parts, args, graph_of):
        self.kind, self.device, self.parts, self.context = kind, device, parts, args.context
        self.query_len = 1 + DRAFTS if kind == "speculative" else 1
        self.block_size = backend.config.block_size
        longest = args.context + (args.steps * 2 + 100) * self.query_len + CHUNK * CHUNKS_OF_A_PROMPT
        more = kind == "chunk"
        self.batch = batch = InputBatch(max_num_reqs=rows + more, max_model_len=longest, block_size=self.block_size)
        self.builder = MetadataBuilder(
            self.batch, backend, max_num_batched_tokens=max(rows * self.query_len, 256) + CHUNK * more,
            decode_threshold=self.query_len, transport=args.transport,
        )  # fmt: skip
        self.columns = args.fields == "columns"
        if self.columns:
            self.input_ids = batch.token_column("input_ids", np.int64, width=self.query_len)
            self.temperature = batch.column("temperature", np.float32)
            self.builder.register_column(self.input_ids)
            self.builder.register_column(self.temperature)
        else:
            self.builder.register_field("input_ids", np.int64, "token", self._fill_input_ids)
            self.builder.register_field("temperature", np.float32, "request", self._fill_temperature)
        for name in ("add_request", "append_blocks_many", "remove_request", "rollback_many"):
            setattr(batch, name, parts.around(getattr(batch, name), "batch"))
        self.names, self.next_block = itertools.count(), 1
        self.requests, self.prompt = {}, None
        self.graph = self.sampled = None
        if not more and (self.query_len == 1 or backend.spec.cuda_graph == "always"):
            metadata = self.builder.capture(rows, self.query_len)
            self._model(metadata)
            self.graph = graph_of(lambda: self._captured(metadata), device)
            self.launched = CalledAgain(parts.around(partial(device.launch, self.graph.replay), "launch"))
        self.rows = rows
        for _ in range(rows):
            self._join()

    def _captured(self, metadata):
        metadata.record()
        self.sampled = self._model(metadata)

    def _model(self, metadata):
        """Takes as long as it does; its tokens are those of the step and a bit of everything that it reads."""
        self.device.spin()
        last = metadata.input_ids[metadata.logits_indices.long()]
        return (last + metadata.temperature.long() + metadata.seq_lens.long() * 0) % 31999 + 1

    def _fill_input_ids(self, metadata, out):
        parts = itertools.pairwise(metadata.host.query_start_loc.tolist())
        for name, (start, end), length in zip(metadata.req_ids, parts, metadata.host.seq_lens.tolist(), strict=False):
            out[start:end] = self.requests[name].tokens[length + start - end : length]

    def _fill_temperature(self, metadata, out):
        out[: len(metadata.req_ids)] = [self.requests[name].temperature for name in metadata.req_ids]

    def _blocks(self, count):
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def _join(self, context=None):
        request = Served(self.context - random.randrange(256) if context is None else context, 0.7)
        name = next(self.names)
        request.held = request.computed // self.block_size + 1
        self.batch.add_request(name, self._blocks(request.held), request.computed)
        self.requests[name] = request
        if self.columns:
            self.input_ids.give(name, request.tokens if context is None else [5] * (CHUNK * CHUNKS_OF_A_PROMPT))
            self.temperature[name] = request.temperature
        return name

    def _leave(self, name):
        self.batch.remove_request(name)
        del self.requests[name]

    def _grow(self, scheduled):
        """The requests' tokens, and their missing blocks: one call for all of them."""
        given = {}
        for name, count in scheduled.items():
            request = self.requests[name]
            request.tokens += [5] * (request.computed + count - len(request.tokens))  # drafts, or a prompt's next ones
            missing = -(-(request.computed + count) // self.block_size) - request.held
            if missing > 0:
                request.held += missing
                given[name] = self._blocks(missing)
        if given:
            self.batch.append_blocks_many(given)

    def _schedule(self):
        """Who runs how many tokens."""
        if self.kind == "come and go":
            for name in [name for name in self.requests if random.random() < 1 / LIFE]:
                self._leave(name)
                self._join()
        scheduled = dict.fromkeys(self.requests, self.query_len)
        if self.kind == "chunk":
            if self.prompt is None or self.requests[self.prompt].computed >= CHUNK * CHUNKS_OF_A_PROMPT:
                if self.prompt is not None:
                    self._leave(self.prompt)
                    del scheduled[self.prompt]
                self.prompt = self._join(0)
            scheduled[self.prompt] = CHUNK
        self._grow(scheduled)
        return scheduled

    def _build(self, scheduled, bucket):
        match self.kind:
            case "decode":
                return self.builder.build(bucket=bucket)
            case "speculative":
                return self.builder.build(query_len=self.query_len, bucket=bucket)
        return self.builder.build(scheduled, bucket=bucket)

    def step(self):
        with self.parts.part("schedule"):
            scheduled = self._schedule()
        metadata = self._build(scheduled, None if self.graph is None else self.rows)
        if self.graph is None:
            with self.parts.part("launch"):
                self.sampled = self.device.launch(self._model, metadata)
        else:
            metadata.replay(self.launched)
        with self.parts.part("wait"):
            tokens = self.device.tokens(self.sampled)
        if self.columns:
            with self.parts.part("fields"):
                self.input_ids.write(metadata, tokens)
        with self.parts.part("book"):
            self._book(scheduled, dict(zip(metadata.req_ids, tokens, strict=False)))

    def _book(self, scheduled, sampled):
        rejected = {}
        for name, count in scheduled.items():
            request = self.requests[name]
            if self.kind == "speculative":
                rejected[name] = random.randrange(count)
            request.computed += count - rejected.get(name, 0)
            del request.tokens[request.computed :]
            request.tokens.append(sampled[name])
        if rejected:
            self.batch.rollback_many(rejected)

    def close(self):
        if self.graph is not None:
            self.graph = self.launched = None
            self.builder.release(self.rows)
        self.builder.close()
