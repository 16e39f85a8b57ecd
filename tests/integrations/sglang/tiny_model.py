"""A tiny Llama with random weights, saved to a folder; prints, as JSON, what transformers generates with it.

python tiny_model.py FOLDER
"""

import json
import sys

import torch
from engine_of_sglang import NEW_TOKENS, PROMPTS
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "max_position_embeddings": 2048, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOW = 12


def make(folder, kind):
    """The model, and its files in ``folder``."""
    torch.manual_seed(0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **SIZES))
    else:
        caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": None, "query_pre_attn_scalar": 64}
        act = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}  # SGLang reads the second
        config = Gemma2Config(sliding_window=WINDOW, pad_token_id=0, **act, **caps, **SIZES)
        config._attn_implementation = "eager"  # the other ones have no soft cap
        model = Gemma2ForCausalLM(config)
    model = model.to(torch.float32).eval()
    for weights in model.parameters():
        if weights.dim() == 2:  # large enough that the best tokens differ from each other
            torch.nn.init.normal_(weights, std=0.08)
    if kind == "gemma2":  # its embeddings are its output, too: with large ones each token would follow itself
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.005)
    model.save_pretrained(folder)
    return model


def greedy(model, prompt):
    """The best token, again and again, each from a forward pass over all tokens."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


if __name__ == "__main__":
    made = make(*sys.argv[1:])
    print(json.dumps({"tokens": [greedy(made, prompt) for prompt in PROMPTS]}))
