"""A tiny Llama with random weights, saved to a folder; prints, as JSON, what transformers generates with it.

python tiny_model.py FOLDER
"""

import json
import sys

import torch
from engine_of_sglang import NEW_TOKENS, PROMPTS
from transformers import LlamaConfig, LlamaForCausalLM


def make(folder):
    """The model, and its files in ``folder``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=1000, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    for weights in model.parameters():
        if weights.dim() == 2:  # large enough that the best tokens differ from each other
            torch.nn.init.normal_(weights, std=0.08)
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
    made = make(sys.argv[1])
    print(json.dumps({"tokens": [greedy(made, prompt) for prompt in PROMPTS]}))
