"""Models of Hugging Face transformers on paged caches, by whatever backend is chosen.

Importing this package registers the attention implementation ``attncore`` with transformers. What each layer asks for
(its window, soft cap, scale, sinks) is taken from what it passes to its attention in a run of one token.

- ``compiled_layers``: torch.compile of each layer of a model.
- ``fused_projections``: one product for linear layers that read the same tensor.
- ``piecewise_graph``: CUDA graphs of what a model computes between its attention.
- ``forward_pass``: a model's paged caches, and the context in which it runs over them.
- ``recurrent_layers``: the states of Mamba and gated delta nets in slots.
- ``image_spans``: the images in a prompt, which see themselves in both directions.
- ``choose_backend``: one backend for all layers of a model.
- ``plain_prefill``: prompts of latent layers by keys and values of every head.
- ``latent_layers``: layers of latent attention over latent caches.
- ``model_layers``: the layers of a model and what each asks for; ``refused_models``: models that cannot run.
- ``attention_interface``: the function that models call.

Each imports only from those after it.
"""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    from attncore.how_to_install import missing_module

    raise ImportError(f"attncore.integrations.transformers: {missing_module(error, 'transformers')}") from error

from attncore.integrations.transformers.attention_interface import NAME
from attncore.integrations.transformers.choose_backend import select_for_model
from attncore.integrations.transformers.compiled_layers import compile_layers
from attncore.integrations.transformers.forward_pass import PagedCaches, attncore_context, paged_caches
from attncore.integrations.transformers.image_spans import image_spans
from attncore.integrations.transformers.latent_layers import use_latent_caches
from attncore.integrations.transformers.model_layers import ModelLayer, attention_layers
from attncore.integrations.transformers.piecewise_graph import PiecewiseGraph, capture_between_attention
from attncore.integrations.transformers.plain_prefill import PlainPrefill, plain_prefill
from attncore.integrations.transformers.recurrent_layers import StateCaches, recurrent_layers

__all__ = [
    "NAME",
    "ModelLayer",
    "PagedCaches",
    "PiecewiseGraph",
    "PlainPrefill",
    "StateCaches",
    "attention_layers",
    "attncore_context",
    "capture_between_attention",
    "compile_layers",
    "image_spans",
    "paged_caches",
    "plain_prefill",
    "recurrent_layers",
    "select_for_model",
    "use_latent_caches",
]
