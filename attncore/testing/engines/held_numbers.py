"""What an fp8 cache holds: times the layer's scales it is what was written, for an engine may read and write it so."""

from __future__ import annotations

import numpy as np

from attncore.testing.engines.engine import Engine
from attncore.testing.engines.random_tensors import FP8, scale_of
from attncore.testing.harness.errors import ConformanceError


def check_held_numbers(engine: Engine) -> None:
    """ConformanceError unless the views of an engine's cache hold the requests' keys and values over the scales.

    Wrong scales that a layer both writes and reads by give right outputs. Keys and values must lie on the engine's
    grid, which the cache holds exactly. A cache without views is not looked at.
    """
    try:
        views = engine.backend.kv_cache_views(engine.kv_cache)
    except ValueError:
        return
    kinds = ("key",) if engine.config.use_mla else ("key", "value")  # latent values are a part of the keys
    for index, kind in enumerate(kinds):
        scale = scale_of(engine.features, f"{kind[0]}_scale")
        held = views[index].cpu()
        held = (held if held.dtype.is_floating_point else held.view(FP8[engine.config.kv_cache_dtype])).float()
        for name, history in engine.history.items():
            written = history[index]
            tokens, blocks = np.arange(len(written)), np.array(engine.batch.block_ids(name))
            found = held[blocks[tokens // engine.block_size], tokens % engine.block_size]
            wrong = (found * scale != written).nonzero()
            if len(wrong):
                token, head, _ = place = tuple(wrong[0].tolist())
                number = float(scale.expand(written.shape[1], 1)[head])
                raise ConformanceError(
                    f"the cache holds {float(found[place]):g} for a {kind} of {float(written[place]):g} (request "
                    f"{name}, token {token}, head {head}), whose {kind[0]}_scale is {number:g}: what it holds times "
                    "the scale must be what was written, for an engine may write it too"
                )
