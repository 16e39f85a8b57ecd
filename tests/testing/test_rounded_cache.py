"""The limits of attention over an fp8 cache: against derivatives, and against what rounding does."""

import pytest
import torch

from attncore.dense import dense_attention
from attncore.testing.engines.rounded_cache import ROUNDING, Rounding, squared_bounds, why_beyond

TORCH = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ONE = torch.ones(1, 1)


def drawn(num_queries=3, num_keys=9, heads=4, kv_heads=2, size=8, size_v=6, seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = (num_queries, heads, size), (num_keys, kv_heads, size), (num_keys, kv_heads, size_v)
    return [torch.randn(shape, generator=random) for shape in shapes]


@pytest.mark.parametrize("name", ROUNDING)
def test_a_format_is_off_by_its_half_steps_at_most_and_no_less(name):
    rounding, dtype = ROUNDING[name], TORCH[name]
    numbers = torch.logspace(-22, 8, 200001, base=2.0, dtype=torch.float32)
    error = (numbers.to(dtype).float() - numbers).abs()
    bound = torch.maximum(rounding.half_step * numbers, torch.tensor(rounding.half_least_step))
    assert bool((error <= bound).all())
    assert float((error / numbers)[numbers >= 2.0**-6].max()) > 0.9 * rounding.half_step / (1 + rounding.half_step)
    assert float(error[numbers < rounding.half_least_step / rounding.half_step].max()) > 0.9 * rounding.half_least_step


@pytest.mark.parametrize("shared", [False, True])
def test_bounds_are_those_that_the_derivatives_of_dense_attention_give(shared):
    """Each output's derivative by each element, times what the element is off by; the sum of squares."""
    query, key, value = drawn()
    rounding, k_scale, v_scale = Rounding(0.05, 0.01), torch.tensor([[3.0], [50.0]]), torch.tensor([[0.5], [40.0]])
    of_key, of_value = torch.autograd.functional.jacobian(
        lambda key, value: dense_attention(query, key, value, scale=0.3), (key, value)
    )
    wanted = torch.zeros(3, 4, 6, dtype=torch.float64)
    for derivative, part, scale in ((of_key, key, k_scale), (of_value, value, v_scale)):
        off = torch.maximum(0.05 * part.abs(), 0.01 * scale.expand_as(part))
        wanted += ((derivative * off).double() ** 2).sum(dim=(3, 4, 5))
    found = squared_bounds(rounding, query, key, value, scale=0.3, k_scale=k_scale, v_scale=v_scale, shared=shared)
    torch.testing.assert_close(found, wanted * (4 if shared else 2), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ROUNDING)
def test_what_rounding_does_is_within_the_limits_and_not_far(name):
    query, key, value = drawn(16, 64, 8, 2, 64, 64)
    rounded = [part.to(TORCH[name]).float() for part in (key, value)]
    wanted = dense_attention(query, key, value, scale=0.125)
    error = dense_attention(query, *rounded, scale=0.125) - wanted
    squared = squared_bounds(ROUNDING[name], query, key, value, scale=0.125, k_scale=ONE, v_scale=ONE)
    none = torch.zeros_like(error)
    assert why_beyond(error, squared, none) == ""
    assert "root mean square" in why_beyond(4 * error, squared, none)
    assert "a number is off" in why_beyond(40 * error, squared, none)
    wrong = error.clone()
    wrong[3, 2, 1] = torch.nan
    assert "a number is off by nan" in why_beyond(wrong, squared, none)
    for scales in ((2.0, 1.0), (1.0, 2.0)):  # of another layer
        other = dense_attention(query, *(scale * one for scale, one in zip(scales, rounded, strict=True)), scale=0.125)
        assert why_beyond(other - wanted, squared, none)
