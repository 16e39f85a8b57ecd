"""Slopes of either sign, over more keys than 16 bits tell apart."""

import pytest
import rocm_standins as standins

from attncore.testing.engines.engine import Engine


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torchs_kernels_tell_far_keys_apart(dtype, monkeypatch):
    """A slope below 0 gives the farthest keys the most weight: biases of -90 and less, which differ by 0.1."""
    standins.install(monkeypatch, "aiter")
    backend = standins.backend("sdpa", dtype=dtype)
    engine = Engine(backend, num_blocks=80, alibi_slopes=(-0.1, -0.03, 0.25, -0.5))
    engine.add("a", 940)
    engine.fill({"a": 900})
    engine.step({"a": 17})
    engine.step({"a": 1})
