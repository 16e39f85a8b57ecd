"""How large vLLM's steps become: the capacity of AdoptedSteps."""

from __future__ import annotations

from typing import Any, NamedTuple

from attncore.arguments import INT32_MAX


class Limits(NamedTuple):
    """Arguments of AdoptedSteps."""

    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    num_blocks: int


def limits_of(vllm_config: Any, kv_cache_spec: Any) -> Limits:
    """The largest numbers that a step of this configuration has, padding and drafts counted."""
    scheduler, drafts = vllm_config.scheduler_config, 0
    if (speculative := vllm_config.speculative_config) is not None:
        # As many masks again in parallel drafting.
        drafts = 2 * int(getattr(speculative, "num_speculative_tokens", None) or 0)
    captured = int(getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0)
    rows = int(scheduler.max_num_seqs)
    return Limits(
        max_num_reqs=rows,
        max_num_tokens=max(int(scheduler.max_num_batched_tokens), captured) + rows * drafts,
        max_model_len=int(vllm_config.model_config.max_model_len) + drafts,
        num_blocks=_num_blocks(vllm_config.cache_config, int(kv_cache_spec.block_size)),
    )


def _num_blocks(cache: Any, block_size: int) -> int:
    """Kernel blocks in the cache. A worker may not know them when builders are made: then what int32 slots reach."""
    count, per_block = cache.num_gpu_blocks, max(int(cache.block_size) // block_size, 1)
    return int(count) * per_block if count else INT32_MAX // block_size
