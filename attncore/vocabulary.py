"""The closed vocabularies of the contract: what a spec may declare and what a request may ask.

A word that is not here is a mistake of whoever wrote it, and refused; new words come with a minor release of attncore.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from typing import Any


class AttentionType(enum.StrEnum):
    """Whose tokens attend to whose."""

    DECODER = "decoder"
    """Causal, over the request's own cache."""
    ENCODER = "encoder"
    """Not causal; writes no cache; the encoder of an encoder/decoder model: encoder tokens by
    ``encoder_query_start_loc``.
    """
    ENCODER_ONLY = "encoder_only"
    """Not causal; writes no cache; the model has no decoder: tokens by ``query_start_loc``."""
    ENCODER_DECODER = "encoder_decoder"
    """Cross attention: decoder queries over encoder keys kept in the cache by ``cross_slot_mapping``."""


DTYPES = ("float16", "bfloat16", "float32")
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8_e4m3", "fp8_e5m2")
"""``auto`` is the model's own dtype."""

_TORCH_NAMES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


def dtype_name(dtype: Any) -> Any:
    """The name of a torch dtype (``torch.bfloat16`` is ``bfloat16``); any other value as it is. Imports no torch."""
    torch = sys.modules.get("torch")  # without it loaded, there is no dtype of it
    if torch is None or type(dtype) is not getattr(torch, "dtype", None):
        return dtype
    name = str(dtype).removeprefix("torch.")
    return _TORCH_NAMES.get(name, name)


KV_CACHE_LAYOUTS = ("NHD", "HND", "own")
"""Order of the last three axes of a block: tokens, heads, head size; heads first; what the backend alone knows."""

FEATURES: Mapping[str, str] = {
    "sliding_window": "a query sees the last W tokens, itself included, in prefill and decode",
    "logits_soft_cap": "scores pass through cap * tanh(score / cap)",
    "alibi": "linear position biases with any slopes",
    "alibi_standard": "linear position biases with the standard slopes of the local number of heads only",
    "sinks": "a learnt logit per head joins the softmax",
    "kv_scales": "k_scale and v_scale other than 1.0 for an fp8 cache: numbers, also set after the layer is made",
    "kv_scales_on_device": "scales that are tensors of one element, which captured graphs see change",
    "kv_scales_per_head": "scales that are tensors with one element for each key/value head",
    "encoder": "attention that is not causal and writes no cache",
    "encoder_decoder": "cross attention over encoder tokens kept in the cache",
    "multi_token_decode": "decodes of several query tokens (speculative decoding) in the decode kernel",
    "tree_mask": "drafts that form a tree: a token sees the context, its ancestors and itself (metadata.tree_mask)",
    "bidirectional_spans": "tokens of a span, such as an image, see each other both ways (metadata.span_ends)",
    "strided_kv_cache": "forward takes the cache as a pair of views of any strides (the engine's own pool), too",
    "lse": "forward_with_lse returns the log-sum-exp of each row too (context parallelism, a context in chunks)",
}

GRAPH_LEVELS: Mapping[str, str] = {
    "never": "no step may be captured",
    "uniform_decode": "steps in which every request decodes one token",
    "uniform": "steps in which every request has the same number of tokens: a decode and its drafts",
    "always": "any step, also of requests with different numbers of tokens, prompts among them",
}
"""What may be captured in a CUDA graph, ascending; each level includes those before it."""

PHASES = ("prefill", "decode")
HOST_LENGTHS: Mapping[str, str] = {
    "none": "the backend reads no length on the host",
    "bounded": "it reads lengths on the host and is right where they are upper bounds of those on the device",
    "exact": "it reads lengths on the host and is right only where they equal those on the device",
}
"""What ``plan`` and ``forward`` take from ``metadata.host.seq_lens`` and the fields that are made of it."""

PLAN_STAGING: Mapping[str, str] = {
    "shared": "all plans are copied from one pinned memory: a plan waits until the copies of the last one are made",
    "per_slot": "the plans of the builder's arenas are copied from memory of their own: no plan waits for another",
}
"""Whose pinned memory the library's ``plan`` copies from."""

PAD_SEQ_LEN: Mapping[int, str] = {
    0: "a padded row has no keys: the kernel skips it, or writes anything to its output",
    1: "a padded row has one key, which it reads in block 0: the kernel divides by the length, or does not take 0",
}
"""``seq_lens`` of a padded row under a captured graph."""

FINITE_TAIL: Mapping[bool, str] = {
    False: "rows of a last page that no token owns may hold anything, NaN too: the kernel does not read them",
    True: "they must hold finite numbers: the kernel reads whole pages and multiplies these rows by 0",
}
"""What may stand in the rows of a last page behind the request's tokens."""

FINITE_PASSED_BLOCKS: Mapping[bool, str] = {
    False: "the null block and blocks that a window has passed may hold anything: the kernel does not read them",
    True: "they must hold finite numbers: the kernel reads keys by tiles that begin before the window",
}
"""What may stand in the null block, and in blocks that a window has passed."""

POLICIES = ("strict", "fallback")
"""What happens when the backend named cannot be used: an error, or the next one."""

STATES = ("found", "blocked", "duplicate", "broken", "incompatible", "loaded")
"""What became of an entry point: seen only, kept out, name disputed, failed, another contract version, ready."""

REASON_CODES: Mapping[str, str] = {
    "device": "the spec names no device like this host's",
    "dtype": "the model's dtype",
    "kv_cache_dtype": "the dtype of the KV cache",
    "head_size": "the size of a query and key head",
    "head_size_v": "the size of a value head where it differs",
    "group_size": "query heads per key/value head",
    "block_size": "tokens per block of the kernel",
    "kv_cache_layout": "the order of axes in the cache",
    "max_model_len": "the longest sequence",
    "num_blocks": "the largest block id",
    "mla": "latent attention",
    "unsupported": "a feature that the spec says the backend does not have",
    "undeclared": "a feature of which the spec says nothing",
    "cuda_graph": "the level of graph capture",
    "compiler": "the library compiles at run time and the request forbids it",
    "phase": "prefill or decode alone",
    "requirement": "a distribution that the backend needs is missing or of the wrong version",
    "option": "an option that the spec does not declare, or a bad value for one",
    "check": "the plugin's own check said so",
    "excluded": "the request excludes the backend",
    "not_installed": "attncore knows of the backend; its distribution is not installed",
    "unknown": "the request names a backend that nobody provides",
    "joint": "no common block size, layout and cache dtype with a backend for the other phase, or no common "
    "padding with those of the other layers",
    "blocked": "kept out by ATTNCORE_PLUGINS or ATTNCORE_DISABLE_PLUGINS",
    "duplicate": "the name is claimed twice, or its distribution is installed twice in one folder",
    "broken": "the plugin failed while it was loaded",
    "incompatible": "the plugin was built for another version of the contract",
    "heavy_import": "the plugin's light module imports a heavy library (a warning: it works, slowly)",
}
"""Why a candidate was not chosen: every code a reason may carry."""
