"""What a backend is made of. A vendor writes AttentionBackend and AttentionImpl; the rest comes complete from the core.

torch is imported inside methods only: this module costs nothing where no tensor is made.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Required, TypedDict

from attncore.first_generation import FirstGenerationNames
from attncore.frozen_map import FrozenMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from attncore.builder.lists.state import AttentionState as AttentionState
    from attncore.registry.spec.backend_spec import BackendSpec


class AttentionType(enum.StrEnum):
    """Whose tokens attend to whose."""

    DECODER = "decoder"
    """Causal, over the request's own cache."""
    ENCODER = "encoder"
    """Not causal; writes no cache; the encoder of an encoder/decoder model: encoder tokens by
    ``encoder_query_start_loc``.
    """
    ENCODER_ONLY = "encoder_only"
    """Not causal; writes no cache; the model has no decoder: tokens by ``query_start_loc``."""
    ENCODER_DECODER = "encoder_decoder"
    """Cross attention: decoder queries over encoder keys kept in the cache by ``cross_slot_mapping``."""


@dataclass(frozen=True)
class BackendConfig:
    """What a backend is created for: the request, made definite by the choice. Heads are those of one rank."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    """Dtype of query, key, value and output, by its torch name: ``bfloat16``."""
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
    spec: BackendSpec | None = field(default=None, repr=False)
    """The spec (of the variant) that was chosen; None where a backend is made by hand."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_size", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}: {value!r} is not an integer")
            if value < 1:
                raise ValueError(f"{name}: {value} is not positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        check_value_size(self.head_size, self.head_size_v, self.num_kv_heads, self.use_mla)
        object.__setattr__(self, "options", FrozenMap(dict(self.options)))


def check_value_size(head_size: int, head_size_v: int | None, num_kv_heads: int, use_mla: bool) -> None:
    """Raise TypeError or ValueError, naming the field, where sizes make no cache: a latent one has a single head,
    whose first ``head_size_v`` columns are the values.
    """
    if head_size_v is not None:
        if not isinstance(head_size_v, int) or isinstance(head_size_v, bool):
            raise TypeError(f"head_size_v: {head_size_v!r} is not an integer")
        if head_size_v < 1:
            raise ValueError(f"head_size_v: {head_size_v} is not positive")
    if not use_mla:
        return
    if num_kv_heads != 1:
        raise ValueError(f"num_kv_heads: {num_kv_heads} found; a latent cache (use_mla) has one head, so give 1")
    if head_size_v is not None and head_size_v > head_size:
        raise ValueError(
            f"head_size_v: {head_size_v} found; with use_mla values are the first columns of the {head_size} of a "
            "latent row (head_size)"
        )


class PlanKey(NamedTuple):
    """What layers must share to share one plan."""

    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    attn_type: AttentionType = AttentionType.DECODER
    """Layers of the types ``encoder`` and ``encoder_only`` read no cache: a library that plans paged attention alone
    plans nothing for them.
    """


class LayerFeatures(TypedDict, total=False):
    """What ``backend.impl`` hands to a layer's class: a subclass with an ``__init__`` of its own takes them as
    ``**features: Unpack[LayerFeatures]`` and passes them on.
    """

    scale: Required[float]
    sliding_window: int | None
    logits_soft_cap: float | None
    alibi_slopes: Sequence[float] | Tensor | None
    sinks: Sequence[float] | Tensor | None
    k_scale: float
    v_scale: float
    attn_type: AttentionType


class AttentionMetadata(Protocol):
    """What ``forward`` may read of a step; every field with shape and dtype is in ``CommonAttentionMetadata``."""

    num_reqs: int
    num_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    max_query_len: int
    max_seq_len: int
    slot_mapping: Any
    block_table: Any
    seq_lens: Any
    query_start_loc: Any


class AttentionMetadataBuilder(Protocol):
    """What makes a step's metadata: ``attncore.MetadataBuilder``, or ``attncore.CommonMetadataBuilder`` for lists."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The metadata of one step. Called by the engine, once a step."""


class _DefaultState:
    """``state_class`` of a backend that names none: imported when asked for, since it needs NumPy."""

    def __get__(self, backend: object, kind: object) -> type[AttentionState]:
        from attncore.builder.lists.state import AttentionState

        return AttentionState


class AttentionLayer(Protocol):
    """What the core expects of a layer object, where an engine hands one over: names and the two cache scales."""

    layer_name: str
    impl: AttentionImpl
    k_scale: float
    v_scale: float


class AttentionImpl(ABC):
    """One layer's attention. Made at start-up by ``backend.impl``; ``forward`` runs in every step, through no hook.

    ``alibi_slopes`` and ``sinks`` are one float per *local* query head, or None; ``k_scale`` and ``v_scale`` multiply
    what an fp8 cache holds. ``attn_type`` is handed over for layers that are not of type ``decoder`` only, so that a
    class that knows of no other need not take it.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        layer_name: str,
        *,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        sinks: Sequence[float] | Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        attn_type: AttentionType = AttentionType.DECODER,
    ) -> None:
        self.backend = backend
        self.layer_name = layer_name
        self.scale = scale
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.alibi_slopes = alibi_slopes
        self.sinks = sinks
        self.k_scale = k_scale
        self.v_scale = v_scale
        self.attn_type = attn_type

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: Any,
        output: Tensor | None = None,
    ) -> Tensor:
        """Write this step's keys and values to the cache by ``metadata.slot_mapping``, then attend over it.

        Called by the engine for every layer of every step, perhaps inside a CUDA-graph capture; it must not synchronise
        the device with the host. ``query`` is (T, num_heads, head_size), ``key`` (T, num_kv_heads, head_size),
        ``value`` (T, num_kv_heads, head_size_v), T = ``metadata.num_tokens`` or more, all on the backend's device in
        its dtype. Of these and of ``output`` only the last dimension is contiguous; the others may have any stride
        (slices of one fused QKV tensor). ``kv_cache`` is what ``allocate_kv_cache`` gave. A slot of -1 must change no
        block that a request may own. Returns (T, num_heads, head_size_v), which is ``output`` where that is given.

        With ``use_mla`` key is the latent rows (T, 1, head_size), their first head_size_v columns are the values, and
        ``value`` is None. The other types of attention take tensors of E encoder tokens, and key and value may be None
        where E is 0: docs/contract.md says which.
        """

    def forward_with_lse(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: Any,
        output: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``forward``, and float32 (T, num_heads): the natural logarithm of each softmax's sum, a sink included.

        Infinite where a query sees no key (the output is 0 there). What ``attncore.merge`` merges.
        Written by vendors whose spec declares ``lse``; a ValueError that says why not otherwise.
        """
        spec = self.backend.config.spec
        why = "its class has no forward_with_lse"
        if spec is not None and "lse" not in spec.features:
            why = spec.unsupported.get("lse", "its spec does not declare lse")
        raise ValueError(f"forward_with_lse: {self.backend.name} returns no log-sum-exp: {why}")


class AttentionBackend(FirstGenerationNames, ABC):
    """A kernel library, configured for one model on one device. Made by ``Choice.create()``; a vendor subclasses it.

    Class attributes: ``impl_class`` (required), ``name`` (the spec's, when made by a choice), ``state_class``.
    """

    name: str = ""
    impl_class: ClassVar[type[AttentionImpl]]
    state_class: ClassVar[Any] = _DefaultState()

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        self.name = config.spec.name if config.spec else (self.name or type(self).__name__)
        self._plan_keys: dict[PlanKey, None] = {}

    @property
    def spec(self) -> BackendSpec | None:
        """The spec (of the variant chosen) that the backend was made from; None for one made by hand."""
        return self.config.spec

    @property
    def plan_keys(self) -> tuple[PlanKey, ...]:
        """The distinct keys of the layers made so far, in the order of their first layer."""
        return tuple(self._plan_keys)

    def forget_layers(self) -> None:
        """Forget the layers made so far: ``plan`` is called for those alone that ``impl`` makes from now on."""
        self._plan_keys.clear()

    def impl(
        self,
        layer_name: str,
        *,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        sinks: Sequence[float] | Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        attn_type: AttentionType | str = AttentionType.DECODER,
    ) -> AttentionImpl:
        """The attention of one layer. Called by the engine at start-up; registers the layer's plan key.

        Raises ValueError naming the argument where it is out of range, asks for a feature that the spec does not
        declare, or makes no sense for the type of attention.
        """
        attn_type = self._checked_type(attn_type, sliding_window, alibi_slopes)
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window: {sliding_window} is not positive; a query sees at least itself")
        if logits_soft_cap is not None and not logits_soft_cap > 0:
            raise ValueError(f"logits_soft_cap: {logits_soft_cap} is not positive")
        for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if per_head is not None and len(per_head) != self.config.num_heads:
                raise ValueError(f"{name}: {len(per_head)} given; the backend has {self.config.num_heads} query heads")
        self._check_declared(
            sliding_window=("sliding_window", sliding_window is not None),
            logits_soft_cap=("logits_soft_cap", logits_soft_cap is not None),
            alibi_slopes=("alibi", alibi_slopes is not None),
            sinks=("sinks", sinks is not None),
            k_scale=("kv_scales", k_scale != 1.0),
            v_scale=("kv_scales", v_scale != 1.0),
            attn_type=(
                "encoder_decoder" if attn_type is AttentionType.ENCODER_DECODER else "encoder",
                attn_type is not AttentionType.DECODER,
            ),
        )
        self._plan_keys[PlanKey(scale, sliding_window, logits_soft_cap, attn_type)] = None
        # Classes written before there was a choice of types know of one.
        kind = {} if attn_type is AttentionType.DECODER else {"attn_type": attn_type}
        return self.impl_class(
            self,
            layer_name,
            scale=scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            **kind,
        )

    def _checked_type(self, given: AttentionType | str, sliding_window: object, alibi_slopes: object) -> AttentionType:
        try:
            found = AttentionType(given)
        except ValueError:
            raise ValueError(f"attn_type: {given!r} is not one of {', '.join(AttentionType)}") from None
        if found is not AttentionType.DECODER and self.config.use_mla:
            raise ValueError(f"attn_type: {found} found; a latent cache (use_mla) is for decoder layers only")
        if found is AttentionType.ENCODER_DECODER:
            for name, value in (("sliding_window", sliding_window), ("alibi_slopes", alibi_slopes)):
                if value is not None:
                    raise ValueError(
                        f"{name}: given for an encoder_decoder layer; an encoder's tokens have no distance from a "
                        "query, so leave it None"
                    )
        return found

    def _check_declared(self, **asked: tuple[str, bool]) -> None:
        spec = self.config.spec
        if spec is None:
            return
        for argument, (feature, wanted) in asked.items():
            has = feature in spec.features or (feature == "alibi" and "alibi_standard" in spec.features)
            if wanted and not has:
                why = spec.unsupported.get(feature, "its spec does not declare it")
                raise ValueError(f"{argument}: {self.name} does not support {feature}: {why}")

    @property
    def has_plan(self) -> bool:
        """Whether this class overrides ``plan`` or ``plan_layers``. Where it does not, the core calls neither."""
        kind = type(self)
        return (kind.plan, kind.plan_layers) != (AttentionBackend.plan, AttentionBackend.plan_layers)

    def plan(self, metadata: Any) -> None:
        """Called by the core once a step, after the host arrays are built and before the first layer.

        It reads ``metadata.host`` and its integers only: nothing on the device is there yet. The default calls
        ``plan_layers`` for every distinct key of the layers.
        """
        for key in self._plan_keys:
            self.plan_layers(metadata, key)

    def plan_layers(self, metadata: Any, key: PlanKey) -> None:
        """Plan the step for the layers that share ``key``. Nothing by default: most libraries have no plan."""

    def prepare_capture(self, metadata: Any, builder: Any) -> None:
        """Called by the core once for each captured size of the list builder, before the size's first plan.

        ``metadata`` has the fixed addresses that every step of the size has on the device, and no host arrays yet;
        ``builder`` makes the size's steps (``metadata.source.builder`` of each). Nothing by default: for a library that
        makes wrappers over those addresses. The persistent builder calls ``plan`` alone, which finds the addresses.
        """

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """The shape of one layer's cache. Exactly one axis must grow with ``num_blocks``; the sink block is counted."""

    def kv_cache_torch_dtype(self) -> Any:
        """The torch dtype of the cache's elements."""
        import torch

        names = {"auto": self.config.dtype, "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
        return getattr(torch, names.get(self.config.kv_cache_dtype, self.config.kv_cache_dtype))

    def allocate_kv_cache(self, num_blocks: int) -> Any:
        """One layer's cache on the backend's device, zeroed, with a sink block after the ``num_blocks`` asked for.

        A slot of -1 is the last slot of the sink. Called by the engine at start-up, once a layer. ValueError where
        ``num_blocks`` is not positive or a block id would be larger than the spec's ``max_block_id``.
        """
        import torch

        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is not positive")
        limit = self.config.spec.max_block_id if self.config.spec else None
        if limit is not None and num_blocks > limit:
            raise ValueError(
                f"num_blocks: {num_blocks} and the sink block reach beyond {self.name}'s largest id {limit}"
            )
        shape = self._shape(num_blocks + 1)
        return torch.zeros(shape, dtype=self.kv_cache_torch_dtype(), device=self.config.device)

    def from_host(self, array: npt.NDArray[Any]) -> Tensor:
        """A host array as a tensor on the backend's device; on a CPU it shares the array's memory."""
        import torch

        tensor = torch.from_numpy(array)
        return tensor if self.config.device == "cpu" else tensor.to(self.config.device)

    def copy_blocks(self, kv_caches: Sequence[Any], src_to_dst: Any) -> None:
        """Copy blocks within each layer's cache: ``src_to_dst`` is (n, 2) of block ids, all read before any is
        written.
        """
        for kv_cache in kv_caches:
            self.swap_blocks(kv_cache, kv_cache, src_to_dst)

    def swap_blocks(self, src_kv_cache: Any, dst_kv_cache: Any, src_to_dst: Any) -> None:
        """Copy blocks from one cache to another, perhaps on another device: ``src_to_dst`` is (n, 2) of block ids."""
        import torch

        pairs = torch.as_tensor(src_to_dst, dtype=torch.int64).reshape(-1, 2)
        axis = self.kv_cache_block_axis()
        if src_kv_cache.element_size() == 1:  # torch indexes no fp8
            src_kv_cache, dst_kv_cache = src_kv_cache.view(torch.uint8), dst_kv_cache.view(torch.uint8)
        chosen = src_kv_cache.index_select(axis, pairs[:, 0].to(src_kv_cache.device))
        dst_kv_cache.index_copy_(axis, pairs[:, 1].to(dst_kv_cache.device), chosen.to(dst_kv_cache.device))

    def kv_cache_block_axis(self) -> int:
        """The axis of the cache that counts blocks."""
        grown = [axis for axis, (one, two) in enumerate(zip(self._shape(1), self._shape(2), strict=True)) if one != two]
        if len(grown) != 1:
            raise ValueError(f"kv_cache_shape: of {type(self).__name__}, {len(grown)} axes grow with num_blocks, not 1")
        return grown[0]

    def _shape(self, num_blocks: int) -> tuple[int, ...]:
        config = self.config
        return self.kv_cache_shape(num_blocks, config.block_size, config.num_kv_heads, config.head_size)


def __getattr__(name: str) -> Any:
    if name != "AttentionState":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attncore.builder.lists.state import AttentionState

    return AttentionState
