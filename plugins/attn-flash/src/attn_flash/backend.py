"""The backend ``flash``: which generation's calls its layers make, and the cache that all generations read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_flash import paged_head_sizes, probe, probe_results
from attn_flash.cascade import CascadeStep, cascade_step
from attn_flash.generations import MODULES, Layer
from attn_flash.impl import FlashImpl
from attn_flash.plan import DecoderPlans
from attn_flash.spec import LATENT_SUFFIX, MOST_SINKS, fp8_problems
from attncore import AttentionBackend, AttentionMetadata, AttentionType, BackendConfig
from attncore.builder import CascadeRule


class FlashBackend(AttentionBackend):
    """FlashAttention 2, 3 or 4, as the choice's variant says.

    The first creation on a machine calls the library (``probe``); what it lacks is kept, and negotiated around from
    then on. ValueError where the configuration is beyond the spec, or needs what this build leaves out.
    """

    name = "flash"
    impl_class = FlashImpl
    list_layout = "flash"

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self.generation = config.variant.removeprefix("fa").removesuffix(LATENT_SUFFIX) or "2"
        asked = config.options.get("generation")
        if asked not in (None, self.generation[0]):
            raise ValueError(
                f"options: generation {asked!r} is not the one that was chosen, {self.generation[0]!r}; ask for it in "
                "the request, options={'flash': {'generation': ...}}"
            )
        self._module = MODULES[self.generation]
        self._library = self._module.load()
        self._layer_class: Callable[..., Layer] = self._module.Layer
        self.probed = self._found()
        if self.probed.fails:
            raise ValueError(f"generation: {self.probed.library} failed when it was called: {self.probed.fails}")
        for field in ("head_size", "dtype", "kv_cache_dtype"):
            value = getattr(config, field)
            self._refuse_left_out(field, f"{field} {value}", value)
        if self.generation.startswith("3"):
            for field, problem in fp8_problems(config.kv_cache_dtype, config.dtype, config.head_size).items():
                raise ValueError(f"{field}: {problem}")
        self._causal_only = self.generation == "4" and config.head_size in paged_head_sizes.CAUSAL_ONLY
        self._plans = {
            (windowed, write): DecoderPlans(config.block_size, windowed=windowed, write=write)
            for windowed in (False, True)
            for write in (False, True)
        }

    def plans(self, *, windowed: bool, write: bool = True) -> DecoderPlans:
        """The plans that causal layers with a window share, or those without; without ``write`` those of steps whose
        keys are all in the cache."""
        return self._plans[windowed, write]

    def layer(self, **given: Any) -> Layer:
        """A layer's calls: the ``Layer`` of the generation's module, or a subclass of it."""
        facts = {"synchronises": self.probed.synchronises, "device": self.config.device}
        with torch.inference_mode(False):  # or what it keeps of sinks could not be written to later
            return self._layer_class(self._library, **facts, **given)

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """``(2, num_blocks, block_size, num_kv_heads, head_size)``, or heads before tokens for the layout HND."""
        if self.config.kv_cache_layout == "HND":
            return (2, num_blocks, num_kv_heads, block_size, head_size)
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    def kv_cache_views(self, kv_cache: Any) -> tuple[Tensor, Tensor]:
        """See the base class. One tensor with the 2 behind the blocks is read too: what another backend made for the
        other phase.
        """
        if isinstance(kv_cache, Tensor) and kv_cache.dim() == 5 and kv_cache.shape[0] != 2 and kv_cache.shape[1] == 2:
            kv_cache = kv_cache.transpose(0, 1)
        return super().kv_cache_views(kv_cache)

    def per_head(self, values: Sequence[float] | Tensor | None) -> Tensor | None:
        """One float32 a query head, on the device."""
        if values is None:
            return None
        return torch.as_tensor(values, dtype=torch.float32, device=self.config.device).contiguous()

    def cascade(self, metadata: AttentionMetadata, rule: CascadeRule | None = None) -> CascadeStep | None:
        """The passes of a step whose requests share a prefix, for ``impl.forward_cascade``; None where it does not pay,
        and where generation 4 reads a prefix wrong (``paged_head_sizes``).

        Once a step, by the engine, for steps without a captured graph.
        """
        if self._causal_only:
            return None
        return cascade_step(metadata, self.config.block_size, self.config.device, rule)

    def check_layer(self, attn_type: AttentionType, **asked: bool) -> None:
        """ValueError that names the argument where the library, or this build of it, lacks what it needs."""
        if self._causal_only and attn_type is AttentionType.ENCODER_DECODER:
            raise ValueError(
                f"attn_type: variant fa4 reads an encoder's keys of head size {self.config.head_size} wrong from "
                "pages; ask for the feature 'encoder_decoder' in the request, and the choice goes around it"
            )
        if asked.get("sinks") and self.generation.startswith("3") and self.config.num_heads > MOST_SINKS:
            raise ValueError(
                f"sinks: num_heads {self.config.num_heads} found; with sinks generation 3 takes {MOST_SINKS} at most: "
                "ask for them in the request, and the choice goes around it"
            )
        features = {"alibi_slopes": "alibi"}
        for argument, wanted in asked.items():
            if wanted:
                self._refuse_left_out(argument, features.get(argument, argument), "")

    def _refuse_left_out(self, argument: str, name: str, value: object) -> None:
        text = self.probed.lacks.get(name)
        if text is not None:
            raise ValueError(
                f"{argument}: {value or name} was left out of this build of {self.probed.library}, as calls have shown "
                f"({text}); the next choice goes around it"
            )

    def _found(self) -> probe_results.ProbeResult:
        device = torch.device(self.config.device)
        if device.type != "cuda":
            return probe_results.ProbeResult(
                probe_results.library(self.generation) or f"generation {self.generation}", str(device)
            )
        return probe.found(self.generation, device)
