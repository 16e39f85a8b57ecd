"""Sinks of a layer: a tensor of its own, in which set_sinks writes them; slopes, which stay what they were."""

import pytest

torch = pytest.importorskip("torch")

from attncore import BackendConfig  # noqa: E402
from attncore.reference import ReferenceBackend, ReferenceImpl  # noqa: E402

GIVEN = [0.5, -1.0, 2.0, 0.0]


def layer(**features):
    return ReferenceBackend(BackendConfig(4, 2, 8, "float32", 16)).impl("layers.7", scale=1.0, **features)


@pytest.mark.parametrize(
    "given",
    [GIVEN, torch.tensor(GIVEN), torch.nn.Parameter(torch.tensor(GIVEN, dtype=torch.bfloat16))],
    ids=["numbers", "tensor", "parameter"],
)
def test_a_layer_has_a_tensor_of_its_own_that_is_written_in_place(given):
    with torch.inference_mode():
        made = layer(sinks=given)
    held = made.sinks
    assert held is not given
    assert (held.dtype, held.tolist(), held.requires_grad) == (torch.float32, GIVEN, False)
    if torch.is_tensor(given):
        given.data.fill_(9.0)
        assert held.tolist() == GIVEN  # until it is told
    made.set_sinks(given)
    assert made.sinks is held
    assert held.tolist() == (GIVEN if isinstance(given, list) else [9.0] * 4)
    assert made._scoring.sinks.flatten().tolist() == held.tolist()
    assert not held.requires_grad
    with torch.inference_mode():
        made.set_sinks(torch.zeros(4, dtype=torch.float64))
    assert held.tolist() == [0.0] * 4


def test_a_class_that_keeps_something_of_sinks_is_told():
    class Doubled(ReferenceImpl):
        doubled = None

        def sinks_changed(self):
            self.doubled = [2 * sink for sink in self.sinks.tolist()]

    backend = ReferenceBackend(BackendConfig(4, 2, 8, "float32", 16))
    made = Doubled(backend, "x", scale=1.0, sinks=GIVEN)  # by hand: numbers
    made.set_sinks([1, 2, 3, float("-inf")])
    assert made.doubled == [2, 4, 6, float("-inf")]


@pytest.mark.parametrize(
    ("sinks", "text"),
    [
        ([1.0], "sinks: 1 given; the backend has 4 query heads"),
        (torch.zeros(4, 1), r"sinks: shape \(4, 1\) given; give one for each query head, 4 in all"),
        (["a", 0, 0, 0], r"sinks\[0\]: 'a' is not a finite number of float32"),
        (torch.zeros(4, device="meta"), "sinks: on meta, which holds no numbers"),
        (None, "sinks: .*None"),
    ],
)
def test_what_is_refused_changes_nothing(sinks, text):
    made = layer(sinks=GIVEN)
    with pytest.raises(ValueError, match=f"^{text}"):
        made.set_sinks(sinks)
    assert made.sinks.tolist() == GIVEN


def test_a_layer_without_sinks_is_given_none_later():
    with pytest.raises(ValueError, match=r"^sinks: layer 'layers\.7' was made without; make it with sinks"):
        layer().set_sinks(GIVEN)


def test_slopes_are_those_that_were_given():
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    made = layer(alibi_slopes=slopes)
    slopes.zero_()
    assert made._scoring.alibi_slopes.flatten().tolist() == made.alibi_slopes.tolist() == [0.5, 0.25, 0.125, 0.0625]
