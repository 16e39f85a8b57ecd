"""Hugging Face transformers over attncore."""

from attncore.integrations.transformers.forward_pass import (
    NAME,
    ModelLayer,
    PagedCaches,
    attention_layers,
    attncore_context,
    paged_caches,
    select_for_model,
)

__all__ = [
    "NAME",
    "ModelLayer",
    "PagedCaches",
    "attention_layers",
    "attncore_context",
    "paged_caches",
    "select_for_model",
]
