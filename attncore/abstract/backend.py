"""AttentionBackend: a kernel library, configured for one model on one device. A vendor subclasses it.

torch is imported inside methods only: this module costs nothing where no tensor is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from attncore.abstract import scales
from attncore.abstract.attention_impl import AttentionImpl, PlanKey
from attncore.abstract.cache_views import key_and_value_views
from attncore.abstract.config_against_spec import checked
from attncore.abstract.first_generation_names import FirstGenerationNames
from attncore.abstract.layer_arguments import checked_name, checked_per_head
from attncore.abstract.sinks import own_sinks, own_tensor
from attncore.arguments import float32_number, integer, optional_integer
from attncore.quoted import quoted
from attncore.show import angled, counted, guarded, short
from attncore.vocabulary import AttentionType

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from attncore.abstract.attention_metadata import AttentionMetadata
    from attncore.abstract.backend_config import BackendConfig
    from attncore.abstract.spec_protocol import SpecFacts
    from attncore.builder import CommonAttentionMetadata, CommonAttentionState, CommonMetadataBuilder


class AttentionBackend(FirstGenerationNames, ABC):
    """A kernel library, configured for one model on one device. Made by ``Choice.create()``; a vendor subclasses it.

    Class attributes: ``impl_class`` (required), ``name`` (the spec's, when made by a choice), ``state_class``.

    Raises ValueError that begins with the field of ``config`` that the spec (of the variant) does not accept, and says
    what it accepts. A vendor's own ``__init__`` checks what a spec cannot say. Without a spec nothing is checked.
    """

    name: str = ""
    impl_class: ClassVar[type[AttentionImpl]]
    state_class: ClassVar[type[CommonAttentionState] | None] = None
    """What ``get_state_cls`` gives; None: ``attncore.AttentionState``."""
    metadata_class: ClassVar[type[CommonAttentionMetadata] | None] = None
    """What ``get_metadata_cls`` gives; None: a subclass of ``CommonAttentionMetadata`` for this class of backends."""
    builder_class: ClassVar[type[CommonMetadataBuilder] | None] = None
    """What ``get_builder_cls`` gives; None: a subclass of ``CommonMetadataBuilder`` for this class of backends."""
    list_layout: ClassVar[str] = "common"
    """The ``layout`` of the list builder that the kernels read: ``common``, ``flash``, ``flashinfer`` or ``rocm``."""

    def __init__(self, config: BackendConfig) -> None:
        self.config = config = checked(config)
        self.name = config.spec.name if config.spec else (self.name or type(self).__name__)
        self._plan_keys: tuple[PlanKey, ...] = ()

    @property
    def spec(self) -> SpecFacts | None:
        """The spec (of the variant chosen) that the backend was made from; None for one made by hand."""
        return self.config.spec

    @property
    def plan_keys(self) -> tuple[PlanKey, ...]:
        """The distinct keys of the layers made so far, in the order of their first layer."""
        return self._plan_keys

    def forget_layers(self) -> None:
        """Forget the layers made so far: ``plan`` is called for those alone that ``impl`` makes from now on."""
        self._plan_keys = ()

    def impl(
        self,
        layer_name: str,
        *,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        sinks: Sequence[float] | Tensor | None = None,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        attn_type: AttentionType | str = AttentionType.DECODER,
    ) -> AttentionImpl:
        """The attention of one layer. Called by the engine at start-up; registers the layer's plan key.

        ``scale``, which scores are multiplied by, is a positive number.
        ``k_scale`` and ``v_scale`` are numbers, or tensors with one element or one for each key/value head, of which
        the layer keeps a copy; ``impl.set_scales`` changes them. Of ``sinks`` and ``alibi_slopes`` it keeps a copy too;
        ``impl.set_sinks`` changes the sinks, and slopes stay what they were.

        Raises ValueError naming the argument where it is out of range, asks for a feature that the spec does not
        declare, or makes no sense for the type of attention.
        """
        layer_name = checked_name(layer_name)
        attn_type = self._checked_type(attn_type, sliding_window, alibi_slopes)
        sliding_window = optional_integer("sliding_window", sliding_window, 1)  # a query sees at least itself
        scale = float32_number("scale", scale, positive=True)  # kernels scale the largest score, not the smallest
        if logits_soft_cap is not None:
            logits_soft_cap = float32_number("logits_soft_cap", logits_soft_cap, positive=True)
        if alibi_slopes is not None:
            alibi_slopes = checked_per_head("alibi_slopes", alibi_slopes, self.config.num_heads)
        if sinks is not None:
            checked_per_head("sinks", sinks, self.config.num_heads)
        self._check_declared(
            sliding_window=("sliding_window", sliding_window is not None),
            logits_soft_cap=("logits_soft_cap", logits_soft_cap is not None),
            alibi_slopes=("alibi", alibi_slopes is not None),
            sinks=("sinks", sinks is not None),
            attn_type=(
                "encoder_decoder" if attn_type is AttentionType.ENCODER_DECODER else "encoder",
                attn_type is not AttentionType.DECODER,
            ),
        )
        k_scale, v_scale = self.own_scales(k_scale, v_scale)
        if sinks is not None:
            sinks = own_sinks(sinks, self.config)
        if scales.is_tensor(alibi_slopes):
            alibi_slopes = own_tensor(alibi_slopes, self.config)  # type: ignore[arg-type]
        key = PlanKey(scale, sliding_window, logits_soft_cap, attn_type)
        # A class that knows decoder layers only need not take the argument.
        other_type = {} if attn_type is AttentionType.DECODER else {"attn_type": attn_type}
        impl = self.impl_class(
            self,
            layer_name,
            scale=scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            **other_type,
        )
        if key not in self._plan_keys:  # last: a layer that its class refuses is not planned for
            self._plan_keys = (*self._plan_keys, key)
        return impl

    def own_scales(self, k_scale: Any, v_scale: Any) -> tuple[float | Tensor, float | Tensor]:
        """The scales of a layer: floats, or float32 tensors of its own on the backend's device, of one dimension.

        Called by ``impl`` and by ``AttentionImpl.set_scales``. ValueError naming the argument where it is no scale,
        asks for a feature that the spec does not declare, or the cache is not fp8.
        """
        config = self.config
        given = [
            (name, scales.checked_scale(name, scale, config.num_kv_heads))
            for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
        ]
        for name, scale in given:
            for feature in scales.features_of(scale):
                self._check_declared(**{name: (feature, True)})
            scales.check_cache(name, scale, config)
            if not isinstance(scale, float):
                scales.check_values(name, scale)
        own_k, own_v = (scales.own_scale(scale, config.device) for _, scale in given)
        return own_k, own_v

    def _checked_type(self, given: AttentionType | str, sliding_window: object, alibi_slopes: object) -> AttentionType:
        try:
            attn_type = AttentionType(given)
        except ValueError:
            raise ValueError(f"attn_type: {quoted(given)} is not one of {', '.join(AttentionType)}") from None
        if attn_type is not AttentionType.DECODER and self.config.use_mla:
            raise ValueError(f"attn_type: {attn_type} found; a latent cache (use_mla) is for decoder layers only")
        if attn_type is AttentionType.ENCODER_DECODER:
            for name, value in (("sliding_window", sliding_window), ("alibi_slopes", alibi_slopes)):
                if value is not None:
                    raise ValueError(
                        f"{name}: given for an encoder_decoder layer; an encoder's tokens have no distance from a "
                        "query, so leave it None"
                    )
        return attn_type

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
        cls = type(self)
        return (cls.plan, cls.plan_layers) != (AttentionBackend.plan, AttentionBackend.plan_layers)

    @property
    def records_plan(self) -> bool:
        """Whether this class overrides ``record_plan``."""
        return type(self).record_plan is not AttentionBackend.record_plan

    def check_metadata(self, metadata: AttentionMetadata) -> None:
        """ValueError that names a field which ``metadata`` lacks and the spec declares as read (``host_needs``,
        ``device_needs``), and for decodes of several tokens on a rank of context parallelism.

        For steps that no builder made: an engine calls it for the metadata of its own, once for each kind of step, and
        ``metadata_from_fields`` calls it. A builder's steps have every field.
        """
        from attncore.builder.needed_fields import check_needed_fields
        from attncore.builder.rank_drafts import refuse_rank_drafts

        check_needed_fields(metadata, self)
        refuse_rank_drafts(metadata, self)

    def plan(self, metadata: AttentionMetadata) -> None:
        """Called by the core once a step, after the host arrays are built and before the first layer.

        It reads ``metadata.host`` and its integers only: nothing on the device is there yet. The default calls
        ``plan_layers`` for every distinct key of the layers.
        """
        for key in self._plan_keys:
            self.plan_layers(metadata, key)

    def plan_layers(self, metadata: AttentionMetadata, key: PlanKey) -> None:
        """Plan the step for the layers that share ``key``. Nothing by default: most libraries have no plan."""

    def record_plan(self, metadata: AttentionMetadata) -> bool:
        """Called by the core inside a capture, by ``metadata.record()``, behind the nodes that fetch each step.

        Where the backend records nodes here that plan each replayed step from what lies on the device, it returns True,
        and the core no longer calls ``plan`` for steps of this size, until the size is captured anew. ``metadata`` is
        that of the capture, which was planned. The default records nothing: False, ``plan`` is called for each step.
        """
        return False

    def prepare_capture(self, metadata: AttentionMetadata, builder: CommonMetadataBuilder) -> None:
        """Called by the core once for each captured size of the list builder, before the size's first plan.

        ``metadata`` has the fixed addresses that every step of the size has on the device, and no host arrays yet;
        ``builder`` makes the size's steps (``metadata.source.builder`` of each). Nothing by default: for a library that
        makes wrappers over those addresses. The persistent builder calls ``plan`` alone, which finds the addresses.
        """

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """The shape of one layer's cache. Exactly one axis must grow with ``num_blocks``."""

    def kv_cache_torch_dtype(self) -> Any:
        """The torch dtype of the cache's elements."""
        import torch

        names = {"auto": self.config.dtype, "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
        return getattr(torch, names.get(self.config.kv_cache_dtype, self.config.kv_cache_dtype))

    @guarded
    def __repr__(self) -> str:
        config = self.config
        heads = f"{counted(config.num_heads, 'head')} ({config.num_kv_heads} of keys) of size {config.head_size}"
        cache = f"kv_cache {config.kv_cache_dtype} {config.kv_cache_layout}"
        variant = f"variant {config.variant}" if config.variant else ""
        layers = (
            counted(len(self._plan_keys), "kind of layers", "kinds of layers") if self._plan_keys else "no layers yet"
        )
        head = f"{type(self).__name__} {short(self.name)} on {config.device}"
        return angled(head, (variant, config.dtype, heads, f"block_size {config.block_size}", cache, layers))

    def allocate_kv_cache(self, num_blocks: int) -> Any:
        """One layer's cache of ``num_blocks`` blocks on the backend's device, zeroed: a tensor of ``kv_cache_shape``.
        An override may give a tuple of tensors, the blocks in the first axis of each.

        Called by the engine at start-up, once a layer. ValueError where ``num_blocks`` is below 1 or a block id would
        be larger than the spec's ``max_block_id``, of an override too.
        """
        import torch

        num_blocks = integer("num_blocks", num_blocks, 1, 2**63 - 1)
        limit = self.config.spec.max_block_id if self.config.spec else None
        if limit is not None and num_blocks - 1 > limit:
            raise ValueError(
                f"num_blocks: {num_blocks} found; {self.name}'s largest block id is {limit}, give {limit + 1} at most"
            )
        shape = self._shape(num_blocks)
        return torch.zeros(shape, dtype=self.kv_cache_torch_dtype(), device=self.config.device)

    def kv_cache_views(self, kv_cache: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of a cache, as views (blocks, block_size, num_kv_heads, head_size or head_size_v) of it.

        ``kv_cache`` is what ``allocate_kv_cache`` gave, or a pair of such views, which is taken as it comes, whether or
        not the spec declares ``strided_kv_cache``: that is of ``forward``. Bytes become the floats of an fp8 cache. A
        vendor whose whole cache is not of the usual shapes, such as one of layout ``own``, overrides it, and takes
        pairs all the same. ValueError naming ``kv_cache`` for anything else.
        """
        return key_and_value_views(kv_cache, self.config, self.kv_cache_torch_dtype(), self.kv_cache_block_axis())

    def from_host(self, array: npt.NDArray[Any]) -> Tensor:
        """A host array as a tensor on the backend's device; on a CPU it shares the array's memory.

        Of a read-only array, such as those of ``metadata.host``, it is a copy: torch has no read-only tensors.
        """
        import torch

        if not array.flags.writeable:
            array = array.copy()
        tensor = torch.from_numpy(array)
        return tensor if self.config.device == "cpu" else tensor.to(self.config.device)

    def copy_blocks(self, kv_caches: Sequence[Any], src_to_dst: Any) -> None:
        """Copy blocks within each layer's cache by ``swap_blocks``, which a vendor overrides: ``src_to_dst`` is (n, 2)
        of block ids, all read before any is written. A cache that several layers have, in one form or in several, is
        copied within once. ValueError before any layer's is written to where one has not the blocks, cannot be written
        to, or shares a part of another's memory.
        """
        from attncore.ops.distinct_caches import distinct_caches

        kv_caches = distinct_caches(kv_caches, self.kv_cache_views)
        if type(self).swap_blocks is AttentionBackend.swap_blocks:
            for kv_cache in kv_caches:
                self._copies(kv_cache, kv_cache, src_to_dst)
        for kv_cache in kv_caches:
            self.swap_blocks(kv_cache, kv_cache, src_to_dst)

    def swap_blocks(self, src_kv_cache: Any, dst_kv_cache: Any, src_to_dst: Any) -> None:
        """Copy blocks from one cache to another, or the same, perhaps on another device: ``src_to_dst`` is (n, 2) of
        block ids, all read before any is written.

        Either cache may be whole, or a pair. Of two tensors whole blocks are copied, else what ``kv_cache_views``
        shows: a vendor whose tensors hold more overrides it. ValueError naming the argument, before anything is
        written, for a cache that holds more than those views, for pairs that are none, or lie outside the caches
        (unless they are on a device, which is not waited for), and for a cache that cannot be written to.
        """
        axis, parts, pairs = self._copies(src_kv_cache, dst_kv_cache, src_to_dst)
        # Values may be a part of the keys: both are read before either is written.
        blocks = [source.index_select(axis, pairs[:, 0].to(source.device)) for source, _ in parts]
        for (_, target), chosen in zip(parts, blocks, strict=True):
            target.index_copy_(axis, pairs[:, 1].to(target.device), chosen.to(target.device))

    def move_slots(self, kv_caches: Sequence[Any], moves: Any) -> None:
        """Move tokens within each layer's cache, whole or a pair: ``moves`` is (n, 2), the slots from which and to
        which, all read before any is written. It is what ``MetadataBuilder.keep_paths`` returns, of the layers' group.
        In a cache that several layers have, in one form or in several, they are moved once.

        What ``kv_cache_views`` shows is moved: a class whose tensors hold more of a token overrides it. Nothing waits
        for a device. ValueError naming the argument, before any layer's cache is written to, for a cache that cannot
        be written to, holds more or shares a part of another's memory, and for pairs that are none, or lie outside the
        caches (unless they are on a device).
        """
        from attncore.ops.distinct_caches import distinct_caches
        from attncore.ops.move_slots import move_slots_of_layers

        layers = []
        for kv_cache in distinct_caches(kv_caches, self.kv_cache_views):
            layers.append(self.kv_cache_views(kv_cache))
            held, shown = _bytes(kv_cache), _bytes(layers[-1])
            if held > shown:
                raise ValueError(
                    f"kv_caches: one holds {held} bytes, of which kv_cache_views shows {shown} as keys and values; "
                    f"override move_slots in {type(self).__name__}, which moves all that they hold of a token"
                )
        move_slots_of_layers(layers, moves)

    def _copies(self, src_kv_cache: Any, dst_kv_cache: Any, src_to_dst: Any) -> tuple[int, list[Any], Tensor]:
        """What ``swap_blocks`` copies, checked: the axis of blocks, parts of both caches, and the pairs."""
        import torch

        from attncore.abstract.cache_views import held_as_bytes
        from attncore.array_arguments import block_pairs  # it imports NumPy
        from attncore.ops.written_tensor import check_strided, check_written

        if isinstance(src_kv_cache, torch.Tensor) and isinstance(dst_kv_cache, torch.Tensor):
            axis, parts = self.kv_cache_block_axis(), [(src_kv_cache, dst_kv_cache)]
            for name, whole in (("src_kv_cache", src_kv_cache), ("dst_kv_cache", dst_kv_cache)):
                self._check_whole(name, whole, axis)
        else:
            views = self.kv_cache_views(src_kv_cache), self.kv_cache_views(dst_kv_cache)
            for name, kv_cache, shown in zip(
                ("src_kv_cache", "dst_kv_cache"), (src_kv_cache, dst_kv_cache), views, strict=True
            ):
                self._check_nothing_beside(name, kv_cache, shown)
            axis, parts = 0, list(zip(*views, strict=True))
        own = self.kv_cache_torch_dtype()
        for source, target in parts:
            check_strided("src_kv_cache", source)
            check_written("dst_kv_cache", target)
            blocks = [
                # bytes are those of the backend's own dtype
                [*part.shape[:axis], *part.shape[axis + 1 :], own if held_as_bytes(part, own) else part.dtype]
                for part in (source, target)
            ]
            if blocks[0] != blocks[1]:
                raise ValueError(f"dst_kv_cache: blocks of {blocks[1]} found; src_kv_cache has {blocks[0]}")
        if not isinstance(src_to_dst, torch.Tensor) or src_to_dst.is_cpu:
            counts = [min(tensors[side].shape[axis] for tensors in parts) for side in (0, 1)]
            src_to_dst = block_pairs("src_to_dst", src_to_dst, *counts)
        pairs = torch.as_tensor(src_to_dst, dtype=torch.int64, device=parts[0][0].device).reshape(-1, 2)
        # torch indexes no fp8
        bytes_of = [[part.view(torch.uint8) if part.element_size() == 1 else part for part in pair] for pair in parts]
        return axis, bytes_of, pairs

    def _check_nothing_beside(self, name: str, kv_cache: Any, views: tuple[Tensor, Tensor]) -> None:
        """ValueError where a cache holds more than its views, by which alone blocks would be copied."""
        if isinstance(kv_cache, (tuple, list)) and type(self).swap_blocks is not AttentionBackend.swap_blocks:
            return  # what its tensors hold beside is copied by the class
        held, shown = _bytes(kv_cache), _bytes(views)
        if held > shown:
            raise ValueError(
                f"{name}: holds {held} bytes, of which kv_cache_views shows {shown} as keys and values; blocks of it "
                f"are not copied by these views alone: give two whole caches of one tensor each, or override "
                f"swap_blocks in {type(self).__name__}"
            )

    def _check_whole(self, name: str, kv_cache: Tensor, axis: int) -> None:
        """ValueError where a tensor is no whole cache, such as the keys alone, whose blocks are along another axis."""
        shape, found = list(self._shape(1)), list(kv_cache.shape)
        if [*found[:axis], 1, *found[axis + 1 :]] != shape:
            shown = ", ".join("blocks" if i == axis else str(size) for i, size in enumerate(shape))
            raise ValueError(
                f"{name}: a tensor of shape {tuple(found)} found; a whole cache of {type(self).__name__} has shape "
                f"({shown}): give one for each layer, or a pair of views"
            )

    def kv_cache_block_axis(self) -> int:
        """The axis of the cache that counts blocks."""
        sizes = zip(self._shape(1), self._shape(2), strict=True)
        grown = [axis for axis, (of_one, of_two) in enumerate(sizes) if of_one != of_two]
        if len(grown) != 1:
            raise ValueError(f"kv_cache_shape: of {type(self).__name__}, {len(grown)} axes grow with num_blocks, not 1")
        return grown[0]

    def _shape(self, num_blocks: int) -> tuple[int, ...]:
        config = self.config
        return self.kv_cache_shape(num_blocks, config.block_size, config.num_kv_heads, config.head_size)


def _bytes(tensors: Any) -> int:
    """Bytes of a cache's tensor, or of its tensors."""
    parts = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
    return sum(part.numel() * part.element_size() for part in parts)
