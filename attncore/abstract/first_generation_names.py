"""The names by which engines of the first generation call a backend, each an alias of one of ours.

The builders' classes have mixins of the same form in ``attncore.builder.first_generation_names``. NumPy, which the
builder needs, is imported when a name is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from attncore.abstract.attention_impl import AttentionImpl
    from attncore.builder import CommonAttentionMetadata, CommonAttentionState, CommonMetadataBuilder


class FirstGenerationNames:
    """Mixed into AttentionBackend: every name is a method that calls ours."""

    if TYPE_CHECKING:
        name: str
        impl_class: ClassVar[type[AttentionImpl]]
        state_class: ClassVar[type[CommonAttentionState] | None]

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
        """``attncore.builder.CommonAttentionMetadata``."""
        from attncore.builder import CommonAttentionMetadata

        return CommonAttentionMetadata

    @classmethod
    def get_builder_cls(cls) -> type[CommonMetadataBuilder]:
        """``attncore.CommonMetadataBuilder``: the builder over groups of sequences."""
        from attncore.builder import CommonMetadataBuilder

        return CommonMetadataBuilder

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """``kv_cache_shape``."""
        return self.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    def make_metadata(self, *args: Any, **kwargs: Any) -> CommonAttentionMetadata:
        """``get_metadata_cls()(...)``."""
        return self.get_metadata_cls()(*args, **kwargs)

    def make_metadata_builder(self, *args: Any, **kwargs: Any) -> CommonMetadataBuilder:
        """``get_builder_cls()(...)``."""
        return self.get_builder_cls()(*args, **kwargs)

    def advance_step(self, metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any) -> None:
        """``metadata.advance_step(...)``."""
        metadata.advance_step(*args, **kwargs)
