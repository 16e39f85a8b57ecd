"""What aiter and flash-attn offer, in torch on a CPU: with their arguments' names, and a record of each call.

The functions take keywords only and fail on a name that the real ones do not have; what they answer is right, so that
the kit can run over them.
"""

from __future__ import annotations

import sys
import types

import torch
from attn_rocm import base, spec

from attncore import BackendConfig
from attncore.dense import dense_attention


def rows(query, out, starts, keys_of, *, scale, window, softcap, slopes, sinks=None):
    """Dense attention of each sequence, whose keys ``keys_of(row)`` gives."""
    bounds = starts.tolist()
    for row in range(len(bounds) - 1):
        start, end = bounds[row], bounds[row + 1]
        if start == end:
            continue
        key, value = keys_of(row)
        if not len(key):  # padding
            out[start:end] = 0
            continue
        out[start:end] = dense_attention(
            query[start:end].float(), key.float(), value.float(), scale=scale, sliding_window=window,
            logits_soft_cap=softcap or None, alibi_slopes=slopes, sinks=sinks,
        ).to(out.dtype)  # fmt: skip


def of_pages(key_cache, value_cache, table, lengths):
    """Keys and values of a row, read from blocks (blocks, block size, heads, size)."""

    def keys_of(row):
        length, size = int(lengths[row]), key_cache.shape[1]
        ids = table[row, : -(-length // size)].long()
        return tuple(cache[ids].flatten(0, 1)[:length] for cache in (key_cache, value_cache))

    return keys_of


class Recorded:
    """A library's function that keeps what it was called with."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, **given):
        self.calls.append(given)
        return self.function(**given)


def unified_attention(
    *, q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
    block_table, softcap, q_descale, k_descale, v_descale, alibi_slopes=None, output_scale=None, qq_bias=None,
    sinks=None,
):  # fmt: skip
    assert causal is True
    assert (q_descale, k_descale, v_descale, output_scale, qq_bias) == (None,) * 5
    assert len(seqused_k) == len(cu_seqlens_q) - 1
    assert int(seqused_k.max()) <= max_seqlen_k
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    window = window_size[0] + 1 or None
    assert window_size == ((-1, -1) if window is None else (window - 1, 0))
    rows(
        q, out, cu_seqlens_q, of_pages(k, v, block_table, seqused_k), scale=softmax_scale, window=window,
        softcap=softcap, slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip


def paged_attention_v1(
    *, out, workspace_buffer, query, key_cache, value_cache, scale, block_tables, cu_query_lens, context_lens,
    max_context_len, alibi_slopes, kv_cache_dtype, kv_cache_layout, logits_soft_cap, k_scale, v_scale,
    fp8_out_scale=None, partition_size=256, mtp=1, sliding_window=0,
):  # fmt: skip
    count, heads, size = query.shape
    parts = count * heads * -(-max_context_len // partition_size)
    assert workspace_buffer.dtype == torch.uint8
    assert len(workspace_buffer) >= parts * (size * query.element_size() + 8)
    assert query.is_contiguous()
    assert block_tables.is_contiguous()
    assert int(context_lens.max()) <= max_context_len
    assert (kv_cache_dtype, fp8_out_scale, mtp, sliding_window) == ("auto", None, 1, 0)
    assert float(k_scale) == float(v_scale) == 1.0
    if kv_cache_layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    rows(
        query, out, torch.arange(count + 1), of_pages(key_cache, value_cache, block_tables, context_lens),
        scale=scale, window=None, softcap=logits_soft_cap, slopes=alibi_slopes,
    )  # fmt: skip


def flash_attn_varlen_func(
    *, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    assert causal is True
    assert block_table is None, "this library may ignore it in silence"
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q == max_seqlen_k
    bounds = cu_seqlens_k.tolist()
    out = torch.empty_like(q)
    rows(
        q, out, cu_seqlens_q, lambda row: (k[bounds[row] : bounds[row + 1]], v[bounds[row] : bounds[row + 1]]),
        scale=softmax_scale, window=window_size[0] + 1 or None, softcap=softcap, slopes=alibi_slopes,
    )  # fmt: skip
    return out


def launcher(query, output, lse, starts, keys, scoring, *, most_queries, one_token_each=False):
    """In place of the plugin's kernels, for the steps that go there: decoder layers over a cache, or over raw keys."""
    assert lse is None
    assert scoring.causal
    starts_of, table = starts.tolist(), keys.table

    def keys_of(row):
        count, length = starts_of[row + 1] - starts_of[row], int(keys.lengths[row])
        if keys.raw_rows <= row or (keys.written and length > count):
            return of_pages(keys.key_cache, keys.value_cache, table, keys.lengths)(row)
        fresh = [part[starts_of[row] : starts_of[row + 1]] for part in (keys.key, keys.value)]
        if table is None or length == count:
            return fresh
        lengths = keys.lengths - starts.diff()
        old = of_pages(keys.key_cache, keys.value_cache, table, lengths)(row)
        return [torch.cat(pair) for pair in zip(old, fresh, strict=True)]

    output[starts_of[-1] :] = 0
    rows(
        query, output, starts, keys_of, scale=scoring.scale, window=scoring.window, softcap=scoring.soft_cap,
        slopes=None if scoring.slopes is None else scoring.slopes / 1.4426950408889634,
        sinks=scoring.sinks,
    )  # fmt: skip


MODULES = {
    "aiter": ("aiter.ops.triton.unified_attention", "unified_attention", unified_attention),
    "aiter_paged": ("aiter.ops.attention", "paged_attention_v1", paged_attention_v1),
    "ck": ("flash_attn", "flash_attn_varlen_func", flash_attn_varlen_func),
}


def install(monkeypatch, variant):
    """The library of ``variant`` as a stand-in, on a CPU that passes for a gfx942; its recorded function."""
    module, name, function = MODULES[variant]
    recorded = Recorded(function)
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        made = types.ModuleType(".".join(parts[:count]))
        made.__path__ = []
        monkeypatch.setitem(sys.modules, made.__name__, made)
    setattr(sys.modules[module], name, recorded)
    monkeypatch.setattr(base, "architecture", lambda device: ("gfx942", 304))
    return recorded


def backend(variant, **changes):
    """A backend of ``variant`` on the CPU, whose own kernels are a stand-in too."""
    import importlib

    form = dict(spec.make_spec().by_variant)[variant]
    module, _, name = form.factory.partition(":")
    fields = {
        "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", "block_size": 16, "variant": variant,
        "spec": form, "options": {"kernel": "auto"},
    }  # fmt: skip
    made = getattr(importlib.import_module(module), name)(BackendConfig(**{**fields, **changes}))
    if hasattr(made, "launcher"):
        made.launcher = Own(launcher)
    return made


class Own(Recorded):
    """The stand-in of the plugin's kernels, which are called by position too."""

    def __call__(self, *args, **given):
        self.calls.append((args, given))
        return self.function(*args, **given)
