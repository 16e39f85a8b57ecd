"""fuse_projections: compiled code makes one product for linear layers that read one tensor; nothing else changes."""

import copy
import io
import weakref
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("transformers", reason="transformers is not installed")

from integrations.models import DECODERS, decoder  # noqa: E402
from torch import nn  # noqa: E402

from attncore.integrations.transformers.fused_projections import (  # noqa: E402
    FusedLinear,
    fuse_projections,
    products_in,
)

IDS = torch.arange(7)[None]


def fuse(model, *inputs):
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
    assert all(product.is_whole() for product in products_in(model))
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

    with torch.inference_mode(), opened(model):
        result = torch.compile(model.forward, fullgraph=True, backend=backend)(x)
    torch._dynamo.reset()
    return sum(count), result


@contextmanager
def opened(model):
    """As while a layer runs compiled."""
    for product in products_in(model):
        product.open()
    yield
    for product in products_in(model):
        product.close()


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


def test_parameters_and_layers_stay_the_objects_that_they_are():
    model = Three()
    model.a.weight.requires_grad_(False)
    model.a.register_buffer("scale", torch.ones(1))
    before = {name: (one, one.requires_grad) for name, one in model.named_parameters()}
    layers, names = [model.a, model.b], list(model.state_dict())
    fuse(model, torch.randn(4, 8))
    assert [model.a, model.b] == layers
    assert names_of(model) == {"a", "b"}
    assert list(model.state_dict()) == names
    for name, one in model.named_parameters():
        assert one is before[name][0]
        assert one.requires_grad is before[name][1]


def test_former_weights_are_freed_one_group_after_another(monkeypatch):
    model, former, alive = nn.ModuleList([Three(), Three()]), [], []
    for three in model:
        array = np.ones((3, 8), np.float32)
        three.a.weight.data = torch.from_numpy(array)
        former.append(weakref.ref(array))
        del array

    cat = torch.cat
    monkeypatch.setattr(
        torch, "cat", lambda parts: alive.append(sum(one() is not None for one in former)) or cat(parts)
    )
    x = torch.randn(4, 8)
    fuse_projections(model, lambda: [layer(x) for three in model for layer in (three.a, three.b)])
    assert alive == [2, 2, 1, 1]  # products of weights and of biases
    assert [one() for one in former] == [None, None]


def assigned(model, other):
    model.load_state_dict(other.state_dict(), assign=True)


def of_data(model, other):
    for mine, given in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = given.data


def of_one_layer(model, other):
    model.b.weight.data = other.b.weight.data


def moved_and_loaded(model, other):
    model.double().float().load_state_dict(other.state_dict())


def loaded(model, other):
    model.load_state_dict(other.state_dict())


def added_to(model, other):
    model.b.weight.data += other.b.weight.data


def parametrized(model, other):
    nn.utils.parametrizations.weight_norm(model.b).weight  # noqa: B018


def without_bias(model, other):
    model.b.bias = None


def transposed(model, other):
    model.b.weight.data = model.b.weight.data.mT


def replaced_by_its_transpose(model, other):
    model.b.weight = nn.Parameter(model.b.weight.data.mT)


def transposed_in_place(model, other):
    with torch.no_grad():
        model.b.weight.transpose_(0, 1)


def one_row_for_all(model, other):
    model.b.weight.data = model.b.weight.data[:1].expand(8, 8)


@pytest.mark.parametrize("change", [transposed, replaced_by_its_transpose, transposed_in_place, one_row_for_all])
def test_another_view_of_a_layers_own_weight_is_another_weight(change):
    torch.manual_seed(1)
    model, x = Three(bias=False), torch.randn(4, 8)
    model.b = nn.Linear(8, 8, bias=False)
    fuse(model, x)
    change(model, None)
    with torch.inference_mode():
        says = model(x)
    torch.testing.assert_close(products(model, x)[1], says)


