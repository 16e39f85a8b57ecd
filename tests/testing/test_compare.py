"""What the kit takes for the same."""

from types import SimpleNamespace

import pytest
import torch

from attncore.testing.engines.compare import StepRequest, compare
from attncore.testing.harness.errors import ConformanceError

CONFIG = SimpleNamespace(
    num_heads=1,
    num_kv_heads=1,
    head_size=2,
    block_size=4,
    dtype="bfloat16",
    kv_cache_dtype="fp8_e4m3",
    use_mla=False,
)


def compared(found, wanted, v_scale):
    engine = SimpleNamespace(
        config=CONFIG, tolerance=0.08, junk=7.0, has_padding=False, features={"scale": 1.0, "v_scale": v_scale}
    )
    tensors = (torch.tensor(one).view(1, 1, 2) for one in (found, wanted))
    answer, expected = tensors
    return compare(answer, [expected], [StepRequest("a", 1, 0)], engine)


def test_errors_are_measured_in_units_of_the_values_scale():
    assert compared([2.0, 900.0], [0.5, 905.0], 1024.0) == pytest.approx(5.0)
    with pytest.raises(ConformanceError, match="differs from dense float32 attention"):
        compared([200.0, 900.0], [0.5, 905.0], 1024.0)
    with pytest.raises(ConformanceError, match="differs from dense float32 attention"):
        compared([0.5, 905.0 / 1024], [0.5, 905.0], 1024.0)  # v_scale was not applied
    with pytest.raises(ConformanceError, match="differs from dense float32 attention"):
        compared([2.0, 1.0], [0.5, 1.0], 1.0)
    with pytest.raises(ConformanceError, match="differs from dense float32 attention"):
        compared([0.2, 0.1], [0.5, 0.1], 0.01)  # a small one makes nothing stricter, and nothing laxer
