"""The attention backend flashinfer over latent caches (MLA). Imported when an engine creates it."""

from __future__ import annotations

import torch

from attn_flashinfer import checks, device_plan, modules
from attn_flashinfer.backend import FlashInferBackend
from attn_flashinfer.latent_impl import LatentImpl
from attn_flashinfer.latent_plans import LatentPlans
from attn_flashinfer.latent_wrappers import LatentShape
from attncore import BackendConfig


class LatentBackend(FlashInferBackend):
    """FlashInfer's kernels of latent attention in its absorbed form: all query heads read one row a token.

    A cache is one tensor ``[blocks, block_size, head_size]``, whose first ``head_size_v`` columns are the values too.
    Raises ValueError naming the field of the configuration that the kernels cannot run; see the base class too.
    """

    impl_class = LatentImpl
    plans_class = LatentPlans

    def make_shape(self, cache_dtype: torch.dtype) -> LatentShape:
        """See the base class."""
        config, major = self.config, _major(self.config)
        size_v = config.head_size_v or config.head_size
        kernels = checks.latent_kernels(str(config.options.get("latent", "auto")), hopper=major == 9)
        problem = checks.latent_problem(
            config.num_heads, (config.head_size, size_v), (config.dtype, config.kv_cache_dtype), kernels,
            hopper=major in (0, 9),
        )  # fmt: skip
        if problem:
            raise ValueError(problem)
        return LatentShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            config.block_size,
            getattr(torch, config.dtype),
            cache_dtype,
            config.kv_cache_layout,
            config.device,
            True,
            size_v,
            kernels,
        )

    def check_modules(self, window: int | None, soft_cap: float | None) -> None:
        """See the base class; ValueError for what the kernels lack, too."""
        for name, given in (("sliding_window", window), ("logits_soft_cap", soft_cap)):
            if given is not None:
                raise ValueError(f"{name}: {given} found; flashinfer has none over latent caches")
        config, shape = self.config, self.shape
        assert isinstance(shape, LatentShape)
        sizes = shape.head_size, shape.head_size_v
        name = modules.latent(config.dtype, config.kv_cache_dtype, *sizes, shape.kernels)
        if self._is_cuda and modules.find(name) is None and (why := modules.no_compiler()):
            raise ValueError(f"use_mla: the module {name} is not built, and {why}; {checks.INSTALL}")

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """A row a token, without heads."""
        return (num_blocks, block_size, head_size)

    def _plan_option(self) -> str:
        return device_plan.HOST

    def _no_plan_yet(self) -> tuple[str, str]:
        return device_plan.HOST, "plans of latent attention are made on the host"


def _major(config: BackendConfig) -> int:
    """The first number of the device's capability; 0 where it is no CUDA device."""
    return torch.cuda.get_device_capability(config.device)[0] if config.device.startswith("cuda") else 0