def test_weights_without_memory_are_other_weights():
    """As those of a model that is moved to the device meta, and brought back with others."""
    model, x = Three(bias=False), torch.randn(4, 8)
    fuse(model, x)
    values = {name: one.clone() for name, one in model.state_dict().items()}
    model.to("meta")
    with torch.inference_mode():
        assert model(x.to("meta")).is_meta
        assert products(model, x.to("meta"))[1].is_meta
    model.to_empty(device="cpu").load_state_dict(values)
    with torch.inference_mode():
        says = model(x)
    torch.testing.assert_close(products(model, x)[1], says)


@pytest.mark.parametrize(
    "change",
    [assigned, of_data, of_one_layer, moved_and_loaded, loaded, added_to, parametrized, without_bias],
)
def test_weights_that_change_later_are_those_that_compiled_code_uses(change):
    torch.manual_seed(1)
    other, x = Three(), torch.randn(4, 8)
    for parameter in other.parameters():
        parameter.data.normal_()
    model = fuse(Three(), x)
    change(model, other)
    with torch.inference_mode():
        says = model(x)
    torch.testing.assert_close(products(model, x)[1], says)


def test_a_bias_that_is_given_later_is_added():
    x = torch.randn(4, 8)
    model = fuse(Three(bias=False), x)
    model.b.bias = nn.Parameter(torch.randn(5))
    with torch.inference_mode():
        says = model(x)
    torch.testing.assert_close(products(model, x)[1], says)


def doubled(module, given):
    given[0].mul_(2)


def test_a_hook_that_is_given_later_may_change_the_input_in_place():
    x = torch.randn(4, 8)
    model = fuse(Three(), x)
    model.b.register_forward_pre_hook(doubled)
    with torch.inference_mode():
        says = model(x.clone())
    torch.testing.assert_close(products(model, x.clone())[1], says)


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(("copied", "again"), [(copy.deepcopy, 2), (pickled, 3)])
def test_a_copy_has_weights_of_its_own(copied, again):
    """Loaded ones share memory with each other, as they did, and are not fused again."""
    x = torch.randn(4, 8)
    model = fuse(Three(), x)
    other = copied(model)
    for parameter in other.parameters():
        parameter.data.normal_()
    with torch.inference_mode():
        says = other(x)
    count, result = products(other, x)
    assert count == 3
    torch.testing.assert_close(result, says)
    count, result = products(fuse(other, x), x)
    assert count == again
    torch.testing.assert_close(result, says)
    assert products(model, x)[0] == 2


def test_what_is_compiled_elsewhere_uses_the_layers_own_parameters():
    model, x = Three(), torch.randn(4, 8)
    fuse(model, x)
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.inference_mode():
        compiled(x)
        model.b.weight.data = torch.randn(5, 8)
        torch.testing.assert_close(compiled(x), model.forward(x))
    torch._dynamo.reset()


def test_gradients_are_those_of_the_layers_own_parameters():
    model, x = Three(), torch.randn(4, 8)
    fuse(model, x)
    with opened(model):
        torch.compile(model.forward, fullgraph=True, backend="eager")(x).sum().backward()
    torch._dynamo.reset()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_tensor_that_is_changed_between_two_layers_is_not_the_same():
    model = Three()
    model.forward = lambda x: torch.cat([model.a(y := x + 0), model.b(y.mul_(2))], dim=-1)
    assert names_of(fuse(model, torch.zeros(4, 8))) == set()


def test_a_tensor_given_by_its_name_is_left_alone():
    model = Three()
    model.forward = lambda x: torch.cat([model.a(input=x), model.b(input=x)], dim=-1)
    assert names_of(fuse(model, torch.randn(4, 8))) == set()


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


def test_weights_that_share_memory_are_left_alone():
    def tied(model):
        model.other = nn.Linear(8, 5)
        model.other.weight.data = model.b.weight.data

    def parts_of_one(model):
        whole = torch.randn(8, 8)
        model.a.weight.data, model.b.weight.data = whole[:3], whole[3:]

    left_alone(tied)
    left_alone(parts_of_one)


class Sharded(torch.Tensor):
    """In place of a tensor of which each of several ranks has a part."""


def test_weights_that_are_no_plain_tensors_are_left_alone():
    weight = torch.randn(5, 8).as_subclass(Sharded)
    left_alone(lambda model: setattr(model.b, "weight", nn.Parameter(weight, requires_grad=False)))
