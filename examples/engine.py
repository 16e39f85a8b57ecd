"""A continuous-batching engine: decoder models of transformers, over attncore's metadata and an attention backend.

`generate` yields tokens as they come, or text for a prompt in words; `generate.py` runs it from the command line.
Requests arrive at any time; each step runs what is there: prompts in chunks, decodes one token each. Blocks of a prompt
that were computed once are used again. Where the pool is exhausted the youngest request gives its blocks back and is
computed again later. Steps of decodes run in CUDA graphs where there is a GPU. Sampling is greedy at temperature 0.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
import operator
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from block_pool import BlockPool
from request import Request

from attncore import AttentionRequest, AttentionType, InputBatch, MetadataBuilder
from attncore.did_you_mean import did_you_mean
from attncore.graphs import capturing, new_graph
from attncore.integrations.transformers import attention_layers, attncore_context, paged_caches, select_for_model


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch computes with ``count`` threads meanwhile.

    A decode step is many small operations. Threads that wait for each other take longer than one alone, and on a busy
    machine many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Engine:
    """``generate`` and ``complete`` run prompts: lists of token ids, or texts where there is a ``tokenizer``.

    Or ``add_request`` and ``cancel`` between steps; ``step`` runs one and returns the requests that it finished.
    ``threads`` are torch's on a CPU.

    Where a step fails, its requests run again, one at a time, past the tokens that they failed at. One that fails alone
    is dropped: ``step`` returns it with its ``error``, and all others finish."""

    def __init__(
        self, model: Any, *, num_blocks: int = 512, max_num_reqs: int = 64, max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None, graph_sizes: tuple[int, ...] | None = None, seed: int = 0, threads: int = 1,
        tokenizer: Any = None, **wanted: Any,
    ) -> None:  # fmt: skip
        if operator.index(threads) < 1:
            raise ValueError(f"threads: {threads} is below 1; torch needs one at least")
        known = {*inspect.signature(Engine).parameters, *(one.name for one in dataclasses.fields(AttentionRequest))}
        if strange := [name for name in wanted if name not in known]:
            raise TypeError(f"{strange[0]}: Engine has no such argument{did_you_mean(strange[0], known)}")
        self.model, self.device, self.tokenizer, self.threads = model.eval(), str(model.device), tokenizer, threads
        if graph_sizes is None:
            graph_sizes = (1, 2, 4, *range(8, max_num_reqs + 8, 8)) if self.device.startswith("cuda") else ()
        layers, level = attention_layers(model), "uniform_decode" if graph_sizes else "never"
        if any(layer.attn_type is not AttentionType.DECODER for layer in layers):
            raise ValueError(f"model: {type(model).__name__} is an encoder and says no next token; give a decoder")
        if (max_model_len or 0) > (longest := model.config.get_text_config().max_position_embeddings):
            raise ValueError(f"max_model_len: {max_model_len} given; the model has {longest} positions: give no more")
        self.choice = select_for_model(model, layers=layers, num_blocks=num_blocks, **{"cuda_graph": level, **wanted})
        self.backend = self.choice.create(self.device)
        self.caches = paged_caches(model, self.backend, num_blocks, layers=layers)
        self.max_model_len = max_model_len or longest
        limits = {"max_num_reqs": max_num_reqs, "max_model_len": self.max_model_len, "num_blocks": num_blocks}
        self.batch = InputBatch(block_size=self.choice.block_size, **limits)
        self.builder = MetadataBuilder(self.batch, self.backend, max_num_batched_tokens=max_num_batched_tokens)
        # Ride to the device in the metadata's own arena, by row: no copy and no loop of their own.
        self.input_ids = self.batch.token_column("input_ids", np.int64)
        self.temperature = self.batch.column("temperature", np.float32)
        self.builder.register_column(self.input_ids)
        self.builder.register_column(self.temperature)
        self.pool, self.block_size = BlockPool(num_blocks), self.choice.block_size
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # in order of arrival: the last one is the youngest
        self.suspects: dict[Request, int] = {}  # of a step that failed: run alone until so many tokens are computed
        self.preemptions, self._ids = 0, itertools.count()
        self.vocab_size = model.get_input_embeddings().num_embeddings
        torch.manual_seed(seed)
        model.set_attn_implementation("attncore")
        self.graphs = {n: self._captured(n) for n in sorted({min(n, max_num_reqs) for n in graph_sizes}, reverse=True)}

    def add_request(self, prompt: list[int] | str, max_new_tokens: int, **sampling: Any) -> Request:
        """Queues a request, with ``temperature`` and ``stop`` tokens (of a text: its tokenizer's end, unless given).
        ValueError where it can never run."""
        self.waiting.append(request := self._request(prompt, max_new_tokens, **sampling))
        return request

    def _request(
        self, prompt: Any, max_new_tokens: int, *, temperature: float = 0.0, stop: tuple[int, ...] | None = None
    ) -> Request:
        decode = None
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("prompt: text, and the engine has no tokenizer; make it with one, or give token ids")
            how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
            decode = functools.partial(self.tokenizer.decode, **how)
            stop = (self.tokenizer.eos_token_id,) if stop is None and self.tokenizer.eos_token_id is not None else stop
            prompt = self.tokenizer.encode(prompt)
        prompt, ends = self._tokens("prompt", prompt), self._tokens("stop", stop or ())
        longest = len(prompt) + operator.index(max_new_tokens)
        if not prompt or max_new_tokens < 1:
            raise ValueError(f"prompt: {len(prompt)} tokens, max_new_tokens: {max_new_tokens}; give at least one each")
        if not 0 <= temperature <= float(np.finfo(np.float32).max):  # which it is sent to the device as
            raise ValueError(f"temperature: {temperature}; give 0 for greedy decoding, or a positive float32")
        if longest > self.max_model_len:
            raise ValueError(f"prompt: {longest} tokens with max_new_tokens exceed max_model_len {self.max_model_len}")
        if -(-longest // self.block_size) > self.pool.num_blocks - 1:
            raise ValueError(f"prompt: {longest} tokens need more than the pool's {self.pool.num_blocks - 1} blocks")
        return Request(
            next(self._ids), prompt, len(prompt), max_new_tokens, temperature, frozenset(ends), decode=decode
        )

    def _tokens(self, name: str, given: Any) -> list[int]:
        """Token ids as ints; a wrong one would fail in the model, in the middle of everybody's step."""
        try:
            tokens = [operator.index(token) for token in given]
        except TypeError as error:
            raise TypeError(f"{name}: {error}; give a list of token ids") from None
        if wrong := [str(token)[:40] for token in tokens if not 0 <= token < self.vocab_size]:
            raise ValueError(f"{name}: token {wrong[0]} is outside 0..{self.vocab_size - 1}, the vocabulary")
        return tokens

    def cancel(self, request: Request) -> None:
        """Forgets a request, running, waiting or finished."""
        self.suspects.pop(request, None)
        if request.id in self.running:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def generate(self, prompts: Any, max_new_tokens: int, **sampling: Any) -> Iterator[tuple[int, Any]]:
        """``(number of its prompt, token)`` for every new token, as it comes; a piece of text for a prompt in words.

        ValueError at once, with none queued, where one can never run; the error of one that is dropped, at the end.
        Who stops reading cancels what still runs."""
        if isinstance(prompts, str):
            raise TypeError("prompts: one text; give a list of them")  # else each letter would be a prompt
        prompts = list(prompts)
        if prompts and all(isinstance(prompt, int | np.integer) for prompt in prompts):
            raise TypeError("prompts: the token ids of one prompt; give a list of prompts, such as [[1, 2, 3]]")
        return self._streamed([self._request(prompt, max_new_tokens, **sampling) for prompt in prompts])

    def _streamed(self, requests: list[Request]) -> Iterator[tuple[int, Any]]:
        self.waiting += requests
        try:
            running = True
            while running:
                self.step()
                # Asked before what came is read: a reader may run steps of other requests, and of these, meanwhile.
                running = bool(self.waiting or self.running) and not all(one.finished or one.error for one in requests)
                for number, request in enumerate(requests):
                    yield from ((number, piece) for piece in request.news())
        finally:
            for request in requests:
                self.cancel(request)
        if error := next((request.error for request in requests if request.error), None):
            raise error

    def complete(self, prompts: Any, max_new_tokens: int, **sampling: Any) -> list[Any]:
        """The whole output of each prompt, token ids or text, and otherwise as ``generate``."""
        prompts = prompts if isinstance(prompts, str) else list(prompts)
        outputs: list[list[Any]] = [[] for _ in prompts]
        for number, piece in self.generate(prompts, max_new_tokens, **sampling):
            outputs[number].append(piece)
        return ["".join(out) if isinstance(one, str) else out for one, out in zip(prompts, outputs, strict=True)]

    def close(self) -> None:
        """Gives the memory of graphs and caches back; nothing runs afterwards."""
        while self.graphs:
            self.builder.release(self.graphs.popitem()[0])
        self.builder.close()
        self.caches = None

    def step(self) -> list[Request]:
        """Schedules, runs and books one step."""
        if not (scheduled := self._schedule()):
            return []
        fitting = self.graphs if max(scheduled.values()) == 1 else ()
        size = min((size for size in fitting if size >= len(scheduled)), default=None)
        try:
            metadata = self.builder.build({name: scheduled.get(name, 0) for name in self.running}, bucket=size)
            if size is None:
                sampled = self._forward(metadata)
            else:
                graph, sampled = self.graphs[size]
                metadata.replay(graph)
            tokens = sampled.tolist()
            self.input_ids.write(metadata, tokens)  # the next one of each: what a prompt has left goes before it
        except BaseException as error:  # the batch counts tokens that were not computed
            failed = {self.running[name]: self.running[name].computed + scheduled[name] for name in scheduled}
            self._begin_again()
            if not isinstance(error, Exception):
                raise
            return self._suspect(failed, error)
        try:
            return self._book(scheduled, dict(zip(metadata.req_ids, tokens, strict=False)))
        except BaseException:  # Ctrl-C: of some, tokens are counted and not there
            self._begin_again()
            raise

    def _begin_again(self) -> None:
        for request in reversed(list(self.running.values())):
            self._leave(request, again=True)

    def _suspect(self, failed: dict[Request, int], error: Exception) -> list[Request]:
        """Has the requests of a failed step run alone; one that did is dropped, and returned."""
        self.suspects |= failed
        if len(failed) > 1:
            logging.getLogger(__name__).warning("%d requests failed; each runs alone now", len(failed), exc_info=error)
            return []
        for request in failed:
            request.error = error
            self.cancel(request)
        return [*failed]

    def _schedule_alone(self, request: Request) -> dict[int, int]:
        """A step of one request. Blocks that it lacks are those of requests that run, which wait for it anyway."""
        count = min(len(request.tokens) - request.computed, self.builder.max_num_batched_tokens)
        while not (self._grow(request, count) if request.id in self.running else self._admit(request)):
            self._leave(next(one for one in reversed(self.running.values()) if one is not request), again=True)
        if request in self.waiting:
            self.waiting.remove(request)
            count = min(len(request.tokens) - request.computed, count)  # a part of it may have been there already
        return {request.id: count}

    def _schedule(self) -> dict[int, int]:
        """Tokens of this step by request: first of those that run, in order of arrival, then of new ones."""
        if self.suspects:
            return self._schedule_alone(next(iter(self.suspects)))
        scheduled: dict[int, int] = {}
        budget, preemptions = self.builder.max_num_batched_tokens, self.preemptions
        for request in list(self.running.values()):
            count = min(len(request.tokens) - request.computed, budget)
            while request.id in self.running and not self._grow(request, count):
                youngest = next(reversed(self.running.values()))
                budget += scheduled.pop(youngest.id, 0)
                self._leave(youngest, again=True)
                self.preemptions += 1
            if request.id in self.running and count:  # else preempted by one that is older, or nothing is left
                scheduled[request.id] = count
                budget -= count
        if self.preemptions > preemptions:
            return scheduled  # whoever lost its blocks in this step does not come back in it
        while self.waiting and budget and len(self.running) < self.batch.max_num_reqs and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            scheduled[request.id] = count = min(len(request.tokens) - request.computed, budget)
            budget -= count
        return scheduled

    def _admit(self, request: Request) -> bool:
        """Gives a request blocks for all its tokens, those of a prefix that is there already; False: too few are."""
        keys = (request.key(i, self.block_size) for i in range((len(request.tokens) - 1) // self.block_size))
        shared = list(itertools.takewhile(bool, map(self.pool.share, keys)))  # one token is computed
        own = self.pool.take(-(-len(request.tokens) // self.block_size) - len(shared))
        if own is None:
            self.pool.give_back(shared)
            return False
        request.blocks, request.computed = shared + own, len(shared) * self.block_size
        self.batch.add_request(request.id, request.blocks, request.computed)
        self.input_ids.give(request.id, request.tokens)
        self.temperature[request.id] = request.temperature
        self.running[request.id] = request
        return True

    def _grow(self, request: Request, count: int) -> bool:
        """Blocks for the next ``count`` tokens; False where the pool has too few."""
        missing = -(-(request.computed + count) // self.block_size) - len(request.blocks)
        blocks = self.pool.take(missing) if missing > 0 else []
        if blocks:
            request.blocks += blocks
            self.batch.append_blocks(request.id, blocks)
        return blocks is not None

    def _leave(self, request: Request, again: bool = False) -> None:
        del self.running[request.id]
        self.pool.give_back(self.batch.remove_request(request.id))
        request.blocks, request.computed = [], 0
        if again:
            self.waiting.appendleft(request)

    def _book(self, scheduled: dict[int, int], sampled: dict[int, int]) -> list[Request]:
        """Counts the step's tokens as computed, publishes blocks that they filled, appends what was sampled."""
        finished = []
        for req_id, count in scheduled.items():
            request = self.running[req_id]
            first, request.computed = request.computed // self.block_size, request.computed + count
            for index in range(first, request.computed // self.block_size):
                self.pool.publish(request.blocks[index], request.key(index, self.block_size))
            if request.computed >= self.suspects.get(request, 0):
                self.suspects.pop(request, None)
            if request.computed == len(request.tokens):
                request.tokens.append(sampled[req_id])
                if request.finished:
                    self._leave(request)
                    finished.append(request)
        return finished

    @torch.inference_mode()
    def _forward(self, metadata: Any) -> torch.Tensor:
        """The next token of every row."""
        given = {"position_ids": metadata.positions[None], "logits_to_keep": metadata.logits_indices}
        with torch_threads(self.threads), attncore_context(metadata, self.caches):
            logits = self.model(metadata.input_ids[None], use_cache=False, **given).logits[0].float()
        # argmax(logits + t * Gumbel noise) draws from softmax(logits / t), and is greedy at t = 0.
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        return torch.argmax(logits - metadata.temperature[:, None] * noise, dim=1)

    def _captured(self, size: int) -> Any:
        metadata = self.builder.capture(size)
        self._forward(metadata)  # a warm-up, over an empty step
        with capturing(new_graph(self.device)) as graph:
            metadata.record()
            sampled = self._forward(metadata)
        return graph, sampled
