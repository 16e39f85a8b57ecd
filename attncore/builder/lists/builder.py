"""CommonMetadataBuilder, the list builder: metadata from groups of sequences, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from attncore import arguments
from attncore.arguments import INT32_MAX, UNREADABLE
from attncore.builder.blocks.placeholder_map import PlaceholderMap
from attncore.builder.lists import error_texts
from attncore.builder.lists.advance_step import advance_step
from attncore.builder.lists.encoders import encoder_fields
from attncore.builder.lists.placeholders import placeholder_maps
from attncore.builder.lists.sequence_group import SequenceGroup
from attncore.builder.lists.settings import ListSettings
from attncore.builder.metadata import CommonAttentionMetadata, Source
from attncore.builder.show import list_builder_text
from attncore.builder.slices import HostArrays, own_arrays
from attncore.builder.uncopied import Uncopied
from attncore.kernels import KernelsName, codes
from attncore.show import counted, guarded


class _Measures(NamedTuple):
    """The result of GroupReader.measure."""

    code: int
    row: int
    token: int
    num_tokens: int
    num_seq_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    widest_row: int
    num_pages: int
    max_query_len: int
    max_prefill_seq_len: int
    max_decode_seq_len: int
    max_decode_query_len: int
    longest: int


# Returns uninitialised arrays for these numbers of sequences, requests, tokens, columns and pages (-1: no page lists).
Allocate = Callable[[int, int, int, int, int], HostArrays]


def _new_arrays(num_seqs: int, num_reqs: int, num_tokens: int, width: int, num_pages: int) -> HostArrays:
    host = HostArrays(
        slot_mapping=np.empty(num_tokens, np.int64),
        positions=np.empty(num_tokens, np.int64),
        token_to_req_indices=np.empty(num_tokens, np.int32),
        seq_lens=np.empty(num_reqs, np.int32),
        context_lens=np.empty(num_seqs, np.int32),
        query_lens=np.empty(num_seqs, np.int32),
        query_start_loc=np.empty(num_seqs + 1, np.int32),
        seq_start_loc=np.empty(num_reqs + 1, np.int32),
        logits_indices=np.empty(num_seqs, np.int32),
        block_table=np.empty((num_reqs, width), np.int32),
    )
    if num_pages >= 0:
        own = own_arrays(host)
        own.paged_kv_indptr = np.empty(num_reqs + 1, np.int32)
        own.paged_kv_indices = np.empty(num_pages, np.int32)
        own.paged_kv_last_page_len = np.empty(num_reqs, np.int32)
    return host


_new_source = tuple.__new__
"""Makes a Source from a tuple: its own constructor takes 0.2 us more, 2 % of a small step."""


class CommonMetadataBuilder(Uncopied, ListSettings):
    """Builds metadata from lists of SequenceGroup, by the rules of the first generation (docs/list-builder.md).

    ``layout`` names the dialect: ``common`` (None), ``flash``, ``flashinfer`` or ``rocm``. ``block_size`` is in tokens,
    and the backend's where there is one. ``sliding_window`` is the number of tokens that a query sees, itself included
    (None: all). ``max_seq_len_to_capture``, in tokens, is read only where a build pads for a CUDA graph: the table is
    then ``ceil(max_seq_len_to_capture / block_size)`` columns wide. ``backend`` None gives NumPy arrays; with a
    backend, metadata holds tensors on its device. Each build makes new arrays, which live as long as the caller keeps
    them.

    ``encoder_decoder``: every group has an ``encoder_seq_len`` and a ``cross_block_table``, and metadata has the fields
    of encoders and of cross attention. ``max_encoder_seq_len_to_capture`` is the length for the cross table (None:
    ``max_seq_len_to_capture``). Raises ValueError or TypeError that names the argument.
    """

    def __init__(
        self,
        block_size: int,
        layout: str | None = None,
        *,
        sliding_window: int | None = None,
        chunked_prefill: bool = False,
        max_seq_len_to_capture: int | None = None,
        encoder_decoder: bool = False,
        max_encoder_seq_len_to_capture: int | None = None,
        backend: Any = None,
        kernels: KernelsName | None = None,
    ) -> None:
        layout = self.default_layout if layout is None else layout
        super().__init__(
            block_size, layout, sliding_window, chunked_prefill, max_seq_len_to_capture, encoder_decoder,
            max_encoder_seq_len_to_capture, backend, kernels,
        )  # fmt: skip

    metadata_class: type[CommonAttentionMetadata] = CommonAttentionMetadata
    """The class of the steps."""
    default_layout = "common"
    """The ``layout`` of a builder that is given none; ``backend.get_builder_cls()`` has the backend's."""

    __repr__ = guarded(list_builder_text)

    def build(self, groups: Iterable[SequenceGroup], cuda_graph_pad_size: int = -1) -> CommonAttentionMetadata:
        """Builds the metadata of one step of ``groups``, prompts before decodes.

        ``cuda_graph_pad_size`` is the number of padded requests behind the decodes, or -1 without a graph. Raises
        ValueError or TypeError that names the group, sequence and field.
        """
        return self._build(groups, cuda_graph_pad_size, _new_arrays)

    def advance_step(
        self,
        metadata: CommonAttentionMetadata,
        input_tokens: Any = None,
        sampled_token_ids: Any = None,
        num_queries: int | None = None,
        turn_prefills_into_decodes: bool = False,
    ) -> None:
        """Moves a step that this builder built on by one token: see ``attncore.builder.advance_step``."""
        advance_step(metadata, input_tokens, sampled_token_ids, num_queries, turn_prefills_into_decodes)

    def build_unplanned(self, groups: list[SequenceGroup]) -> CommonAttentionMetadata:
        """``build`` without a plan and a graph, for a caller that is inside the builder, and says when it happened."""
        return self._build_step(groups, -1, _new_arrays, planned=False)

    def _build(
        self,
        groups: Iterable[SequenceGroup],
        cuda_graph_pad_size: int,
        allocate: Allocate,
        commit: Callable[[CommonAttentionMetadata], None] | None = None,
    ) -> CommonAttentionMetadata:
        """``build`` into the arrays of ``allocate``; ``commit`` is called with the step, inside the builder still."""
        cuda_graph_pad_size = arguments.integer("cuda_graph_pad_size", cuda_graph_pad_size, -1)
        if type(groups) is not tuple:  # a list of its own: reading a value may run code that changes the caller's
            try:
                groups = list(groups)
            except UNREADABLE:
                raise error_texts.malformed_groups(groups) from None
        with self.enter():
            metadata = self._build_step(groups, cuda_graph_pad_size, allocate)
            if commit is not None:
                commit(metadata)
            return metadata

    def _build_step(
        self, groups: Any, cuda_graph_pad_size: int, allocate: Allocate, *, planned: bool = True
    ) -> CommonAttentionMetadata:
        reader, measures = self._reader, self._measure(groups)
        if reader.encoder_group >= 0 and not self._encoder_decoder:
            raise ValueError(
                f"groups[{reader.encoder_group}].encoder_seq_len: given to a builder that was not made with "
                "encoder_decoder=True"
            )
        use_graph, pad = cuda_graph_pad_size >= 0, max(cuda_graph_pad_size, 0)
        width = self._graph_width(groups, measures) if use_graph else measures.widest_row
        num_reqs, num_tokens = reader.num_seqs + pad, measures.num_tokens + pad
        if max(num_tokens, measures.num_seq_tokens + pad) > INT32_MAX:
            raise ValueError(f"cuda_graph_pad_size: {counted(pad, 'padded request')} do not fit int32")
        # Beside the tokens and the table: seq_lens and seq_start_loc.
        if self.max_numbers is not None and num_tokens + num_reqs * (width + 2) > self.max_numbers:
            raise ValueError(
                f"groups: an answer of {counted(num_tokens, 'token')} and a table of {num_reqs} x {width} is more "
                f"than the {counted(self.max_numbers, 'number')} allowed here (of `attncore build`, as many as "
                "--max-answer bytes hold)"
            )
        num_pages = measures.num_pages if self._dialect.page_lists else -1
        sizes = reader.num_seqs, num_reqs, num_tokens, width, num_pages
        maps = self._placeholder_maps(groups, pad, sizes) if reader.placeholder_group >= 0 else None
        host, step = allocate(*sizes), self.last_step + 1
        self._fill(pad, vars(host._arrays))
        if self._sliding_window and measures.max_decode_query_len > 1 and self._backend is not None:
            self._check_decodes(groups, vars(host._arrays), measures.num_prefills)
        metadata = self.metadata_class(
            host,
            self.wrap,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_prefills=measures.num_prefills,
            num_prefill_tokens=measures.num_prefill_tokens,
            num_decodes=reader.num_seqs - measures.num_prefills,
            num_decode_tokens=num_tokens - measures.num_prefill_tokens,
            max_query_len=measures.max_query_len,
            max_seq_len=max(measures.max_prefill_seq_len, measures.max_decode_seq_len),
            max_prefill_seq_len=measures.max_prefill_seq_len,
            max_decode_seq_len=measures.max_decode_seq_len,
            use_cuda_graph=use_graph,
            max_decode_query_len=measures.max_decode_query_len,
            from_groups=True,
            step=step,
            source=_new_source(Source, (self, groups, reader.num_ids, host)),
        )
        if self._encoder_decoder:
            fields, counts = encoder_fields(self, groups, reader.num_seqs, measures.num_prefills, num_reqs, use_graph)
            vars(own_arrays(host)).update(fields)
            vars(metadata).update(counts)
        if maps is not None:
            vars(metadata)["_placeholder_maps"] = maps
        if planned:
            if self.plan is not None:
                self.plan(metadata)
            self.last_step = step
        return metadata

    def _measure(self, groups: Any) -> _Measures:
        """Reads and checks the groups; what the arrays of the step come to."""
        if not self._reader.read(groups):
            raise error_texts.malformed_groups(groups)
        dialect = self._dialect
        measures = _Measures(
            *self._reader.measure(
                self._block_size, self._sliding_window or 0, self._chunked_prefill, dialect.whole_batch_hit,
                dialect.multi_token_decode,
            )
        )  # fmt: skip
        if measures.code != codes.OK:
            raise error_texts.refused_groups(
                groups,
                measures.code,
                measures.row,
                measures.token,
                self._block_size,
                self._sliding_window,
                dialect.name,
            )
        return measures

    def _check_decodes(self, groups: Any, host: dict[str, Any], first: int) -> None:
        """ValueError for a decode, of those from row ``first`` on, of which a token sees keys that its row of the table
        does not show. None is in the buffers of a graph, which hold decodes of one token.
        """
        rows = slice(first, self._reader.num_seqs)
        queries, contexts = host["query_lens"][rows], host["context_lens"][rows]
        seen = np.minimum(contexts, min((self._sliding_window or 0) - 1, INT32_MAX))  # ahead of the first token
        if (host["seq_lens"][rows] - queries < seen).any():  # reading the groups again takes many times as long
            error_texts.refuse_decodes_without_keys(groups, self._block_size, self._sliding_window or 0)

    def _placeholder_maps(self, groups: Any, pad: int, sizes: Any) -> dict[str, PlaceholderMap]:
        """The maps of the step that was read. It is filled twice, first here: a step whose placeholders are refused
        is not to be found where ``allocate`` has it written, such as the buffers of a graph.
        """
        host = _new_arrays(*sizes)
        self._fill(pad, vars(host._arrays))
        return placeholder_maps(groups, host.context_lens, host.query_lens, self.max_numbers)

    def _fill(self, pad: int, host: dict[str, Any]) -> None:
        """Writes the step that was read to the arrays of ``host``: a dict, whose items are found faster."""
        reader = self._reader
        reader.fill(
            pad, host["slot_mapping"], host["positions"], host["token_to_req_indices"], host["seq_lens"],
            host["context_lens"], host["query_lens"], host["query_start_loc"], host["seq_start_loc"],
            host["logits_indices"],
        )  # fmt: skip
        reader.fill_table(host["block_table"])
        if self._dialect.page_lists:
            reader.fill_pages(host["paged_kv_indptr"], host["paged_kv_indices"], host["paged_kv_last_page_len"])

    def _graph_width(self, groups: Any, measures: _Measures) -> int:
        """The fixed width of a captured table; ValueError where a graph cannot run this step."""
        capture = self._max_seq_len_to_capture
        if capture is None:
            raise ValueError("max_seq_len_to_capture: needed by a build that pads for a CUDA graph")
        if measures.num_prefills:
            raise ValueError("graph_batch_size: a graph batch holds decodes only; groups[0].is_prompt is true")
        width = -(-capture // self._block_size)
        if measures.longest > capture or (measures.widest_row > width and not self._dialect.cuts_lookahead):
            raise error_texts.beyond_capture(
                groups, self._block_size, self._sliding_window, capture, self._dialect.name
            )
        return width
