"""Whether a layer's ``kv_b_proj`` can be absorbed: where its caches are made, and where it changes afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    if not _multiplies_alone(projection):
        raise ValueError(
            f"layer {name}: kv_b_proj, a {type(projection).__name__}, may compute more than the product with its "
            "weight, such as the part of an adapter or a hook, which cannot be absorbed; merge adapters into the "
            "weight and remove hooks first"
        )


def _multiplies_alone(projection: Any) -> bool:
    """Whether it runs ``torch.nn.Linear.forward`` and nothing beside, however its weight is made.

    Neither its output nor its tensors are compared: an adapter begins with a part that is 0, and what is written to it
    through ``.data`` later is counted nowhere.
    """
    kind = type(projection)
    return (
        isinstance(projection, torch.nn.Linear)
        and kind.forward is torch.nn.Linear.forward
        and kind.__call__ is torch.nn.Module.__call__
        and "forward" not in projection.__dict__
        and not projection._forward_hooks
        and not projection._forward_pre_hooks
    )


class AbsorbedProjections:
    """The projections of layers over latent caches, which do not run: only their weights are read, in each step anew.

    ``look_again`` sees what else would count in a step: another projection, an adapter around it, a hook or a bias.
    """

    def __init__(self) -> None:
        self._layers: list[tuple[str, Any]] = []
        self._seen: list[tuple[Any, Any]] = []  # a projection, and its weight where that is a parameter

    def __bool__(self) -> bool:
        return bool(self._layers)

    def add(self, name: str, module: Any) -> None:
        """A layer that was checked."""
        self._layers.append((name, module))
        self._seen.append(_seen(module))

    def look_again(self) -> None:
        """ValueError that names a layer whose projection has changed and can no longer be absorbed."""
        for index, (name, module) in enumerate(self._layers):
            before, weight = self._seen[index]
            projection = module._modules.get("kv_b_proj")
            if projection is before and _multiplies_alone(projection):
                parameters = projection._parameters
                if parameters.get("weight") is weight and parameters.get("bias") is None:
                    continue
            try:
                check_absorbed(name, module)
            except ValueError as error:
                raise ValueError(
                    f"{error}; it has changed since paged_caches: undo that, or make caches of a model without "
                    "use_latent_caches"
                ) from error
            self._seen[index] = _seen(module)


def _seen(module: Any) -> tuple[Any, Any]:
    projection = module.kv_b_proj
    return projection, projection._parameters.get("weight")
