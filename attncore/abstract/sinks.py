"""The sinks of a layer: a float32 tensor of its own on the backend's device, in which they change in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.abstract import scales
from attncore.abstract.layer_arguments import checked_per_head

if TYPE_CHECKING:
    from torch import Tensor

    from attncore.abstract.backend_config import BackendConfig


def own_sinks(sinks: Any, config: BackendConfig) -> Tensor:
    """Numbers or a tensor, one for each query head, as a tensor of the layer's own; ValueError where they are none."""
    import torch

    from attncore.array_arguments import of_fixed_size  # it imports NumPy

    checked = checked_per_head("sinks", sinks, config.num_heads)
    if scales.is_tensor(checked):
        return own_tensor(checked, config)
    with torch.inference_mode(False):  # or it could not be written to later
        own: Tensor = of_fixed_size(torch.tensor(checked, dtype=torch.float32, device=config.device))
    return own


def own_tensor(given: Tensor, config: BackendConfig) -> Tensor:
    """A float32 copy on the backend's device."""
    import torch

    from attncore.array_arguments import of_fixed_size  # it imports NumPy

    with torch.inference_mode(False):
        own: Tensor = of_fixed_size(given.detach().to(config.device, torch.float32, copy=True).contiguous())
    return own


def write_sinks(held: list[Tensor], new: list[Tensor]) -> None:
    """Writes to the tensors of several layers at once, in one launch where torch has it for their device."""
    import torch

    with torch.no_grad():  # new ones are parameters of a model
        torch._foreach_copy_(held, new)
