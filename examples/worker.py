"""A model over its caches and what a step of it takes: the part of Engine that knows the device, and no schedule."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import attncore.integrations.transformers  # noqa: F401  (first: it says what is not installed)

# isort: split
import numpy as np
import torch
from mixed_steps import MixedSteps
from run import SampledTokens

from attncore import AttentionRequest, AttentionType, InputBatch, KVCacheGroup, MetadataBuilder, StateGroup
from attncore.arguments import integer, optional_integer
from attncore.builder import ContextParallel
from attncore.did_you_mean import did_you_mean
from attncore.graphs import capturing, launch, new_graph
from attncore.integrations.transformers import (
    attention_layers,
    attncore_context,
    compile_layers,
    paged_caches,
    plain_prefill,
    recurrent_layers,
    select_for_model,
    use_latent_caches,
)
from attncore.ranks import over_ranks


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


def default_graph_sizes(most: int) -> tuple[int, ...]:
    """Numbers of decodes that graphs are captured for, ``most`` the largest."""
    return (*(size for size in (1, 2, 4, *range(8, most, 8)) if size < most), most)


def default_mixed_sizes(most: int) -> tuple[int, ...]:
    """Numbers of tokens that steps with prefills are padded to, ``most`` the largest; less than half is padding."""
    return (*(size for k in range(6, most.bit_length()) for size in (1 << k, 3 << k - 1) if size < most), most)


class Worker:
    """A model, its caches, the batch and builder of its steps, and the graphs that run them.

    ``graph_sizes``: numbers of decodes that graphs are captured for; ``mixed_sizes``: numbers of tokens that other
    steps are padded to: they are captured whole where the backend's level is ``always``, else but for their attention.
    Both are chosen on a GPU where they are None; (): none. ``threads`` are torch's on a CPU. ``compile``: whether
    layers are compiled, or options of torch.compile. Layers of latent attention have latent caches. ``interleave``:
    where not 0, the ranks of torch.distributed share out the keys of every request, so many tokens to each in turn.
    ``plain_prefill``: whether long prompts of latent layers run by keys and values of every head, without a graph, or
    arguments of ``plain_prefill``.
    ``images``: prompts may have images that see themselves in both directions (Gemma 3), in steps without a graph.
    ``wanted`` are further fields of an AttentionRequest, such as ``backend`` and ``block_size``."""

    def __init__(
        self, model: Any, *, num_blocks: int = 512, max_num_reqs: int = 64, max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None, graph_sizes: tuple[int, ...] | None = None,
        mixed_sizes: tuple[int, ...] | None = None, seed: int = 0, threads: int = 1, ahead: int = 8,
        transport: str = "auto", interleave: int = 0, compile: bool | dict[str, Any] = False,  # noqa: A002
        images: bool = False, plain_prefill: bool | dict[str, Any] = False, **wanted: Any,
    ) -> None:  # fmt: skip
        if not callable(getattr(model, "eval", None)):
            raise TypeError(f"model: a {type(model).__name__} found; give a loaded model of transformers")
        num_blocks = integer("num_blocks", num_blocks, 2)  # block 0 is the null block
        threads, ahead = integer("threads", threads, 1), integer("ahead", ahead, 0)
        interleave = integer("interleave", interleave, 0)
        max_model_len = optional_integer("max_model_len", max_model_len, 1)
        known = {"tokenizer", *inspect.signature(Worker).parameters}
        known |= {one.name for one in dataclasses.fields(AttentionRequest)}
        if strange := [name for name in wanted if name not in known]:
            raise TypeError(f"{strange[0]}: Engine has no such argument{did_you_mean(strange[0], known)}")
        self.model, self.device, self.threads = model.eval(), str(model.device), threads
        chosen, sizes = graph_sizes is None, graph_sizes or ()
        if chosen and self.device.startswith("cuda"):
            sizes = default_graph_sizes(min(max_num_reqs, max_num_batched_tokens))
        with suppress(ValueError):  # no layers of latent attention, or none whose weights can be absorbed
            use_latent_caches(model)
        layers, level = attention_layers(model), "uniform_decode" if sizes else "never"
        if any(layer.attn_type is not AttentionType.DECODER for layer in layers):
            raise ValueError(f"model: {type(model).__name__} is an encoder and says no next token; give a decoder")
        if (max_model_len or 0) > (longest := model.config.get_text_config().max_position_embeddings):
            raise ValueError(f"max_model_len: {max_model_len} given; the model has {longest} positions: give no more")
        features = {name for name, is_needed in (("lse", interleave), ("bidirectional_spans", images)) if is_needed}
        fields = {"cuda_graph": level, "features": features, "num_blocks": num_blocks, **wanted}
        self.choice = select_for_model(model, layers=layers, **fields)
        self.backend, ranks = self.choice.create(self.device), None
        if interleave:
            world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
            ranks = ContextParallel(world, rank, self.choice.block_size, interleave)
            self.backend = over_ranks(self.backend, ranks)
        self.block_size = self.choice.block_size if ranks is None else ranks.virtual_block_size
        self.recurrent = bool(recurrent_layers(model))
        slots = {"num_slots": max_num_reqs + 1} if self.recurrent else {}  # a request's is its place
        shared = compile is False  # compiled layers are told apart by their caches
        plain = self._plain_prefill(plain_prefill, layers, ranks, compiled=not shared)
        self.caches = paged_caches(
            model, self.backend, num_blocks, layers=layers, shared=shared, plain_prefill=plain, **slots
        )
        self.max_model_len, self.num_blocks = max_model_len or longest, num_blocks
        limits = {"max_num_reqs": max_num_reqs, "max_model_len": self.max_model_len, "spans": images}
        if self.recurrent:
            tables = KVCacheGroup("blocks", self.block_size, num_blocks=num_blocks)
            self.batch = InputBatch(groups=[tables, StateGroup("states", **slots)], **limits)
        else:
            self.batch = InputBatch(block_size=self.block_size, num_blocks=num_blocks, **limits)
        sent = {"max_num_batched_tokens": max_num_batched_tokens, "transport": transport, "context_parallel": ranks}
        self.builder = MetadataBuilder(self.batch, self.backend, **sent)
        # Ride to the device in the metadata's own arena, by row: no copy and no loop of their own.
        self.input_ids = self.batch.token_column("input_ids", np.int64, unknown=-1)
        self.temperature = self.batch.column("temperature", np.float32)
        self.place = self.batch.column("place", np.int64)
        for column in (self.input_ids, self.temperature, self.place):
            self.builder.register_column(column)
        self.sampled = SampledTokens(max_num_reqs, max(ahead, 1), self.device)
        self.vocab_size = model.get_input_embeddings().num_embeddings
        torch.manual_seed(seed)
        model.set_attn_implementation({"text_config": "attncore", "vision_config": "sdpa"} if images else "attncore")
        self.images: dict[int, Any] | None = {} if images else None  # of requests that have some: pixels
        if compile is not False:
            with torch_threads(threads):  # as in steps: on a CPU compiled code is for a number of threads
                compile_layers(model, self.caches, **({} if compile is True else compile))
        self.graphs: dict[int, Any] = {}
        self.mixed: list[MixedSteps] = []
        self.whole: dict[tuple[int, int], Any] = {}  # graphs of steps with prefills, by rows and tokens
        self._capture_decodes({min(n, max_num_reqs) for n in sizes}, chosen)
        self._capture_mixed(mixed_sizes)
        self.ahead = ahead if ahead < 2 or self._can_run_ahead() else 1

    def _plain_prefill(self, asked: bool | dict[str, Any], layers: Any, ranks: Any, *, compiled: bool) -> Any:
        """What ``paged_caches`` takes; None where it is not asked for."""
        if asked is False:
            return None
        for argument, given in (("compile", compiled), ("interleave", ranks is not None)):
            if given:
                raise ValueError(f"plain_prefill: not with {argument}; leave one of them out")
        return plain_prefill(self.model, layers=layers, **({} if asked is True else asked))

    def close(self) -> None:
        """Gives the memory of graphs and caches back; nothing runs afterwards."""
        for graphs in (self.graphs, self.whole):
            while graphs:
                self.builder.release(graphs.popitem()[0])
        self.builder.close()
        self.caches, self.mixed = None, []

    def _add(
        self, name: int, tokens: list[int], blocks: list[int], computed: int, temperature: float, place: int,
        spans: list[tuple[int, int]] | None = None, images: Any = None,
    ) -> None:  # fmt: skip
        """A request with the blocks of its tokens; the first ``computed`` are in them already."""
        self.batch.add_request(name, {"blocks": blocks, "states": [place]} if self.recurrent else blocks, computed)
        self.input_ids.give(name, tokens)
        self.temperature[name], self.place[name] = temperature, place
        if self.images is not None and spans:
            self.batch.set_spans(name, spans)
            self.images[name] = images

    def _append(self, blocks: dict[int, list[int]]) -> None:
        if self.recurrent:
            self.batch.append_blocks_many({name: {"blocks": ids} for name, ids in blocks.items()})
        else:
            self.batch.append_blocks_many(blocks)

    def _remove(self, name: int) -> list[int]:
        held = self.batch.remove_request(name)
        if self.images is not None:
            self.images.pop(name, None)
        return held["blocks"] if self.recurrent else held

    def _size_of(self, num_rows: int, num_tokens: int) -> Any:
        """The captured size that holds a step of so many requests and tokens; None where it runs without one."""
        if num_tokens == num_rows:
            return min((size for size in self.graphs if size >= num_rows), default=None)
        fitting = (size for size in self.whole if size[0] >= num_rows and size[1] >= num_tokens)
        return min(fitting, key=lambda size: size[1], default=None)

    def _run_steps(self, others: dict[int, int], size: Any, num_steps: int) -> None:
        """One step, in the graph of ``size`` if there is one; or ``num_steps``, which the device makes of it.

        ``others`` are the requests that do not run one token, and how many they run."""
        if num_steps > 1:
            steps = self.builder.run_ahead(num_steps, bucket=size, scheduled=others)
            while steps.left:
                steps.replay(self.graphs[size])
            return
        metadata = self.builder.build(others, bucket=size)
        if size is None:
            self._run(metadata)
        else:
            metadata.replay(self.whole[size] if isinstance(size, tuple) else self.graphs[size])

    def _pixels(self, metadata: Any) -> dict[str, Any]:
        """The images of a step in the order of its tokens, as the model takes them; nothing where it has none."""
        if self.images is None or metadata.host.span_ends is None:
            return {}
        host, found = metadata.host, []
        for name, first, stop in zip(metadata.req_ids, host.context_lens, host.seq_lens, strict=True):
            for index, (start, _) in enumerate(self.batch.spans(name)):
                if first <= start < stop:
                    found.append(self.images[name][index])
        return {"pixel_values": torch.stack(found)}

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, **images: Any) -> torch.Tensor:
        """Of the tokens at ``rows``, inside a context."""
        given = {"position_ids": positions[None], "logits_to_keep": rows, **images}
        return self.model(ids[None], use_cache=False, **given).logits[0]

    @torch.inference_mode()
    def _forward(self, metadata: Any) -> torch.Tensor:
        """The next token of every row."""
        step = self.sampled.inputs(metadata), metadata.positions, metadata.logits_indices
        pixels = self._pixels(metadata)
        eager = bool(pixels) or self.caches.runs_plainly(metadata)
        fitting = [mixed for mixed in self.mixed if not eager and mixed.holds(metadata)]
        with torch_threads(self.threads):
            if fitting:
                logits = fitting[-1].run(metadata, *step).float()
            else:
                with attncore_context(metadata, self.caches):
                    logits = self.logits(*step, **pixels).float()
        return self._sample(logits, metadata)

    def _sample(self, logits: torch.Tensor, metadata: Any) -> torch.Tensor:
        # argmax(logits + t * Gumbel noise) draws from softmax(logits / t), and is greedy at t = 0.
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        return torch.argmax(logits - metadata.temperature[:, None] * noise, dim=1)

    def _run(self, metadata: Any) -> None:
        self.sampled.keep(metadata, self._forward(metadata))

    def _captured(self, num_rows: int, num_tokens: int | None = None, **options: Any) -> Any:
        metadata = self.builder.capture(num_rows, num_tokens=num_tokens)
        try:
            self._run(metadata)  # a warm-up, over an empty step
            with capturing(new_graph(self.device), **options) as graph:
                launch(metadata.record)
                launch(self._run, metadata)
                launch(metadata.input_ids.fill_, -1)  # of a step ahead, which the host sends none
        except BaseException:
            self.builder.release(num_rows if num_tokens is None else (num_rows, num_tokens))
            raise
        return graph

    def _capture_decodes(self, sizes: set[int], chosen: bool) -> None:
        """Graphs of decodes; none where the sizes were ``chosen`` here and the model cannot be captured."""
        for size in sorted(sizes, reverse=True):
            try:
                self.graphs[size] = self._captured(size)
            except RuntimeError as error:
                if not chosen or self.graphs:
                    raise
                self._say("runs without graphs", error)
                break

    def _capture_mixed(self, sizes: tuple[int, ...] | None) -> None:
        """Graphs of steps with prefills; none where the sizes are chosen here and the model cannot be captured so."""
        most = self.builder.max_num_batched_tokens
        chosen = default_mixed_sizes(most) if self.graphs and self.device.startswith("cuda") else ()
        wholly = self.builder.context_parallel is None and self.backend.config.spec.cuda_graph == "always"
        shared = {"pool": torch.cuda.graph_pool_handle()} if wholly and self.device.startswith("cuda") else {}
        for size in sorted({min(size, most) for size in (chosen if sizes is None else sizes)}, reverse=True):
            rows = min(size, self.batch.max_num_reqs)
            try:
                if wholly:
                    self.whole[rows, size] = self._captured(rows, size, **shared)
                else:
                    self.mixed.append(MixedSteps(self, size, rows))
            except (ValueError, RuntimeError) as error:
                if sizes is not None or self.whole or self.mixed:
                    raise
                self._say("runs steps with prefills eagerly", error)
                break

    def _say(self, what: str, error: Exception) -> None:
        logging.getLogger(__name__).warning("%s %s: %s", type(self.model).__name__, what, error)

    def _can_run_ahead(self) -> bool:
        """Whether the device can make the next step by itself; not where the host has to plan each."""
        try:
            return bool(self.graphs) and self.builder.run_ahead(1, bucket=min(self.graphs)).stop() == 0
        except ValueError:
            return False


if __name__ == "__main__":
    raise SystemExit("worker.py is a module; run generate.py beside it")
