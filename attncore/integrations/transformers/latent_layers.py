"""Layers of latent attention (MLA), whose caches hold one row a token instead of keys and values of every head.

A row is what the model keeps of a token, ``kv_lora_rank`` numbers and a rotated part, from which ``kv_b_proj`` makes
keys and values. The part of it that makes keys is multiplied into the query, the part that makes values into the output
(*absorbed*), so that all heads attend over the rows themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attncore.integrations.transformers.attention_interface import CACHE, LATENT, current_attender
from attncore.integrations.transformers.checked_model import check_model
from attncore.quoted import describe_error
from attncore.show import counted

_NEEDED = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""The attributes of a layer of latent attention in transformers."""


def use_latent_caches(model: Any) -> int:
    """From now on, layers of latent attention keep latent rows in attncore's caches; how many layers there are.

    Call it before ``attention_layers``, ``select_for_model`` and ``paged_caches``, which then ask for ``use_mla``: one
    key/value head of ``kv_lora_rank + qk_rope_head_dim``, whose first ``kv_lora_rank`` columns are the values. Without
    it such layers have plain caches, of keys and values of every head. Outside of attncore's attention the model runs
    as before. A second call changes nothing.

    ValueError for a model without such layers, and where the weight of ``kv_b_proj`` is none that can be absorbed: with
    a bias, quantised, or not all that ``kv_b_proj`` computes with, as beside an adapter or a hook. ``paged_caches``
    looks at that again.
    """
    check_model(model)
    found = [(name, module) for name, module in model.named_modules() if all(hasattr(module, one) for one in _NEEDED)]
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no layer of latent attention as transformers writes them (with "
            f"{', '.join(_NEEDED)}); run it without use_latent_caches"
        )
    for name, module in found:
        check_absorbed(name, module)
    for _, module in found:
        if getattr(module, LATENT, None) is None:
            layer = LatentLayer(module)
            setattr(module, LATENT, layer)
            module.expand_kv = layer
    return len(found)


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
    a bit of an output, since a part beside it may be as small as one. Whatever it raises, rows of the weight's dtype are
    nothing that it multiplies.
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


class LatentLayer:
    """In place of a layer's ``expand_kv``, and what its attention does around the call of the backend."""

    def __init__(self, module: Any) -> None:
        self._module, self._expand = module, module.expand_kv
        self._nope, self._size = module.qk_nope_head_dim, module.qk_nope_head_dim + module.v_head_dim
        self._rank = module.kv_lora_rank

    def __call__(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values: within attncore's attention the latent rows and their first columns, one head of each."""
        if not self._is_attending():
            expanded: tuple[Tensor, Tensor] = self._expand(latent, rotated)
            return expanded
        rows = torch.cat((latent, rotated), dim=-1)
        return rows, rows[..., : self._rank]

    def absorbed(self, query: Tensor) -> Tensor:
        """The query over latent rows, (1, heads, T, kv_lora_rank + qk_rope_head_dim), of that over keys."""
        content = torch.matmul(query[..., : self._nope], self._weights()[:, : self._nope])
        return torch.cat((content, query[..., self._nope :]), dim=-1)

    def expanded(self, output: Tensor) -> Tensor:
        """The output (T, heads, v_head_dim) of one over latent rows, (T, heads, kv_lora_rank)."""
        to_values = self._weights()[:, self._nope :].transpose(1, 2)
        return torch.matmul(output.transpose(0, 1), to_values).transpose(0, 1)

    def _weights(self) -> Tensor:
        """(heads, qk_nope_head_dim + v_head_dim, kv_lora_rank), the layer's own."""
        weights: Tensor = self._module.kv_b_proj.weight.view(-1, self._size, self._rank)
        return weights

    def _is_attending(self) -> bool:
        if torch.compiler.is_compiling():
            return getattr(self._module, CACHE, None) is not None
        return current_attender() is not None
