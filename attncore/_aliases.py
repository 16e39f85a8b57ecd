"""The names by which engines of the first generation call a backend, each a stated alias of one of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from attncore.abstract import AttentionImpl, AttentionState


class FirstGenerationNames:
    """Mixed into AttentionBackend."""

    if TYPE_CHECKING:
        name: str
        impl_class: ClassVar[Any]
        state_class: ClassVar[Any]

        def kv_cache_shape(
            self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
        ) -> tuple[int, ...]: ...

    def get_name(self) -> str:
        """``name``."""
        return self.name

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """``impl_class``."""
        found: type[AttentionImpl] = cls.impl_class
        return found

    @classmethod
    def get_state_cls(cls) -> type[AttentionState]:
        """``state_class``."""
        found: type[AttentionState] = cls.state_class
        return found

    @classmethod
    def get_metadata_cls(cls) -> type[Any]:
        """``attncore.builder.CommonAttentionMetadata``."""
        from attncore.builder import CommonAttentionMetadata

        return CommonAttentionMetadata

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        """``attncore.CommonMetadataBuilder``: the builder over groups of sequences."""
        from attncore.builder import CommonMetadataBuilder

        return CommonMetadataBuilder

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """``kv_cache_shape``."""
        return self.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    def make_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """``get_metadata_cls()(...)``."""
        return self.get_metadata_cls()(*args, **kwargs)

    def make_metadata_builder(self, *args: Any, **kwargs: Any) -> Any:
        """``get_builder_cls()(...)``."""
        return self.get_builder_cls()(*args, **kwargs)

    def advance_step(self, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """``metadata.advance_step(...)``."""
        return metadata.advance_step(*args, **kwargs)
