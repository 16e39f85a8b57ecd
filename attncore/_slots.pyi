"""Types of the compiled kernels; attncore._slots_numba has the same."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IMPLEMENTATION: str
READS_INTS: str

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]

class BlockRows:
    capacity: int
    width: int
    num_rows: int
    dirty: bool
    changes: int
    req_ids: tuple[Any, ...]
    def __init__(self, state: _Int32, stale: _Int32, table: _Int32, block_size: int, num_blocks: int) -> None: ...
    def enter(self) -> bool: ...
    def leave(self) -> None: ...
    def start(self, row: int, num_computed: int) -> None: ...
    def append(self, row: int, ids: Any) -> int: ...
    def truncate(self, row: int, num_blocks: int) -> None: ...
    def set_computed(self, row: int, num_computed: int) -> None: ...
    def needs_block(self, out: _Int32) -> int: ...

class StepArena:
    step: int
    num_reqs: int
    num_tokens: int
    num_decodes: int
    num_prefills: int
    num_prefill_tokens: int
    max_query_len: int
    max_seq_len: int
    max_prefill_seq_len: int
    max_decode_seq_len: int
    num_pages: int
    changes: int
    req_ids: tuple[Any, ...]
    moves: tuple[tuple[int, int], ...]
    def __init__(self, fields: dict[str, npt.NDArray[Any]]) -> None: ...

class StepKernel:
    next_step: int
    def __init__(
        self,
        rows: BlockRows,
        arenas: list[StepArena],
        metadata: list[Any],
        query_lens: _Int32,
        swaps: _Int32,
        max_model_len: int,
        max_num_tokens: int,
    ) -> None: ...
    def decode_step(self) -> Any | None: ...
    def decode_step_inside(self) -> Any | None: ...
    def undo(self, num_swaps: int) -> None: ...
    def schedule_all(self) -> None: ...
    def check(self) -> tuple[int, int, int]: ...
    def arrange(self) -> tuple[int, int, int]: ...
    def step(self, num_decodes: int, num_reqs: int) -> Any: ...

class GroupReader:
    num_seqs: int
    def enter(self) -> bool: ...
    def leave(self) -> None: ...
    def read(self, groups: Iterable[Any]) -> bool: ...
    def measure(
        self, block_size: int, window: int, chunked_prefill: bool, hit_anywhere: bool, multi_token_decode: bool
    ) -> tuple[int, ...]: ...
    def fill(
        self,
        block_size: int,
        window: int,
        pad: int,
        slot_mapping: _Int64,
        positions: _Int64,
        token_to_req_indices: _Int32,
        seq_lens: _Int32,
        context_lens: _Int32,
        query_lens: _Int32,
        query_start_loc: _Int32,
        seq_start_loc: _Int32,
        logits_indices: _Int32,
    ) -> None: ...
    def fill_table(self, table: _Int32) -> None: ...
    def fill_pages(self, block_size: int, indptr: _Int32, indices: _Int32, last_page_len: _Int32) -> None: ...

def fill_slot_mapping(
    block_table: _Int32, context_lens: _Int32, query_lens: _Int32, block_size: int, out: _Int64
) -> None: ...
def fill_positions(
    context_lens: _Int32, query_lens: _Int32, positions: _Int64, token_to_req_indices: _Int32
) -> None: ...
def fill_page_indices(block_table: _Int32, indptr: _Int32, out: _Int32) -> None: ...
def fill_block_table(rows: list[Sequence[int] | npt.NDArray[Any]], out: _Int32) -> int: ...
