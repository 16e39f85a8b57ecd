"""Decode context parallelism: the tokens of each request spread over several ranks, each with a cache of its own.

One block id stands for a *virtual* block of ``block_size * world_size`` tokens: every rank keeps ``block_size`` of them
in its own block of that id. Runs of ``interleave`` tokens go to the ranks in turn. The engine gives its ``InputBatch``
the virtual block size; slots, lengths and tables of a rank are made here, on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.arguments import INT32_MAX
from attncore.array_arguments import Int32Array, Int64Array
from attncore.builder.blocks.check_whole_requests import check_whole_requests
from attncore.builder.checked_backend import check_backend
from attncore.builder.fields import COUNTS
from attncore.builder.metadata import CommonAttentionMetadata, check_metadata
from attncore.builder.rank_drafts import refuse_rank_drafts
from attncore.builder.slices import HostArrays, own_array
from attncore.kernels import codes, host_functions
from attncore.show import counted


@dataclass(frozen=True)
class ContextParallel:
    """The share of ``rank`` of ``world_size`` ranks, in kernel blocks of ``block_size`` tokens on each rank.

    ``interleave`` divides ``block_size``. ``tensor_parallel_size``, where given, is a multiple of ``world_size``: the
    ranks are taken from those that would otherwise hold the same keys. Raises ValueError that names the
    argument.
    """

    world_size: int
    rank: int
    block_size: int
    interleave: int = 1
    tensor_parallel_size: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("world_size", 1), ("block_size", 1), ("interleave", 1), ("rank", 0)):
            object.__setattr__(self, name, arguments.integer(name, getattr(self, name), least))
        ranks = arguments.optional_integer("tensor_parallel_size", self.tensor_parallel_size, 1)
        object.__setattr__(self, "tensor_parallel_size", ranks)
        if self.rank >= self.world_size:
            raise ValueError(f"rank: {self.rank} is outside 0..{self.world_size - 1} (world_size {self.world_size})")
        if self.block_size % self.interleave:
            raise ValueError(f"interleave: {self.interleave} does not divide block_size {self.block_size}")
        if self.virtual_block_size > INT32_MAX:
            raise ValueError(
                f"world_size: {counted(self.world_size, 'block')} of {counted(self.block_size, 'token')} do not fit "
                "int32"
            )
        if self.tensor_parallel_size is not None and self.tensor_parallel_size % self.world_size:
            raise ValueError(
                f"world_size: {self.world_size} does not divide tensor_parallel_size {self.tensor_parallel_size}"
            )

    @classmethod
    def of_virtual_blocks(
        cls, virtual_block_size: int, world_size: int, rank: int, interleave: int = 1
    ) -> ContextParallel:
        """The same for tables of virtual blocks of ``virtual_block_size`` tokens, such as those of an InputBatch."""
        virtual_block_size = arguments.integer("virtual_block_size", virtual_block_size, 1)
        world_size = arguments.integer("world_size", world_size, 1)
        if virtual_block_size % world_size:
            raise ValueError(
                f"world_size: {world_size} does not divide the virtual block of {counted(virtual_block_size, 'token')}"
            )
        return cls(world_size, rank, virtual_block_size // world_size, interleave)

    @property
    def virtual_block_size(self) -> int:
        """Tokens that one block id stands for: ``block_size`` of them on each rank."""
        return self.block_size * self.world_size

    def slot_mapping(
        self, block_table: npt.ArrayLike, context_lens: npt.ArrayLike, query_lens: npt.ArrayLike
    ) -> Int64Array:
        """int64[num_tokens]: the slot in this rank's cache of each token of the step, -1 where another rank keeps it.

        ``block_table`` int[n, width] of virtual blocks, lengths int[n]. Raises ValueError, naming the row, where a
        token's virtual block lies beyond the table.
        """
        table = array_arguments.block_table(block_table)
        return self.local_slots(
            host_functions.build_slot_mapping(table, context_lens, query_lens, self.virtual_block_size)
        )

    def local_slots(self, slot_mapping: npt.ArrayLike) -> Int64Array:
        """``slot_mapping`` int[T] of a batch built with the virtual block size, as slots of this rank's cache.

        Returns int64[T]; -1 stays -1, and a token that another rank keeps gets -1.
        """
        virtual = array_arguments.as_array("slot_mapping", slot_mapping)
        if virtual.ndim != 1 or (virtual.size and virtual.dtype.kind not in "iu"):
            raise ValueError(f"slot_mapping: {virtual.dtype}{list(virtual.shape)}; it must be a list of integers")
        if virtual.size and not -1 <= virtual.min() <= virtual.max() < 2**63:
            wrong = virtual[(virtual < -1) | (virtual >= 2**63)][0]
            raise ValueError(f"slot_mapping: {wrong} is no slot; slots are -1, for none, or 0 and more, of int64")
        # A slot gives the virtual block and the offset in it. (-1 is the last slot of block -1,
        # so that it stays -1, on the last rank too.)
        blocks, offsets = np.divmod(virtual.astype(np.int64), self.virtual_block_size)
        runs, within = np.divmod(offsets, self.interleave)
        rounds, ranks = np.divmod(runs, self.world_size)
        local = blocks * self.block_size + rounds * self.interleave + within
        return np.where(ranks == self.rank, local, np.int64(codes.PAD_SLOT_ID))

    def seq_lens(self, seq_lens: npt.ArrayLike) -> Int32Array:
        """int32[n]: how many of the first ``seq_lens`` int[n] tokens of a request this rank keeps.

        Of ``positions + 1`` it gives the number of the rank's keys that each query sees, which is the mask of a step
        that runs several tokens per request.
        """
        lens = array_arguments.lengths("seq_lens", seq_lens, 0).astype(np.int64)
        rounds, rest = np.divmod(lens, self.world_size * self.interleave)
        rest = np.clip(rest - self.rank * self.interleave, 0, self.interleave)
        local: Int32Array = (rounds * self.interleave + rest).astype(np.int32)
        return local

    def positions(self, seq_len: int) -> Int64Array:
        """int64[seq_lens([seq_len])[0]]: which of a request's first ``seq_len`` tokens this rank keeps, in order."""
        seq_len = arguments.integer("seq_len", seq_len, 0)
        kept = int(self.seq_lens([seq_len])[0])
        array_arguments.at_most("seq_len", kept, array_arguments.MOST_TOKENS, "tokens on this rank")
        local = np.arange(kept, dtype=np.int64)
        rounds, within = np.divmod(local, self.interleave)
        positions: Int64Array = (rounds * self.world_size + self.rank) * self.interleave + within
        return positions

    def block_table(self, block_table: npt.ArrayLike, seq_lens: npt.ArrayLike) -> Int32Array:
        """int32[n, longest]: the blocks in which this rank keeps tokens of each request, padded with 0.

        ``block_table`` int[n, width] of virtual blocks and ``seq_lens`` int[n] are the whole requests'. A request's
        tokens lie in this rank's blocks without gaps, so that a kernel reads them with the local length.
        """
        lens = array_arguments.lengths("seq_lens", seq_lens, 0)
        return self._local_table(array_arguments.block_table(block_table, len(lens)), self.seq_lens(lens))

    def page_lists(
        self, block_table: npt.ArrayLike, seq_lens: npt.ArrayLike
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """``paged_kv_indptr``, ``paged_kv_indices`` and ``paged_kv_last_page_len`` of this rank's keys.

        Arguments as for ``block_table``. A request without tokens on this rank has no pages.
        """
        return host_functions.build_page_lists(
            self.block_table(block_table, seq_lens), self.seq_lens(seq_lens), self.block_size
        )

    def metadata(self, metadata: CommonAttentionMetadata, backend: Any = None) -> CommonAttentionMetadata:
        """This rank's view of a batch that was built with the virtual block size.

        Slots, lengths, tables and page lists are the rank's; queries, positions and the order of rows are the batch's,
        so ``seq_lens`` counts the rank's keys and not context plus queries. ``backend`` wraps the arrays (None: as the
        batch's). Refused for a batch that is padded for a graph, for a cross group, for what is one rank's already, for
        lengths that a sliding window has capped, and with a ``backend`` for decodes of several tokens.
        """
        check_metadata("metadata", metadata)
        if backend is not None:
            check_backend(backend)
        host = metadata.host
        check_whole_requests(metadata, "a rank takes its share of all keys")
        lens = host.seq_lens
        table = self.block_table(host.block_table, lens)
        if not table.shape[1]:  # a table without columns says that all keys are the step's own
            table = np.zeros((len(table), 1), np.int32)
        fields = HostArrays(
            slot_mapping=self.local_slots(host.slot_mapping),
            positions=own_array(host, "positions"),
            token_to_req_indices=own_array(host, "token_to_req_indices"),
            seq_lens=self.seq_lens(lens),
            context_lens=self.seq_lens(host.context_lens),
            query_lens=own_array(host, "query_lens"),
            logits_indices=own_array(host, "logits_indices"),
            query_start_loc=own_array(host, "query_start_loc"),
            block_table=table,
        )
        fields.seq_start_loc = host_functions.build_query_start_loc(fields.seq_lens)
        pages = host_functions.build_page_lists(fields.block_table, fields.seq_lens, self.block_size)
        fields.paged_kv_indptr, fields.paged_kv_indices, fields.paged_kv_last_page_len = pages
        first, last = (0, metadata.num_decodes) if metadata.decodes_first else (metadata.num_prefills, len(lens))
        decodes, others = fields.seq_lens[first:last], np.delete(fields.seq_lens, slice(first, last))
        counts = {name: getattr(metadata, name) for name in COUNTS} | {
            "max_seq_len": int(fields.seq_lens.max(initial=0)),
            "max_decode_seq_len": int(decodes.max(initial=0)),
            "max_prefill_seq_len": int(others.max(initial=0)),
            **dict.fromkeys(("num_encoder_tokens", "max_encoder_seq_len"), 0),
        }
        mine = CommonAttentionMetadata(
            fields,
            metadata._wrap if backend is None else backend.from_host,
            **counts,
            req_ids=metadata.req_ids,
            decodes_first=metadata.decodes_first,
            from_groups=metadata.from_groups,
            _placeholder_maps=metadata.placeholder_maps,
            _of_rank=self.world_size > 1,
        )
        if backend is not None:
            refuse_rank_drafts(mine, backend)
        return mine

    def _local_table(self, table: Int32Array, local_lens: Int32Array) -> Int32Array:
        num_blocks = -(-local_lens.astype(np.int64) // self.block_size)
        short = np.flatnonzero(num_blocks > table.shape[1])
        if len(short):
            row = int(short[0])
            raise ValueError(
                f"block_table: row {row} holds {counted(table.shape[1], 'block')} but needs {num_blocks[row]} "
                f"(block_size {self.block_size} on each of {counted(self.world_size, 'rank')})"
            )
        width = int(num_blocks.max(initial=0))
        return np.where(np.arange(width) < num_blocks[:, np.newaxis], table[:, :width], np.int32(0))
