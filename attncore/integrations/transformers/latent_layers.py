"""Layers of latent attention (MLA), whose caches hold one row a token instead of keys and values of every head.

A row is what the model keeps of a token, ``kv_lora_rank`` numbers and a rotated part, from which ``kv_b_proj`` makes
keys and values. The part of it that makes keys is multiplied into the query, the part that makes values into the output
(*absorbed*), so that all heads attend over the rows themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attncore.integrations.transformers.absorbed_projections import check_absorbed
from attncore.integrations.transformers.attention_interface import CACHE, LATENT, current_attender
from attncore.integrations.transformers.checked_model import check_model

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
    looks at that again, and so does each ``attncore_context``: weights that were loaded since are used, and what was
    put beside them is refused. A captured graph computes with what was there when it was captured.
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

    def absorbed_rows(self, query: Tensor) -> Tensor:
        """``absorbed`` of a query (T, heads, qk_nope_head_dim + qk_rope_head_dim), and so shaped."""
        return self.absorbed(query.transpose(0, 1)).transpose(0, 1)

    def projected(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head, (T, heads, size), of latent rows (T, 1, size), as the layer makes them."""
        given = rows.transpose(0, 1).unsqueeze(0)
        keys, values = self._expand(given[..., : self._rank], given[..., self._rank :])
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)

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
