"""A replay through a whole model of transformers, with random weights, in place of attention layers alone."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from attncore.abstract import AttentionType
from attncore.arguments import INT32_MAX, positive_integer
from attncore.integrations.transformers import (
    attention_layers,
    attncore_context,
    paged_caches,
    recurrent_layers,
    select_for_model,
    use_latent_caches,
)
from attncore.registry.config_json import read_config
from attncore.registry.request_from_config_json import in_words_of_config
from attncore.replay.backend_code import created
from attncore.replay.checks.model_check import ModelCheck
from attncore.replay.layers.cache_memory import check_cache_memory, no_memory
from attncore.replay.layers.model_from_config import check_states, checked_fields, data_alone, random_model
from attncore.replay.layers.unread_fields import note_of_unread_fields
from attncore.replay.model_error import (
    SMALLER_STEPS,
    ModelError,
    errors_as_model_errors,
    first_line,
    memory_error_as_model_error,
)
from attncore.replay.token_content import step_content, token_ids
from attncore.show import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from attncore.builder.persistent.step_metadata import StepMetadata
    from attncore.replay.results.measurements import Verification
    from attncore.replay.scheduling.step import Step
    from attncore.replay.settings import Settings
    from attncore.replay.traces.trace import Request


class ModelLayers:
    """The model of a configuration file; tokens are a function of content and position, so shared prefixes are equal.

    ``longest`` is the number of tokens of the longest request, ``total`` that of all; ``device`` None: a GPU where
    there is one. Layers of latent attention have latent caches. Raises ModelError where the file makes no model,
    NoBackendError where no backend runs its layers. ``note`` names fields of the file that change nothing.
    """

    def __init__(
        self,
        path: str,
        settings: Settings,
        backend: str | None,
        longest: int,
        total: int,
        device: str | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        facts = _facts(path)
        at_once = min(total, settings.max_num_batched_tokens)
        self.model, nbytes_of_step = random_model(path, facts, settings.seed, device, longest, at_once)
        note = note_of_unread_fields(self.model, checked_fields(path, facts))
        self.note = f"{path}: {note}" if note else ""
        self.keeps_states = bool(recurrent_layers(self.model))
        if self.keeps_states:
            check_states(path, self.model, settings.max_num_seqs, min(longest, settings.max_num_batched_tokens))
            settings = replace(settings, keeps_states=True)
        with suppress(ValueError):  # no layers of latent attention, or none whose weights can be absorbed
            use_latent_caches(self.model)
        with errors_as_model_errors(path), data_alone():
            with memory_error_as_model_error(f"{path}: a forward pass", "take a smaller model"):
                layers = attention_layers(self.model)
            config = self.model.config.get_text_config()
            self.vocab_size = positive_integer("vocab_size", config.vocab_size)
            self.longest = positive_integer(
                "max_position_embeddings", getattr(config, "max_position_embeddings", None) or INT32_MAX
            )
        if any(layer.attn_type is not AttentionType.DECODER for layer in layers):
            raise ModelError(
                f"{path}: {type(self.model).__name__} is an encoder and says no next token; take a decoder"
            )
        asked: dict[str, Any] = {
            "block_size": settings.block_size, "num_blocks": settings.num_blocks, "backend": backend,
            "options": {backend: options} if backend and options else {},
        }  # fmt: skip
        try:
            choice = select_for_model(self.model, layers=layers, **asked)
        except ValueError as error:
            if str(error).partition(":")[0] in asked:
                raise
            text = in_words_of_config(str(error), facts)
            raise ModelError(f"{path}: {text}") from None  # of the model's own, such as its dtype
        self.why = choice.explain().splitlines()[0].partition(": ")[2]
        self.backend = created(choice, str(self.model.device))
        try:
            check_cache_memory(self.model, self.backend, layers, settings, nbytes_of_step)
            num_slots = settings.max_num_seqs + 1 if self.keeps_states else None
            self.kv_caches = paged_caches(
                self.model, self.backend, settings.num_blocks, layers=layers, num_slots=num_slots
            )
        except (RuntimeError, MemoryError) as error:  # torch raises the first
            raise no_memory(layers, settings, first_line(error)) from error
        config = self.backend.config
        self.name, self.dtype, self.device = self.backend.name, config.dtype, config.device
        latent, states = ", with latent caches" * config.use_mla, ", beside recurrent ones" * self.keeps_states
        key_heads = f"{counted(config.num_kv_heads, 'key/value head')} of {config.head_size}"
        heads = f"{counted(config.num_heads, 'head')}, {key_heads}"
        self.described = f"{len(layers)} of {type(self.model).__name__}{latent}{states}: {heads}"
        with errors_as_model_errors(path), data_alone():
            self.model.set_attn_implementation("attncore")

    def check_lengths(self, requests: Sequence[Request]) -> None:
        """ModelError that names the row of a request that is longer than the model."""
        for request in requests:
            tokens = request.prompt_tokens + request.output_tokens
            if tokens > self.longest:
                raise ModelError(
                    f"the request in row {request.row} has {counted(tokens, 'token')}; the model's "
                    "max_position_embeddings is "
                    f"{self.longest}"
                )

    def forward(self, step: Step, metadata: StepMetadata) -> tuple[list[Tensor], int]:
        """Logits of every row's last token, (n, vocab_size), in a list; and the nanoseconds that the model took."""
        ids = token_ids(step_content(step, metadata), metadata.host.positions, self.vocab_size)
        tokens = self.backend.from_host(ids)[None]
        with (
            data_alone(),  # a layer may look for a faster kernel when it runs first
            memory_error_as_model_error(f"model: a step of {counted(len(ids), 'token')}", SMALLER_STEPS),
            errors_as_model_errors(f"model: a step of {counted(len(ids), 'token')}"),
            torch.inference_mode(),
            attncore_context(metadata, self.kv_caches),
        ):
            start = perf_counter_ns()
            logits = self.model(
                tokens,
                position_ids=metadata.positions[None],
                use_cache=False,
                logits_to_keep=metadata.logits_indices,
            ).logits[0]
            if logits.is_cuda:
                torch.cuda.synchronize()
            elapsed = perf_counter_ns() - start
        return [logits], elapsed

    def check(self, requests: Sequence[Request], settings: Settings, result: Verification) -> ModelCheck:
        """What compares a sample of requests with the model alone."""
        return ModelCheck(self.model, self.backend, self.vocab_size, requests, settings, result)


def _facts(path: str) -> dict[str, Any]:
    try:
        return read_config(path)
    except ValueError as error:
        raise ModelError(str(error)) from None
