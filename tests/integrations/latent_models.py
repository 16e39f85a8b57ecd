"""Small random models with latent attention (MLA), as DeepSeek's second and third are made."""

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
MODELS = {
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config, {"q_lora_rank": None}),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {"q_lora_rank": 24}),
}


def latent_model(name, seed=0, dtype=torch.float32, **shape):
    """The model, whose weights are large enough that its attention matters for what it says."""
    kind, config, more = MODELS[name]
    torch.manual_seed(seed)
    model = kind(config(**{**SHAPE, **more, **shape})).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "self_attn" in parameter_name and parameter.dim() == 2:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    return model.to(dtype)
