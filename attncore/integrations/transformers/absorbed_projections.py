"""Whether a layer's ``kv_b_proj`` can be absorbed: where its caches are made, and where it changes afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attncore.quoted import describe_error
from attncore.show import counted


def check_absorbed(name: str, module: Any) -> None:
    """ValueError where the layer's ``kv_b_proj`` is no product with a matrix, which could be absorbed."""
    projection = module.kv_b_proj
    weight = getattr(projection, "weight", None)
    if (
        not isinstance(weight, Tensor)
        or weight.dim() != 2
        or not weight.dtype.is_floating_point
        or weight.dtype.itemsize < 2  # quantised: the product needs scales beside it
    ):
        raise ValueError(
            f"layer {name}: kv_b_proj, a {type(projection).__name__}, has no matrix of floats of two bytes or more "
            "that could be absorbed"
        )
    if getattr(projection, "bias", None) is not None:
        raise ValueError(f"layer {name}: kv_b_proj has a bias, which cannot be absorbed into query and output")
    size = module.qk_nope_head_dim + module.v_head_dim
    if weight.shape[1] != module.kv_lora_rank or weight.shape[0] % size:
        raise ValueError(
            f"layer {name}: kv_b_proj has a weight {tuple(weight.shape)}; {counted(size, 'row')} for each head and "
            f"{counted(module.kv_lora_rank, 'column')} expected"
        )
    hooks = projection._forward_hooks or projection._forward_pre_hooks or "forward" in vars(projection)
    if (hooks or type(projection) is not torch.nn.Linear) and weight.device.type != "meta":
        _check_product(name, projection, weight)


@torch.no_grad()
def _check_product(name: str, projection: Any, weight: Tensor) -> None:
    """ValueError where some rows show that ``projection`` computes something else than the product with ``weight``:
    a bit of an output, since a part beside it may be as small as one. One that raises multiplies no such rows.
    """
    rows = torch.linspace(-7, 7, 8 * weight.shape[1], device=weight.device).view(8, -1).sin().to(weight.dtype)
    try:
        is_product = torch.equal(projection(rows), torch.nn.functional.linear(rows, weight))
    except Exception as error:
        raise ValueError(
            f"layer {name}: kv_b_proj, a {type(projection).__name__}, cannot be compared with the product with its "
            f"weight, {weight.dtype}, so that it is not absorbed: {describe_error(error)}"
        ) from error
    if not is_product:
        raise ValueError(
            f"layer {name}: kv_b_proj, a {type(projection).__name__}, computes more than the product with its weight, "
            "such as the part of an adapter or a hook, which cannot be absorbed; merge adapters into the weight and "
            "remove hooks first"
        )


class AbsorbedProjections:
    """The projections of layers over latent caches, which do not run: only their weights are read, in each step anew.

    ``look_again`` sees what else would count in a step: another projection, an adapter around it, hooks, and of a
    projection that is no plain linear layer what its parameters and attributes say.
    """

    def __init__(self) -> None:
        self._layers: list[tuple[str, Any]] = []
        self._seen: list[tuple[Any, Any]] = []  # a plain projection and its weight; any other, and what it looked like

    def __bool__(self) -> bool:
        return bool(self._layers)

    def add(self, name: str, module: Any) -> None:
        """A layer that was checked."""
        self._layers.append((name, module))
        self._seen.append(_seen(module))

    def look_again(self) -> None:
        """ValueError that names a layer whose projection has changed and can no longer be absorbed."""
        for index, (name, module) in enumerate(self._layers):
            before, looks = self._seen[index]
            projection = module._modules.get("kv_b_proj")
            if projection is before and _is_plain(projection) and projection._parameters.get("weight") is looks:
                continue
            if projection is before and not _is_plain(projection) and _looks(projection) == looks:
                continue
            try:
                check_absorbed(name, module)
            except ValueError as error:
                raise ValueError(
                    f"{error}; it has changed since paged_caches: undo that, or make caches of a model without "
                    "use_latent_caches"
                ) from error
            self._seen[index] = _seen(module)


def _is_plain(projection: Any) -> bool:
    """Whether it is a linear layer, and nothing else counts than its weight, whatever it holds."""
    return (
        type(projection) is torch.nn.Linear
        and not projection._forward_hooks
        and not projection._forward_pre_hooks
        and projection._parameters.get("bias") is None
        and "forward" not in projection.__dict__
    )


def _seen(module: Any) -> tuple[Any, Any]:
    projection = module.kv_b_proj
    return projection, projection.weight if _is_plain(projection) else _looks(projection)


class _Same:
    """An object that is equal to itself alone, and is kept, so that no other has its number."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._held is self._held

    def __hash__(self) -> int:
        return id(self._held)


_OF_TORCH = frozenset(vars(torch.nn.Module()))


def _looks(projection: Any) -> list[Any]:
    """What a projection of any kind computes with, as far as it shows: tensors, versions, hooks, plain attributes."""
    found: list[Any] = [type(projection), projection.training]
    for module in projection.modules():
        found += map(_Same, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
        for name, value in vars(module).items():
            if name not in _OF_TORCH:  # such as the names of the adapters that are on
                found.append((name, str(value) if isinstance(value, _PLAIN) else _Same(value)))
    for tensor in (*projection.parameters(), *projection.buffers()):
        found += (_Same(tensor), None if tensor.is_inference() else tensor._version)
    return found


_PLAIN = (bool, int, float, str, list, tuple, dict, set)
