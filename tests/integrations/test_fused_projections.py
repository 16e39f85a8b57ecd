"""fuse_projections: compiled code makes one product for linear layers that read one tensor; nothing else changes."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from integrations.models import DECODERS, decoder  # noqa: E402
from torch import nn  # noqa: E402

from attncore.integrations.transformers.fused_projections import FusedLinear, fuse_projections  # noqa: E402

IDS = torch.arange(7)[None]


def fuse(model, *inputs):
    with torch.inference_mode():
        fuse_projections(model, lambda: model(*inputs))
    return model


def names_of(model):
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, FusedLinear)}


@pytest.mark.parametrize("name", DECODERS)
def test_a_model_keeps_its_values_and_what_it_says(name):
    model = decoder(name)
    with torch.inference_mode():
        before, says = copy.deepcopy(model.state_dict()), model(IDS, use_cache=False).logits
        fuse_projections(model, lambda: model(IDS, use_cache=False))
        assert torch.equal(model(IDS, use_cache=False).logits, says)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert names_of(model) >= {"q_proj", "k_proj", "v_proj"}
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.whole_weight.data_ptr() == attention.q_proj.weight.data_ptr()
    last = attention.v_proj.weight
    assert last.data_ptr() - attention.q_proj.weight.data_ptr() == sum(
        getattr(attention, f"{part}_proj").weight.nbytes for part in "qk"
    )


class Three(nn.Module):
    """Layers ``a`` and ``b`` read one tensor, ``c`` another."""

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(8, size, bias=bias) for size in (3, 5, 8))

    def forward(self, x):
        return torch.cat([self.a(x), self.b(x), self.c(x + 1)], dim=-1)


def products(model, x):
    """How many products compiled code makes, and its result."""
    torch._dynamo.reset()
    count = []

    def backend(graph, inputs):
        count.append(sum(node.target is nn.functional.linear for node in graph.graph.nodes))
        return graph.forward

    with torch.inference_mode():
        result = torch.compile(model.forward, fullgraph=True, backend=backend)(x)
    torch._dynamo.reset()
    return sum(count), result


@pytest.mark.parametrize("bias", [True, False])
def test_compiled_code_makes_one_product_of_several(bias):
    model, x = Three(bias), torch.randn(4, 8)
    with torch.inference_mode():
        says = model(x)
    assert products(model, x)[0] == 3
    count, result = products(fuse(model, x), x)
    assert names_of(model) == {"a", "b"}
    assert count == 2
    torch.testing.assert_close(result, says)
    assert model.a.product.input is model.a.product.output is None


def test_another_input_is_not_taken_for_the_product_of_the_first():
    """A branch that the run did not take: the layers then read tensors of their own."""
    model, x = Three(), torch.randn(4, 8)
    fuse(model, x)
    model.forward = lambda x: torch.cat([model.a(x), model.b(x * 2), model.c(x + 1)], dim=-1)
    with torch.inference_mode():
        says = model.forward(x)
    torch.testing.assert_close(products(model, x)[1], says)


def left_alone(change):
    model = Three()
    change(model)
    assert names_of(fuse(model, torch.randn(4, 8))) == set()


def test_what_is_more_than_a_product_is_left_alone():
    left_alone(lambda model: model.b.register_forward_hook(lambda *_: None))
    left_alone(lambda model: setattr(model.b, "weight", nn.Parameter(torch.zeros(5, 8, dtype=torch.float64)))
               or setattr(model, "forward", lambda x: model.a(x)))  # fmt: skip
    left_alone(lambda model: setattr(model, "b", nn.Sequential(nn.Linear(8, 5))))
    left_alone(lambda model: setattr(model, "b", model.a))
    left_alone(lambda model: setattr(model.b, "forward", lambda x: x[..., :5]))


class Sharded(torch.Tensor):
    """In place of a tensor of which each of several ranks has a part."""


def test_weights_that_are_no_plain_tensors_are_left_alone():
    weight = torch.randn(5, 8).as_subclass(Sharded)
    left_alone(lambda model: setattr(model.b, "weight", nn.Parameter(weight, requires_grad=False)))
