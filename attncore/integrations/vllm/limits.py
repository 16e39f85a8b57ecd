"""How large vLLM's steps become: the capacity of AdoptedSteps."""

from __future__ import annotations

from typing import Any, NamedTuple


class Limits(NamedTuple):
    """Arguments of AdoptedSteps."""

    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int


def limits_of(vllm_config: Any, kv_cache_spec: Any) -> Limits:
    """The largest numbers that a step of this configuration has, padding and drafts counted."""
    scheduler, drafts = vllm_config.scheduler_config, 0
    if (speculative := vllm_config.speculative_config) is not None:
        # As many masks again in parallel drafting.
        drafts = 2 * int(getattr(speculative, "num_speculative_tokens", None) or 0)
    captured = int(getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0)
    rows = int(scheduler.max_num_seqs)
    tokens = max(int(scheduler.max_num_batched_tokens), captured) + rows * drafts
    if chunk := int(getattr(kv_cache_spec, "attention_chunk_size", None) or 0):
        # vLLM makes a row of each chunk (of Llama 4, say) that a request's tokens touch: two at least, and one for
        # every whole chunk of tokens.
        rows = 2 * rows + tokens // chunk
    return Limits(
        max_num_reqs=rows,
        max_num_tokens=tokens,
        max_model_len=int(vllm_config.model_config.max_model_len) + drafts,
    )


def num_blocks_of(cache: Any, block_size: int) -> int | None:
    """Kernel blocks that the cache has at least. A worker may not know them when builders are made: None."""
    count, per_block = cache.num_gpu_blocks, max(int(cache.block_size) // block_size, 1)
    return int(count) * per_block if count else None
