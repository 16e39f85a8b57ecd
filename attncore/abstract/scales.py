"""The scales of an fp8 cache: numbers, or tensors on the device, whose values the host does not read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.arguments import FLOAT32_LEAST, FLOAT32_MAX, finite_number, tensor_type
from attncore.show import short

if TYPE_CHECKING:
    from torch import Tensor

    from attncore.abstract.backend_config import BackendConfig

SMALLEST, LARGEST = FLOAT32_LEAST, FLOAT32_MAX
"""The positive numbers of float32, in which kernels have a scale."""
HEADROOM = 2.0
"""How many times the largest number of the batch that scales were calculated from a cache holds: later ones may be
larger, and what does not fit is cut off."""


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor; imports no torch."""
    return isinstance(value, tensor_type())


def checked_scale(name: str, value: Any, num_kv_heads: int | None = None) -> float | Tensor:
    """A scale as a float, or the tensor that it is.

    ValueError unless it is a positive number of float32, or a tensor of floats with one element or one for each
    key/value head (None: any number of them). A tensor's values are not read, which would wait for its device.
    """
    if not is_tensor(value):
        number = float(finite_number(name, value, positive=True))
        if not SMALLEST <= number <= LARGEST:
            raise ValueError(f"{name}: {number} is outside {SMALLEST}..{LARGEST}, the numbers of float32")
        return number
    tensor: Tensor = value
    check_strided(name, tensor)
    per_head = tensor.dim() == 1 and len(tensor) and num_kv_heads in (None, len(tensor))
    if not tensor.is_floating_point() or not (tensor.shape in ((), (1,)) or per_head):
        heads = "one for each" if num_kv_heads is None else f"one for each of the {num_kv_heads}"
        raise ValueError(
            f"{name}: {tensor.dtype} of shape {tuple(tensor.shape)} found; give floats, one element or {heads} "
            "key/value heads"
        )
    return tensor


def check_strided(name: str, tensor: Tensor) -> None:
    """ValueError where a tensor has no memory of strides: a sparse one, a nested one, one that is cut off from it."""
    from attncore.array_arguments import not_strided  # it imports NumPy

    why = not_strided(tensor)
    if why is not None:
        raise ValueError(f"{name}: {why}")


def check_values(name: str, tensor: Tensor) -> None:
    """ValueError for a tensor of the device ``meta``, which has no values that could be copied."""
    if tensor.device.type == "meta":
        raise ValueError(f"{name}: on the device meta, where tensors have no values; give one that has them")


def features_of(scale: float | Tensor) -> tuple[str, ...]:
    """The features that a scale asks a backend for."""
    if isinstance(scale, float):
        return () if scale == 1.0 else ("kv_scales",)
    on_device = ("kv_scales", "kv_scales_on_device")
    return on_device if scale.numel() == 1 else (*on_device, "kv_scales_per_head")


def check_cache(name: str, scale: float | Tensor, config: BackendConfig) -> None:
    """ValueError where the cache's dtype has no scales; a tensor is refused there whatever it holds."""
    if features_of(scale) and not config.kv_cache_dtype.startswith("fp8"):
        raise ValueError(
            f"{name}: {short(scale)} given for a cache of {config.kv_cache_dtype}; only an fp8 cache has scales"
        )


def own_scale(scale: float | Tensor, device: str) -> float | Tensor:
    """A tensor's copy on ``device``, float32 of one dimension: the layer's own, which ``set_scales`` writes to."""
    if isinstance(scale, float):
        return scale
    import torch

    from attncore.array_arguments import of_fixed_size  # it imports NumPy

    with torch.inference_mode(False):  # or it could not be written to later
        own: Tensor = of_fixed_size(scale.detach().to(device, torch.float32, copy=True).reshape(-1))
    return own


def replaced(held: float | Tensor, new: float | Tensor) -> float | Tensor:
    """``new``; where ``held`` is a tensor that can take it, that one, written to in place: captured graphs read it."""
    if isinstance(held, float) or (not isinstance(new, float) and new.numel() not in (1, held.numel())):
        return new
    return held.fill_(new) if isinstance(new, float) else held.copy_(new)


def calculated(name: str, numbers: Tensor | None, held: float | Tensor, num_kv_heads: int, largest: float) -> Tensor:
    """The scale with which the largest of ``numbers`` (tokens, heads, size) is ``1 / HEADROOM`` of ``largest``.

    One for each head where ``held`` has them, else one. 1 where all numbers are 0. Infinities and NaN are not counted:
    with one of them the cache would be useless for all later tokens. Nothing synchronises. ValueError naming the
    argument ``name`` where it has another shape or dtype, or no token; TypeError where it is no tensor.
    """
    import torch

    if numbers is not None:
        _check_numbers(name, numbers)
    if numbers is None or numbers.dim() != 3 or numbers.shape[1] != num_kv_heads or not numbers.numel():
        found = "None" if numbers is None else f"shape {tuple(numbers.shape)}"
        raise ValueError(f"{name}: {found} found; give (tokens, {num_kv_heads}, head size), a token at least")
    per_head = not isinstance(held, float) and held.numel() > 1
    sizes = numbers.detach().abs()
    sizes = torch.where(sizes.isfinite(), sizes, 0)
    most = sizes.amax(dim=(0, 2) if per_head else (0, 1, 2)).float().reshape(-1)
    scale = (most * (HEADROOM / largest)).clamp(SMALLEST, LARGEST)
    return torch.where(most > 0, scale, torch.ones_like(scale))


def _check_numbers(name: str, numbers: Any) -> None:
    """TypeError or ValueError where these are no floats of which torch finds the largest."""
    if not is_tensor(numbers):
        raise TypeError(f"{name}: {type(numbers).__name__} found; give a torch tensor on the cache's device")
    check_strided(name, numbers)
    check_values(name, numbers)
    if not numbers.is_floating_point() or numbers.itemsize == 1:
        raise ValueError(f"{name}: {numbers.dtype} found; give floats of two bytes or more, as the model computes them")
