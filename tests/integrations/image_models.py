"""Small random models of text and images, whose images see themselves in both directions (Gemma 3)."""

import torch
import transformers
from integrations.models import SHAPE

IMAGE, BEGIN, END = 127, 126, 125
"""Tokens: of an image's places, and around them."""
PLACES = 16
"""Tokens of an image."""


def gemma3(window=20, **said):
    """Three layers, of which the second has no window; weights that make images matter for what it says."""
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56,
        "patch_size": 14,
    }  # fmt: skip
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3Config(
        text_config={**SHAPE, "num_hidden_layers": 3, "sliding_window": window, "layer_types": layer_types, **said},
        vision_config=vision, mm_tokens_per_image=PLACES, image_token_index=IMAGE, boi_token_index=BEGIN,
        eoi_token_index=END,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(tuple(f"{one}_proj.weight" for one in "qkvo")):
                parameter.normal_(std=0.3)
            if "multi_modal_projector" in name:
                parameter.normal_()
    return model


def prompt(*parts):
    """Tokens of a prompt: a number is so many of text, None an image."""
    tokens = []
    for part in parts:
        text = [(7 * len(tokens) + i) % 120 for i in range(part or 0)]
        tokens += [BEGIN, *[IMAGE] * PLACES, END] if part is None else text
    return tokens


def images(count, seed=0):
    """Pixels of so many images."""
    return torch.randn(count, 3, 56, 56, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def eager(model, tokens, pixels):
    """The logits of every token by transformers' own eager forward pass."""
    before = {name: getattr(model.config, name)._attn_implementation for name in ("text_config", "vision_config")}
    model.set_attn_implementation("eager")
    ids = torch.tensor([tokens])
    given = {"pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()} if len(pixels) else {}
    logits = model(input_ids=ids, use_cache=False, **given).logits[0]
    model.set_attn_implementation(before)
    return logits
