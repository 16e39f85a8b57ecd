"""Small random models of transformers, one of each kind that the integration is for."""

import logging

import torch
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

logging.getLogger("transformers").setLevel(logging.ERROR)  # it prints each generation config

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
DECODERS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"sliding_window": 5, "query_pre_attn_scalar": 24}),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
}


def decoder(name, seed=0, dtype=torch.float32, **shape):
    """The model, whose weights are large enough that its attention matters for what it says."""
    kind, config, more = DECODERS[name]
    torch.manual_seed(seed)
    return _sharp(kind(config(**{**SHAPE, **more, **shape})).eval().to(dtype))


def _sharp(model):
    projections = [f"{name}_proj.weight" for name in ("q", "k", "v", "o", "qkv")]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((*projections, "sinks")):
                parameter.normal_(std=0.3)
    return model


def encoder(kind=BertModel, config=BertConfig):
    torch.manual_seed(0)
    shape = {name: SHAPE[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    model = kind(config(num_attention_heads=4, **shape), add_pooling_layer=False).eval()
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.normal_(std=0.5)
    return model


def greedy(model, prompt, count):
    """What the model's own eager generate says after one prompt."""
    before, model.generation_config.eos_token_id = model.config._attn_implementation, None
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    model.set_attn_implementation(before)
    return found[0, len(prompt) :].tolist()


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def phi3(original=32):
    """A model of rope type longrope, whose frequencies change where a row is longer than ``original``."""
    rope = {**LONGROPE, "original_max_position_embeddings": original}
    shape = {name: size for name, size in SHAPE.items() if name != "head_dim"}
    torch.manual_seed(0)
    config = Phi3Config(**shape, original_max_position_embeddings=original, pad_token_id=0, rope_parameters=rope)
    return _sharp(Phi3ForCausalLM(config).eval())
