"""Linear layers that read the same tensor as one: a compiled layer multiplies by all their weights at once.

Such are query, key and value of an attention, and gate and up of an MLP. What a step of a few tokens costs is the
reading of weights, which one large product does faster than several small ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class _Product:
    """What the first layer of a group computes for all of them, while a compiler traces them, and of what."""

    input: Tensor | None = None
    output: Tensor | None = None


class FusedLinear(nn.Linear):
    """One of several linear layers of one input, whose weights are parts of one tensor.

    In a compiled graph the first one of them multiplies by the whole tensor, and each takes its part of the product.
    Otherwise it is the layer that it was.
    """

    whole_weight: Tensor | None
    whole_bias: Tensor | None

    def __init__(self, former: nn.Linear, whole: tuple[Tensor, Tensor | None], part: slice, product: _Product) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = former.in_features, former.out_features
        self.part, self.product, self.is_last = part, product, part.stop == len(whole[0])
        for name, one in zip(("weight", "bias"), whole, strict=True):
            self.register_parameter(name, None if one is None else nn.Parameter(one[part], requires_grad=False))
            self.register_buffer(f"whole_{name}", None if part.start else one, persistent=False)
        self.train(former.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (nn.Linear's name)
        if not torch.compiler.is_compiling():
            return super().forward(input)
        product = self.product
        if self.whole_weight is not None:
            product.input, product.output = input, nn.functional.linear(input, self.whole_weight, self.whole_bias)
        if product.input is not input or product.output is None:
            return super().forward(input)
        mine = product.output[..., self.part]
        if self.is_last:
            product.input = product.output = None
        return mine


def fuse_projections(model: nn.Module, run: Callable[[], Any]) -> None:
    """Makes parts of one tensor of the weights that read the same tensor, in one module of ``model``, while it runs.

    ``run`` runs the model once. The values of all parameters stay, and what is not compiled computes what it did. Left
    alone are layers of other classes than nn.Linear, with hooks or gradients, that run more than once, and weights that
    several layers have or that are no plain tensors, such as those of one rank of several.
    """
    used = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    names: dict[nn.Linear, tuple[nn.Module, str]] = {}
    for parent in model.modules():
        for name, module in parent.named_children():
            if type(module) is nn.Linear and used[id(module.weight)] == 1 and _plain(module):
                names[module] = parent, name
    inputs: dict[nn.Linear, list[Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(lambda module, given: inputs.setdefault(module, []).append(given[0]))
        for module in names
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[Any, list[nn.Linear]] = {}
    for module, read in inputs.items():
        weight = module.weight
        kind = names[module][0], weight.dtype, weight.device, module.bias is None
        if len(read) == 1:
            groups.setdefault((*kind, id(read[0])), []).append(module)
    for group in groups.values():
        if len(group) > 1:
            for (parent, name), fused in zip(map(names.__getitem__, group), _fused(group), strict=True):
                setattr(parent, name, fused)


def _plain(module: nn.Linear) -> bool:
    """Whether nothing but the layer's own product happens in it."""
    parameters = [one for one in module._parameters.values() if one is not None]
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return not hooked and all(type(one) is nn.Parameter and type(one.data) is Tensor for one in parameters)


def _fused(group: list[nn.Linear]) -> Iterator[FusedLinear]:
    weight = torch.cat([module.weight.data for module in group])
    bias = None if group[0].bias is None else torch.cat([module.bias.data for module in group])
    start, product = 0, _Product()
    for module in group:
        part = slice(start, start + module.out_features)
        yield FusedLinear(module, (weight, bias), part, product)
        start = part.stop
