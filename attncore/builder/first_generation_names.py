"""The names by which engines of the first generation call a step's metadata and state, each an alias of one of ours.

Those of a backend are in ``attncore.abstract.first_generation_names``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attncore.quoted import quoted


class IndexMap(NamedTuple):
    """Token ``dest[i]`` of the step takes row ``src[i]`` of the embeddings of a modality's items in it."""

    src: list[int]
    dest: list[int]


class FirstGenerationMetadataNames:
    """Mixed into CommonAttentionMetadata."""

    if TYPE_CHECKING:
        host: Any
        block_table: Any
        cross_block_table: Any
        seq_lens: Any
        context_lens: Any
        encoder_seq_lens: Any
        max_decode_query_len: int
        placeholder_maps: Any
        from_groups: bool
        use_cuda_graph: bool

    @property
    def block_tables(self) -> Any:
        """``block_table``."""
        return self.block_table

    @property
    def cross_block_tables(self) -> Any:
        """``cross_block_table``."""
        return self.cross_block_table

    @property
    def seq_lens_tensor(self) -> Any:
        """``seq_lens``. The first generation's ``seq_lens`` is a list of it: ``metadata.host.seq_lens.tolist()``."""
        return self.seq_lens

    @property
    def context_lens_tensor(self) -> Any:
        """``context_lens``."""
        return self.context_lens

    @property
    def encoder_seq_lens_tensor(self) -> Any:
        """``encoder_seq_lens``."""
        return self.encoder_seq_lens

    @property
    def decode_query_len(self) -> int:
        """``max_decode_query_len``."""
        return self.max_decode_query_len

    @property
    def multi_modal_placeholder_index_maps(self) -> dict[str, IndexMap]:
        """Of ``placeholder_maps``, ``source_indices`` and ``token_indices`` as lists, ``src`` and ``dest``."""
        return {
            modality: IndexMap(one.source_indices.tolist(), one.token_indices.tolist())
            for modality, one in self.placeholder_maps.items()
        }

    @property
    def is_profile_run(self) -> bool:
        """Whether a sequence of the step has no block table: its last token has no slot. False behind a graph."""
        if not self.from_groups or self.use_cuda_graph:
            return False
        return bool((self.host.slot_mapping.take(self.host.logits_indices) < 0).any())

    @property
    def is_all_encoder_attn_metadata_set(self) -> bool:
        """Whether the step has the fields of attention in an encoder."""
        return hasattr(self, "encoder_seq_lens")

    @property
    def is_all_cross_attn_metadata_set(self) -> bool:
        """Whether the step has the fields of cross attention too: those of encoders, slots and a table."""
        names = "encoder_seq_lens", "cross_slot_mapping", "cross_block_table"
        return all(hasattr(self, name) for name in names)


class FirstGenerationStateNames:
    """Mixed into AttentionState. An encoder/decoder model is one whose builder was made with ``encoder_decoder``."""

    if TYPE_CHECKING:
        builder: Any

        def metadata_for_capture(self, batch_size: int) -> Any: ...
        def graph_input_buffers(self, metadata: Any) -> dict[str, Any]: ...
        def prepare(self, metadata: Any) -> Any: ...

    def graph_capture_get_metadata_for_batch(self, batch_size: int, is_encoder_decoder_model: bool = False) -> Any:
        """``metadata_for_capture``."""
        self._check_model(is_encoder_decoder_model)
        return self.metadata_for_capture(batch_size)

    def get_graph_input_buffers(self, attn_metadata: Any, is_encoder_decoder_model: bool = False) -> dict[str, Any]:
        """Of ``graph_input_buffers``, those that the first generation had, by its names."""
        self._check_model(is_encoder_decoder_model)
        buffers = self.graph_input_buffers(attn_metadata)
        names = {"slot_mapping": "slot_mapping", "seq_lens_tensor": "seq_lens", "block_tables": "block_table"}
        if is_encoder_decoder_model:
            names |= {
                "encoder_seq_lens_tensor": "encoder_seq_lens",
                "cross_slot_mapping": "cross_slot_mapping",
                "cross_block_tables": "cross_block_table",
            }
        return {first: buffers[ours] for first, ours in names.items()}

    def prepare_graph_input_buffers(
        self, input_buffers: dict[str, Any], attn_metadata: Any, is_encoder_decoder_model: bool = False
    ) -> None:
        """``prepare``: into all buffers of the step's size, of which ``input_buffers`` must be some."""
        own = self.get_graph_input_buffers(attn_metadata, is_encoder_decoder_model)
        for name, buffer in own.items():
            if not _is_same(input_buffers.get(name), buffer):
                raise ValueError(
                    f"input_buffers: {quoted(name)} is not what get_graph_input_buffers gives for a step of this size"
                )
        self.prepare(attn_metadata)

    def _check_model(self, is_encoder_decoder_model: bool) -> None:
        found = bool(getattr(self.builder, "encoder_decoder", False))
        if bool(is_encoder_decoder_model) != found:
            raise ValueError(
                f"is_encoder_decoder_model: {is_encoder_decoder_model}, but the state's builder was made with "
                f"encoder_decoder={found}"
            )


def _is_same(given: Any, buffer: Any) -> bool:
    """Whether they are one tensor, or arrays of the same memory: each access of a step's array gives another view."""
    if isinstance(given, np.ndarray) and isinstance(buffer, np.ndarray):
        return given.__array_interface__ == buffer.__array_interface__
    return given is buffer
