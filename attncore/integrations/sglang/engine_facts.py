"""What SGLang says of a model and of how it runs it, read once when the backend is made, and what is refused of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_parallel


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer as SGLang declares it, in attncore's words."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    sliding_window: int | None
    """Tokens a query sees, itself included: SGLang counts those behind it."""
    logits_soft_cap: float | None
    sinks: Any
    """(num_heads,): the parameter of the module that holds the layer; None where it has none."""
    k_scale: float
    v_scale: float
    """1.0 of a cache that is not fp8: SGLang loads those of a checkpoint for any cache, and uses them for fp8 alone."""
    in_window_pool: bool
    """Whether its keys and values are in the pool of windowed layers, whose slots are numbered apart."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What layers of one kind share: one request is made for them."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v)
        scaled = (self.k_scale, self.v_scale) != (1.0, 1.0)
        return (*sizes, self.sliding_window, self.logits_soft_cap, self.sinks is not None, scaled, self.in_window_pool)


def layers_of(model: Any, pool: Any) -> dict[Any, Layer]:
    """The attention layers of a model by their modules; ValueError that names one which no backend runs."""
    found: dict[Any, Layer] = {}
    for name, module in model.named_modules():
        if isinstance(module, RadixAttention):
            holder = model.get_submodule(name.rpartition(".")[0])
            found[module] = layer_of(name, module, pool, getattr(holder, "sinks", None))
    return found


def layer_of(name: str, module: Any, pool: Any, sinks: Any = None) -> Layer:
    """One layer; ValueError that names it where it asks for what no backend runs."""
    for problem in _layer_problems(module):
        raise ValueError(f"layer {name}: {problem}; choose another --attention-backend")
    window, layer_id, is_fp8 = module.sliding_window_size, module.layer_id, pool.dtype.itemsize == 1
    return Layer(
        name,
        module.tp_q_head_num,
        module.tp_k_head_num,
        module.qk_head_dim,
        module.v_head_dim,
        float(module.scaling),
        window + 1 if window > -1 else None,
        float(module.logit_cap) or None,
        sinks,
        _scale(module.k_scale_float if is_fp8 else None),
        _scale(module.v_scale_float if is_fp8 else None),
        isinstance(pool, SWAKVPool) and pool.layers_mapping[layer_id][1],
    )


def _scale(given: float | None) -> float:
    return 1.0 if given is None else float(given)


def _layer_problems(module: Any) -> Iterator[str]:
    """Why no backend of attncore runs a layer behind SGLang."""
    if module.is_cross_attention:
        yield "cross attention, which attncore does not run inside SGLang"
    if module.attn_type is not AttentionType.DECODER:
        yield f"attention of type {module.attn_type.value}, and attncore runs causal attention alone inside SGLang"
    if module.pos_encoding_mode != "NONE":
        yield f"pos_encoding_mode {module.pos_encoding_mode}, which no backend of attncore has"
    if module.logit_cap and module.logit_capping_method != "tanh":
        yield f"logit_capping_method {module.logit_capping_method}, and attncore's soft cap is tanh"
    if module.xai_temperature_len > 0:
        yield "a temperature that grows with the length (xai_temperature_len), which no backend of attncore has"


def refuse_engine(runner: Any) -> None:
    """ValueError with one sentence for what SGLang is run with and attncore does not run."""
    for problem in _engine_problems(runner):
        raise ValueError(f"{problem}; choose another --attention-backend, or leave that out")


def _engine_problems(runner: Any) -> Iterator[str]:
    config, parallel, args = runner.model_config, get_parallel(), runner.server_args
    if runner.use_mla_backend:
        yield "the model has latent attention (MLA), which attncore does not run inside SGLang"
    if config.is_encoder_decoder:
        yield "the model has an encoder beside its decoder, and attncore runs decoders alone inside SGLang"
    if config.attention_chunk_size is not None:
        yield "the model's layers attend within chunks (attention_chunk_size), which attncore does not do inside SGLang"
    if getattr(parallel, "attn_dcp_size", 1) > 1 or getattr(parallel, "attn_cp_size", 1) > 1:
        yield "context parallelism is on, which attncore does not run inside SGLang"
    if not runner.spec_algorithm.is_none():
        yield f"speculative decoding ({runner.spec_algorithm.name}) is on, which attncore does not run inside SGLang"
    if args.dllm_algorithm is not None:
        yield "the model decodes by diffusion (dllm_algorithm), which attncore does not run"
    if args.cuda_graph_config is not None and args.cuda_graph_config.prefill.backend == Backend.FULL:
        yield "prefills are captured whole (cuda_graph_config), and attncore plans prefills outside of graphs"
    pools = [runner.token_to_kv_pool]
    if type(pools[0]) is SWAKVPool:
        pools = [pools[0].full_kv_pool, pools[0].swa_kv_pool]
    for pool in pools:
        if type(pool) is not MHATokenToKVPool:
            yield f"the KV cache is a {type(pool).__name__}, and attncore takes pools of keys and values (MHA) alone"
        elif pool.kv_cache_layout != "nhd" or pool.is_quantized_kv_cache:
            what = "quantised" if pool.is_quantized_kv_cache else f"laid out as {pool.kv_cache_layout}"
            yield f"the KV cache is {what}, and attncore takes nhd caches of floats, or fp8"


def captures_decodes(runner: Any) -> bool:
    """Whether SGLang captures decodes in graphs on this device."""
    graphs = runner.server_args.cuda_graph_config
    return runner.device == "cuda" and graphs is not None and graphs.decode.backend != Backend.DISABLED
