"""What becomes of a latent layer's ``kv_b_proj`` after its caches were made: new weights count, all else is refused."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from integrations.latent_models import latent_model  # noqa: E402
from integrations.test_latent_models import Rows, prompts  # noqa: E402
from torch.nn.utils.parametrizations import weight_norm  # noqa: E402

SAID = prompts(9)[0]


class Adapter(torch.nn.Module):
    """Of rank 1, without effect as long as ``up`` is zero or it is off."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.on = layer, ["default"]
        self.down = torch.nn.Linear(layer.in_features, 1, bias=False)
        self.up = torch.nn.Parameter(torch.zeros(layer.out_features))

    weight = property(lambda self: self.layer.weight)
    bias = property(lambda self: self.layer.bias)

    def forward(self, rows):
        found = self.layer(rows)
        return found + self.down(rows) * self.up if self.on else found


def projection_of(model):
    return model.model.layers[1].self_attn.kv_b_proj


def put(model, projection):
    model.model.layers[1].self_attn.kv_b_proj = projection


def train(adapter):
    with torch.no_grad():
        adapter.up.fill_(1.0)


def adapt(model):
    put(model, Adapter(projection_of(model)))
    train(projection_of(model))


def wrap(model):
    plain = projection_of(model).forward
    projection_of(model).forward = lambda rows: 2 * plain(rows)


def give_a_bias(model):
    projection_of(model).bias = torch.nn.Parameter(torch.ones(112))


def eager(model):
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(input_ids=torch.tensor([SAID]), use_cache=False).logits[0]


def rows_over(model):
    rows = Rows(model)
    for row in range(3):
        rows.add(row, 9)
    torch.testing.assert_close(rows({0: SAID})[0], eager(model), atol=2e-4, rtol=2e-4)
    return rows


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (adapt, "kv_b_proj, a Adapter, may compute more"),
        (lambda model: projection_of(model).register_forward_hook(lambda *given: 2 * given[-1]), "may compute more"),
        (
            lambda model: projection_of(model).register_forward_pre_hook(lambda _, given: 2 * given[0]),
            "may compute more",
        ),
        (wrap, "kv_b_proj, a Linear, may compute more"),
        (lambda model: projection_of(model).register_forward_hook(lambda *given: None), "may compute more"),
        (give_a_bias, "kv_b_proj has a bias"),
        (lambda model: put(model, torch.nn.Linear(32, 57, bias=False)), r"kv_b_proj has a weight \(57, 32\)"),
    ],
    ids=["adapter", "hook", "hook before", "forward", "hook without effect", "bias", "another shape"],
)
def test_what_is_put_beside_the_weight_later_is_refused(change, says):
    rows = rows_over(latent_model("deepseek_v3"))
    change(rows.model)
    with pytest.raises(ValueError, match=rf"^layer model\.layers\.1\.self_attn: .*{says}.*; it has changed since "):
        rows({1: SAID})


def test_an_adapter_that_adds_nothing_is_refused_at_once():
    """What is written to it later, through ``.data`` say, is counted nowhere."""
    model = latent_model("deepseek_v3")
    put(model, Adapter(projection_of(model)))
    with pytest.raises(ValueError, match="kv_b_proj, a Adapter, may compute more than the product with its weight"):
        rows_over(model)


def drawn():
    return torch.nn.Parameter(torch.randn((112, 32), generator=torch.Generator().manual_seed(3)) / 6)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: projection_of(model).weight.data.copy_(drawn()),
        lambda model: setattr(projection_of(model), "weight", drawn()),
        lambda model: put(model, torch.nn.Linear(32, 112, bias=False)),
        lambda model: weight_norm(projection_of(model)).parametrizations.weight.original0.data.mul_(2),
    ],
    ids=["in place", "another tensor", "another layer", "parametrization"],
)
def test_weights_that_can_be_absorbed_are_those_of_each_step(change):
    rows = rows_over(latent_model("deepseek_v3"))
    change(rows.model)
    expected = eager(rows.model)
    for row in (1, 2):
        torch.testing.assert_close(rows({row: SAID})[row], expected, atol=2e-4, rtol=2e-4)
