"""Linear layers that read the same tensor as one: a compiled layer multiplies by all their weights at once.

Such are query, key and value of an attention, and gate and up of an MLP. What a step of a few tokens costs is the
reading of weights, which one large product does faster than several small ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn


class FusedLinear(nn.Linear):
    """One of several linear layers of one input, whose weights are parts of one tensor.

    In a compiled layer the first one of them multiplies by the whole tensor, and each takes its part of the product.
    Otherwise it is the layer that it was.
    """

    product: Product
    part: slice
    whole_weight: Tensor | None
    whole_bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (nn.Linear's name)
        if not torch.compiler.is_compiling() or torch.is_grad_enabled():  # gradients are those of the layer's own
            return super().forward(input)
        product = self.product
        if self.whole_weight is not None:
            product.input, product.output = input, nn.functional.linear(input, self.whole_weight, self.whole_bias)
        if product.input is not input or product.output is None:
            return super().forward(input)
        mine = product.output[..., self.part]
        if product.last is self:
            product.input = product.output = None
        return mine


class Product:
    """The weights of a group as one, and what its first layer computes of them, while a compiler traces the group.

    A copy, of a copied or loaded model, has none: the parameters there are tensors of their own.
    """

    input: Tensor | None = None
    output: Tensor | None = None
    last: Any = None

    def __init__(self, group: list[FusedLinear] | None = None, *whole: Tensor | None) -> None:
        self._whole, self._of_first, self._parts, self._hooks = whole, {}, [], []
        if group:
            self._hooks = [module._forward_pre_hooks for module in group]
            self.last, self._of_first = group[-1], group[0]._buffers
            self._parts = [
                (module._parameters, name, None if one is None else _view(one))
                for module in group
                for name, one in module._parameters.items()
            ]

    def __reduce__(self) -> Any:
        return Product, ()

    def is_whole(self) -> bool:
        """Whether the layers' parameters still are parts of the whole: not where one was replaced or moved since, is
        another view of its part, such as one with the axes in turn, nor where a layer was given a bias.
        """
        for parameters, name, part in self._parts:
            one = parameters.get(name)
            if one is None if part is None else type(one) is nn.Parameter and _view(one) == part:
                continue
            self._whole, self._parts = (), []
            break
        return bool(self._parts)

    def open(self) -> None:
        """Gives the first layer the whole, if it still is one: until ``close``. Not where a layer was given a hook that
        may change its input, the others' too, in place.
        """
        if not any(self._hooks) and self.is_whole():
            self._of_first["whole_weight"], self._of_first["whole_bias"] = self._whole

    def close(self) -> None:
        """Takes it back: what is compiled elsewhere, which looks at no addresses, uses the layers' own parameters."""
        self._of_first["whole_weight"] = self._of_first["whole_bias"] = None


def products_in(layer: nn.Module) -> list[Product]:
    """The products of a layer's linear layers."""
    found = [module.product for module in layer.modules() if isinstance(module, FusedLinear)]
    return list(dict.fromkeys(found))


def fuse_projections(model: nn.Module, run: Callable[[], Any]) -> None:
    """Makes parts of one tensor of the weights that read the same tensor, in one module of ``model``, while it runs.

    ``run`` runs the model once. Parameters and modules stay the objects that they are, with their values; what is not
    compiled computes what it did. Left alone are layers of other classes than nn.Linear, with forward hooks, that run
    more than once, whose input is changed between them, and weights that share memory with other parameters or are no
    plain tensors, such as those of one rank of several.
    """
    used = Counter(_memory(one) for module in model.modules() for one in module._parameters.values())
    parents: dict[nn.Linear, nn.Module] = {}
    for parent in model.modules():
        for module in parent.children():
            if type(module) is FusedLinear and not module.product.is_whole():
                module.__class__ = nn.Linear  # type: ignore[assignment]
            if type(module) is nn.Linear and used[_memory(module.weight)] == 1 and _plain(module):
                parents[module] = parent
    inputs: dict[nn.Linear, list[tuple[Any, ...]]] = {}

    def note(module: nn.Linear, given: tuple[Any, ...]) -> None:
        read = [one for one in given if not one.is_inference()]  # those count no changes
        inputs.setdefault(module, []).append((*read, *(one._version for one in read)))

    hooks = [module.register_forward_pre_hook(note) for module in parents]
    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[Any, list[nn.Linear]] = {}
    for module, read in inputs.items():
        weight = module.weight
        kind = parents[module], weight.dtype, weight.device, module.bias is None
        if len(read) == 1 and len(read[0]) == 2:
            tensor, version = read[0]
            groups.setdefault((*kind, id(tensor), version), []).append(module)
    for group in groups.values():
        if len(group) > 1:
            _fuse(group)


def _view(one: Tensor) -> tuple[Any, ...]:
    """What tells a tensor from another view of its memory: numbers alone, which can be compared on every device."""
    return one.data_ptr(), one.shape, one.stride(), one.dtype, one.device


def _memory(parameter: Tensor | None) -> int:
    """Which memory a parameter holds; of one that is no plain tensor, which object it is."""
    if type(parameter) is nn.Parameter and type(parameter.data) is Tensor:
        return parameter.untyped_storage().data_ptr()
    return id(parameter)


def _plain(module: nn.Linear) -> bool:
    """Whether nothing but the layer's own product happens in it."""
    parameters = [one for one in module._parameters.values() if one is not None]
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return not hooked and all(type(one) is nn.Parameter and type(one.data) is Tensor for one in parameters)


def _fuse(group: list[nn.Linear]) -> None:
    """Each layer's former weight is freed at once: memory for one group is all that it takes."""
    with torch.inference_mode(mode=False):
        weight = torch.cat([module.weight.data for module in group])
        bias = None if group[0].bias is None else torch.cat([module.bias.data for module in group])
    start = 0
    for module in group:
        part = slice(start, start := start + module.out_features)
        module.weight.data = weight[part]
        if bias is not None:
            module.bias.data = bias[part]
        module.__class__ = FusedLinear
        for name in ("whole_weight", "whole_bias"):
            module.register_buffer(name, None, persistent=False)
        cast("FusedLinear", module).part = part
    fused = cast("list[FusedLinear]", group)
    product = Product(fused, weight, bias)
    for one in fused:
        one.product = product
