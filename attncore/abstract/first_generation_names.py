"""The names by which engines of the first generation call a backend, each an alias of one of ours.

The builders' classes have mixins of the same form in ``attncore.builder.first_generation_names``. NumPy, which the
builder needs, is imported when a name is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from attncore.abstract.attention_impl import AttentionImpl
    from attncore.abstract.backend_config import BackendConfig
    from attncore.builder import CommonAttentionMetadata, CommonAttentionState, CommonMetadataBuilder


class FirstGenerationNames:
    """Mixed into AttentionBackend: every name is a method that calls ours."""

    if TYPE_CHECKING:
        name: str
        config: BackendConfig
        impl_class: ClassVar[type[AttentionImpl]]
        state_class: ClassVar[type[CommonAttentionState] | None]
        metadata_class: ClassVar[type[CommonAttentionMetadata] | None]
        builder_class: ClassVar[type[CommonMetadataBuilder] | None]
        list_layout: ClassVar[str]

        def kv_cache_shape(
            self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
        ) -> tuple[int, ...]: ...

    def get_name(self) -> str:
        """``name``."""
        return self.name

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """``impl_class``."""
        return cls.impl_class

    @classmethod
    def get_state_cls(cls) -> type[CommonAttentionState]:
        """``state_class``, or where that is None ``attncore.AttentionState``."""
        from attncore.builder import CommonAttentionState

        return cls.state_class or CommonAttentionState

    @classmethod
    def get_metadata_cls(cls) -> type[CommonAttentionMetadata]:
        """``metadata_class``, or where that is None a subclass of ``CommonAttentionMetadata`` for this backend alone.

        The steps of ``get_builder_cls`` and of ``make_metadata`` are of it, and so are their views.
        """
        return cls.metadata_class or _metadata_class(cls)

    @classmethod
    def get_builder_cls(cls) -> type[CommonMetadataBuilder]:
        """``builder_class``, or where that is None a subclass of ``CommonMetadataBuilder``, the builder over groups of
        sequences, whose ``layout`` is by default the backend's ``list_layout``.
        """
        return cls.builder_class or _builder_class(cls)

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """``kv_cache_shape``."""
        return self.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    def get_kv_cache_stride_order(self) -> tuple[int, ...]:
        """The axes of ``get_kv_cache_shape`` from the outermost in memory to the innermost: (0, 1, 2, ...).

        The shape is that of the memory, in each layout: under HND heads come before tokens in the shape itself.
        """
        shape = self.get_kv_cache_shape(1, self.config.block_size, self.config.num_kv_heads, self.config.head_size)
        return tuple(range(len(shape)))

    def make_metadata(self, **fields: Any) -> CommonAttentionMetadata:
        """Metadata of a step by the keyword arguments of the first generation, of class ``get_metadata_cls()``.

        ``slot_mapping`` int64[T], ``block_tables`` int32[n, width], ``num_prefills``, ``num_prefill_tokens``,
        ``num_decode_tokens`` and ``seq_lens_tensor`` int32[n] (or ``seq_lens``, a list) are required; prompts come
        before decodes. Arrays are NumPy arrays or tensors, of which those on a device are copied to the host: this is
        for steps that an engine makes now and then. None counts as missing; what is missing and follows from the rest
        is derived. Settings of layers (``head_dim``, ``window_left``, ...) are ignored, for ``impl`` is given them.
        Raises TypeError for a name that is missing or unknown, and ValueError that names the argument where lengths and
        counts disagree.
        """
        from attncore.builder.first_generation_fields import fields_of_first_generation
        from attncore.builder.received_metadata import received

        return received(fields_of_first_generation(fields), self, self.get_metadata_cls())

    def make_metadata_builder(self, *args: Any, **kwargs: Any) -> CommonMetadataBuilder:
        """``get_builder_cls()(...)``."""
        return self.get_builder_cls()(*args, **kwargs)

    def advance_step(self, metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any) -> None:
        """``metadata.advance_step(...)``."""
        metadata.advance_step(*args, **kwargs)


def _metadata_class(backend_class: type[FirstGenerationNames]) -> type[CommonAttentionMetadata]:
    """The class of metadata of a class of backends, which keeps it."""
    found: type[CommonAttentionMetadata] | None = vars(backend_class).get("_own_metadata_class")
    if found is None:
        from attncore.builder import CommonAttentionMetadata

        found = type(f"{backend_class.__name__}Metadata", (CommonAttentionMetadata,), {"__module__": __name__})
        found._view_as = found
        backend_class._own_metadata_class = found  # type: ignore[attr-defined]
    return found


def _builder_class(backend_class: type[FirstGenerationNames]) -> type[CommonMetadataBuilder]:
    """The class of list builders of a class of backends, which keeps it."""
    found: type[CommonMetadataBuilder] | None = vars(backend_class).get("_own_builder_class")
    if found is None:
        from attncore.builder import CommonMetadataBuilder

        values = {
            "__module__": __name__,
            "__doc__": CommonMetadataBuilder.__doc__,
            "metadata_class": backend_class.get_metadata_cls(),
            "default_layout": backend_class.list_layout,
        }
        found = type(f"{backend_class.__name__}MetadataBuilder", (CommonMetadataBuilder,), values)
        backend_class._own_builder_class = found  # type: ignore[attr-defined]
    return found
