"""The images in a prompt whose tokens see each other in both directions, as spans of the batch."""

from __future__ import annotations

from typing import Any

from attncore import arguments
from attncore.integrations.transformers.checked_model import check_model
from attncore.show import counted

_BOTH_WAYS = ("gemma3",)
"""The ``model_type`` of models in which runs of image tokens see each other, and nothing else does."""


def image_spans(model: Any, tokens: Any) -> list[tuple[int, int]]:
    """Where the images of a prompt begin and end, for ``InputBatch.set_spans``: runs of ``config.image_token_id``.

    transformers' own forward pass makes masks of ``token_type_ids`` for them. A model over paged caches is given none,
    nor ``attention_mask``: the batch's spans say the same. ValueError for another model than Gemma 3, and where an
    image is longer than the window of the model's layers: its tokens then see back no further than the window there,
    while those of a span see all of it.
    """
    check_model(model, configured=True)
    config = model.config
    if config.model_type not in _BOTH_WAYS:
        raise ValueError(
            f"model: {type(model).__name__} is of type {config.model_type}; images that see themselves in both "
            f"directions are known of {', '.join(_BOTH_WAYS)}; if its images are causal, set no spans"
        )
    spans: list[tuple[int, int]] = []
    for position, token in enumerate(arguments.items("tokens", tokens)):
        if arguments.integer(f"tokens, at index {position}", token, 0) != config.image_token_id:
            continue
        joins = spans and spans[-1][1] == position
        spans[-1:] = [(spans[-1][0], position + 1)] if joins else [*spans[-1:], (position, position + 1)]
    window = getattr(config.get_text_config(), "sliding_window", None)
    for start, stop in spans:
        if window is not None and stop - start > window:
            raise ValueError(
                f"tokens: the image at {start} has {counted(stop - start, 'token')}, more than the sliding window "
                f"{window}; the model's own masks hide its first tokens from its last then, and spans do not"
            )
    return spans
