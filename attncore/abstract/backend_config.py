"""BackendConfig: what a backend is created for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from attncore.arguments import check_value_size, flag, float32_number, integer, optional_integer
from attncore.frozen_map import FrozenMap
from attncore.quoted import MAX_PART, one_line, plain_text, quoted
from attncore.vocabulary import KV_CACHE_LAYOUTS, dtype_name

if TYPE_CHECKING:
    from attncore.abstract.spec_protocol import SpecFacts

_DEVICE = re.compile(r"[a-z]+(:[0-9]+)?")


@dataclass(frozen=True)
class BackendConfig:
    """What a backend is created for: the request, made definite by the choice. Heads are those of one rank.

    Raises TypeError or ValueError, naming the field, for numbers that make no sense in any backend. What a backend
    does not support is refused by ``AttentionBackend``, which compares the configuration with ``spec``.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    """Dtype of query, key, value and output, by its torch name: ``bfloat16``. ``torch.bfloat16`` is taken too."""
    block_size: int
    """Tokens per block of the kernel."""
    _: KW_ONLY
    kv_cache_dtype: str = "auto"
    """``auto`` is ``dtype``."""
    kv_cache_layout: str = "NHD"
    device: str = "cpu"
    """As torch writes it: ``cpu``, ``cuda:0`` (for ROCm too)."""
    head_size_v: int | None = None
    max_model_len: int | None = None
    sliding_window: int | None = None
    """The model's window, where its layers have one; what counts for a layer is what ``impl`` is given."""
    logits_soft_cap: float | None = None
    use_mla: bool = False
    variant: str = ""
    """Which of the spec's variants was chosen; empty for a spec without variants."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Every option that the spec declares, with the value given or its default."""
    spec: SpecFacts | None = field(default=None, repr=False)
    """The spec (of the variant) that was chosen; None where a backend is made by hand, and nothing is checked."""

    def __post_init__(self) -> None:
        for name, example in (("dtype", "bfloat16"), ("kv_cache_dtype", "auto"), ("variant", "")):
            text = plain_text(dtype_name(getattr(self, name)))
            if text is None:
                raise TypeError(
                    f"{name}: {quoted(getattr(self, name))} found; give a name as text, such as {example!r}"
                )
            object.__setattr__(self, name, text)
        for name in ("num_heads", "num_kv_heads", "head_size", "block_size"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        for name in ("head_size_v", "max_model_len", "sliding_window"):
            object.__setattr__(self, name, optional_integer(name, getattr(self, name), 1))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        object.__setattr__(self, "use_mla", flag("use_mla", self.use_mla))
        check_value_size(self.head_size, self.head_size_v, self.num_kv_heads, self.use_mla)
        if self.logits_soft_cap is not None:
            cap = float32_number("logits_soft_cap", self.logits_soft_cap, positive=True)
            object.__setattr__(self, "logits_soft_cap", cap)
        layout, device = self.kv_cache_layout, self.device
        if type(layout) is not str or layout not in KV_CACHE_LAYOUTS:
            raise ValueError(f"kv_cache_layout: {quoted(layout)} is not one of {', '.join(KV_CACHE_LAYOUTS)}")
        if type(device) is not str or not _DEVICE.fullmatch(device):
            raise ValueError(f"device: {quoted(device)} is not a device as torch writes it, such as 'cpu' or 'cuda:0'")
        try:
            object.__setattr__(self, "options", FrozenMap(dict(self.options)))
        except Exception as error:  # a mapping of the caller's own
            raise TypeError(
                f"options: {quoted(self.options)} cannot be read as a mapping: {one_line(error, MAX_PART)}"
            ) from error
        if self.spec is not None and not _is_spec(self.spec):
            raise TypeError(f"spec: {quoted(self.spec)} is not a BackendSpec; give that of a choice, or None")


def _is_spec(found: object) -> bool:
    """Whether it has what a spec of this protocol has; classes of others are taken."""
    try:
        return all(hasattr(found, name) for name in ("name", "variants", "by_variant", "dtypes", "head_sizes"))
    except Exception:  # of an attribute that is code
        return False
