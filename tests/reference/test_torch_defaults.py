"""What the caller set as torch's default dtype and device, or for autocast, changes no result."""

import pytest
import torch

from attncore.dense import dense_attention
from attncore.merge import merge_attention

SLOPES = [0.5, 0.25, 0.125, 0.0625]
ROWS = [(9, 1), (0, 5), (3, 1), (7, 20)]
PLAIN = {"sliding_window": 5}
SPECIAL = {"alibi_slopes": SLOPES, "sinks": [0.5, -1.0, 2.0, 0.0], "logits_soft_cap": 1.5}


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16, "meta", "autocast"], ids=str)
def defaults(request):
    """Sets another default."""
    dtype = torch.get_default_dtype()

    def change():
        if request.param == "meta":
            torch.set_default_device("meta")
        elif request.param == "autocast":
            torch.set_autocast_enabled("cpu", True)
        else:
            torch.set_default_dtype(request.param)

    yield change
    torch.set_autocast_enabled("cpu", False)
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("features", [PLAIN, SPECIAL], ids=["plain", "special"])
def test_reference(paged_case, defaults, features):
    case, same = (paged_case(ROWS, **features) for _ in range(2))
    expected = case.forward()
    defaults()
    assert torch.equal(same.forward(), expected)


def test_dense_and_merge(defaults):
    torch.manual_seed(0)
    query, key, value = torch.randn(4, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)

    def both():
        output, lse = dense_attention(query, key, value, scale=0.3, return_lse=True, sliding_window=3, **SPECIAL)
        return output, lse, *merge_attention([output, output], [lse, lse])

    expected = both()
    defaults()
    for found, wanted in zip(both(), expected, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted)
