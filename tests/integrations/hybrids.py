"""Small random models of transformers with layers that keep states: Mamba, Mamba-2 and gated delta nets."""

import torch
import transformers

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
HYBRIDS = {
    "Bamba": {**MAMBA2, "mamba_expand": 2, "attn_layer_indices": [1]},
    "FalconH1": {**MAMBA2, "head_dim": 8, "mamba_d_ssm": 64},
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "Qwen3Next": {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}
"""Each has a recurrent layer and one of attention; FalconH1 has both in each of its layers."""


def hybrid(name, device="cpu", **more):
    """The model, whose weights are large enough that its states matter for what it says."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE, **HYBRIDS[name], **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("_proj.weight") or "in_proj" in key:
                parameter.normal_(std=0.3)
    return model.to(device)
