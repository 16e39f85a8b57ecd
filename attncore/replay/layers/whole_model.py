"""A replay through a whole model of transformers, with random weights, in place of attention layers alone."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attncore.abstract import AttentionType
from attncore.integrations.transformers import attention_layers, attncore_context, paged_caches, select_for_model
from attncore.replay.checks.attention_check import chosen_rows
from attncore.replay.layers.attention_layers import step_content
from attncore.replay.layers.token_content import content_ids, token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attncore.replay.results.measurements import Verification
    from attncore.replay.runner import Settings
    from attncore.replay.scheduling.scheduler import Step
    from attncore.replay.traces.trace import Request

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Of the largest logit: how far a logit may be from the model's own."""


class ModelError(ValueError):
    """The configuration file makes no model that can be replayed, or memory does not suffice for it."""


class ModelLayers:
    """The model of a configuration file; tokens are a function of content and position, so shared prefixes are equal.

    ``device`` None: a GPU where there is one. Raises ModelError where the file makes no model, NoBackendError where no
    backend runs its layers.
    """

    def __init__(self, path: str, settings: Settings, backend: str | None, device: str | None = None) -> None:
        self.model = _model(path, settings.seed, device)
        config = self.model.config.get_text_config()
        try:
            with _memory(f"{path}: a forward pass", "take a smaller model"):
                layers = attention_layers(self.model)
        except ModelError:
            raise
        except ValueError as error:
            raise ModelError(f"{path}: {error}") from error
        if any(layer.attn_type is not AttentionType.DECODER for layer in layers):
            raise ModelError(
                f"{path}: {type(self.model).__name__} is an encoder and says no next token; take a decoder"
            )
        choice = select_for_model(
            self.model, layers=layers, block_size=settings.block_size, num_blocks=settings.num_blocks, backend=backend
        )
        self.why = choice.explain().splitlines()[0].partition(": ")[2]
        self.backend = choice.create(str(self.model.device))
        try:
            self.kv_caches = paged_caches(self.model, self.backend, settings.num_blocks, layers=layers)
        except (RuntimeError, MemoryError) as error:  # torch raises the first
            raise ValueError(
                f"num_blocks: {len(layers)} caches of {settings.num_blocks} blocks of {settings.block_size} do not fit "
                f"in memory ({_first_line(error)}); pass a smaller --num-blocks"
            ) from error
        self.name, self.dtype = self.backend.name, self.backend.config.dtype
        self.label = f"{type(self.model).__name__}, {len(layers)} layers"
        self.vocab_size = int(config.vocab_size)
        self.longest = int(getattr(config, "max_position_embeddings", 0) or 2**31 - 1)
        self.model.set_attn_implementation("attncore")

    def check_lengths(self, requests: Sequence[Request]) -> None:
        """ModelError that names the row of a request that is longer than the model."""
        for request in requests:
            tokens = request.prompt_tokens + request.output_tokens
            if tokens > self.longest:
                raise ModelError(
                    f"the request in row {request.row} has {tokens} tokens; the model's max_position_embeddings is "
                    f"{self.longest}"
                )

    def forward(self, step: Step, metadata: Any) -> tuple[list[Any], int]:
        """Logits of every row's last token, (n, vocab_size), in a list; and the nanoseconds that the model took."""
        ids = token_ids(step_content(step, metadata), metadata.host.positions, self.vocab_size)
        tokens = self.backend.from_host(ids)[None]
        start = perf_counter_ns()
        with (
            _memory(f"model: a step of {len(ids)} tokens", "pass a smaller --max-num-batched-tokens or --num-blocks"),
            torch.inference_mode(),
            attncore_context(metadata, self.kv_caches),
        ):
            logits = self.model(
                tokens,
                position_ids=metadata.positions[None],
                use_cache=False,
                logits_to_keep=metadata.logits_indices,
            ).logits[0]
        if logits.is_cuda:
            torch.cuda.synchronize()
        return [logits], perf_counter_ns() - start

    def check(self, requests: Sequence[Request], settings: Settings, result: Verification) -> ModelCheck:
        """What compares a sample of requests with the model alone."""
        return ModelCheck(self, requests, settings.verify_every, settings.seed, result)


class ModelCheck:
    """The first request and a random one in ``every``: logits against the model's eager attention, without a cache."""

    def __init__(
        self, layers: ModelLayers, requests: Sequence[Request], every: int, seed: int, result: Verification
    ) -> None:
        self.layers, self.result = layers, result
        drawn = np.random.default_rng((seed, 1)).random(len(requests)) < 1 / every
        self.sampled = {request.row for request, chosen in zip(requests, drawn, strict=True) if chosen}
        self.sampled.add(requests[0].row)
        result.max_abs_error = 0.0

    def __call__(self, number: int, step: Step, metadata: Any, outputs: list[Any]) -> None:
        """Checks step ``number``; its requests stand as before it."""
        layers = self.layers
        for running, count in chosen_rows(step, self.sampled):
            length = running.computed + count
            ids = token_ids(content_ids(running.request, 0, length), np.arange(length), layers.vocab_size)
            with (
                _memory(
                    f"model: the check of {length} tokens by eager attention",
                    "replay shorter requests, or check fewer with --verify-every",
                ),
                _eager(layers.model),
                torch.inference_mode(),
            ):
                tokens = layers.backend.from_host(ids)[None]
                expected = layers.model(tokens, use_cache=False, logits_to_keep=1).logits[0, -1].float()
            found = outputs[0][metadata.req_ids.index(running.row)].float()
            error, allowed = (
                float((found - expected).abs().max()),
                TOLERANCE[layers.dtype] * float(expected.abs().max()),
            )
            self.result.checked += 1
            if not error <= allowed:
                self.result.fail(
                    f"step {number}, request in row {running.row}, {length} tokens: a logit differs from the model's "
                    f"own by {error:.3g}, {allowed:.3g} allowed"
                )
            if error < float("inf"):
                self.result.max_abs_error = max(self.result.max_abs_error or 0.0, error)


class _eager:  # noqa: N801
    """The model's attention is its own meanwhile."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._model.set_attn_implementation("eager")

    def __exit__(self, *_: object) -> None:
        self._model.set_attn_implementation("attncore")


@contextmanager
def _memory(what: str, do: str) -> Iterator[None]:
    """ModelError where memory does not suffice for ``what``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # on a CPU torch raises the plain first
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error):
            raise ModelError(f"{what} does not fit in memory ({_first_line(error)}); {do}") from error
        raise


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _model(path: str, seed: int, device: str | None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if not Path(path).exists():
        raise ModelError(f"{path}: no such file")
    try:
        config = AutoConfig.from_pretrained(path)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = config.dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
        torch.manual_seed(seed)
        with _memory(f"{path}: the model", "take a smaller one"), torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # type: ignore[no-untyped-call]
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ArithmeticError) as error:
        raise ModelError(f"{path}: {_first_line(error)}") from error
