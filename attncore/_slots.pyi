"""Types of the compiled kernels; attncore.kernels.numba has the same."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IMPLEMENTATION: str
READS_INTS: str

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]

class Stay:
    def __enter__(self) -> None: ...
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...

class Entrance:
    busy: bool
    unfinished: bool
    entered: object
    undo: list[tuple[Any, ...]]
    refused: Callable[[], Exception]
    def enter(self) -> Stay: ...
    def check_reader(self) -> None: ...
    def roll_back(self) -> None: ...

class ReadOnly:
    """Exports an array's memory, which cannot be written to through it; nothing public leads back to the array."""

    def __init__(self, array: npt.NDArray[Any]) -> None: ...

class TableState:
    capacity: int
    width: int
    kernel_blocks: int
    def __init__(
        self, state: _Int32, stale: _Int32, table: _Int32, block_size: int, num_blocks: int, kernel_blocks: int
    ) -> None: ...
    def start(self, row: int) -> None: ...
    def num_columns(self, row: int) -> int: ...
    def append(self, row: int, ids: Any, passed: int) -> int: ...
    def truncate(self, row: int, num_blocks: int) -> None: ...
    def replace(self, row: int, column: int, block: int) -> None: ...
    def needs_block(self, num_rows: int, out: _Int32) -> int: ...
    def pass_windows(
        self, num_rows: int, window: int, num_rollback: int, released: list[tuple[int, int, list[int]]]
    ) -> None: ...
    def journal(self, num_rows: int, entries: _Int32) -> int: ...
    def forget_synced(self) -> None: ...

class BatchState(Entrance):
    capacity: int
    num_rows: int
    dirty: bool
    changes: int
    max_encoder_len: int
    req_ids: tuple[Any, ...]
    def __init__(self, state: _Int32, decoders: list[TableState], cross: TableState | None) -> None: ...
    def set_num_rows(self, count: int) -> None: ...
    def progress(self, row: int) -> tuple[int, int, bool]: ...
    def start(self, row: int, num_computed: int, encoder_len: int, encoder_done: bool) -> None: ...
    def set_computed(self, row: int, num_computed: int) -> None: ...
    def swap(self, moves: tuple[tuple[int, int], ...]) -> None: ...
    def swap_back(self, moves: tuple[tuple[int, int], ...]) -> tuple[Any, ...]: ...

class AdoptedRows:
    def __init__(
        self, fields: dict[str, _Int32], max_num_reqs: int, max_num_tokens: int, block_size: int, max_model_len: int,
        decode_threshold: int, pad_seq_len: int,
    ) -> None: ...  # fmt: skip
    def fill(
        self, starts: _Int32, lengths: _Int32 | None, num_slots: int, columns: int, captured_query_len: int,
        uniform: bool, capturing: bool,
    ) -> dict[str, int] | tuple[int, int]: ...  # fmt: skip
    def fill_counted(self, num_rows: int, has_lengths: bool) -> None: ...

class KnownStep:
    def forget(self) -> None: ...

class KnownSteps:
    checks: bool
    def __init__(
        self, capsule: Any, tensor_type: type, metadata_type: type, entrance: Entrance, owner: Any,
        rows: list[AdoptedRows], max_num_reqs: int, uniform: bool, checks: bool, ready: tuple[Any, Any] | None,
        device_index: int,
    ) -> None: ...  # fmt: skip
    def remember(
        self, tensors: tuple[Any, ...], kept: Any, given: Any, values: dict[str, Any], host: list[dict[str, _Int32]],
        query_len: int, quiet: bool,
    ) -> KnownStep | None: ...  # fmt: skip
    def forget(self) -> None: ...
    def last_built(self, step: int) -> tuple[Any, Any, int] | None: ...
    def quick(
        self, builder: Any, query_start_loc: Any, seq_lens: Any, block_table: Any, slot_mapping: Any, host_starts: Any,
        host_lengths: Any, bounded: Any,
    ) -> Any: ...  # fmt: skip
    def step(
        self, builder: Any, query_start_loc: Any, seq_lens: Any, block_table: Any, slot_mapping: Any, host_starts: Any,
        host_lengths: Any, bounded: Any,
    ) -> Any: ...  # fmt: skip

class ColumnState:
    def __init__(
        self,
        values: npt.NDArray[np.uint8],
        itemsize: int,
        per_token: bool,
        given: _Int64,
        num_given: _Int32,
        integers: bool,
    ) -> None: ...
    def write(self, batch: BatchState, values: list[Any], count: int) -> bool: ...
    def give(self, place: int, tokens: npt.NDArray[np.uint8] | None) -> None: ...
    def tokens_of(self, place: int) -> npt.NDArray[np.uint8] | None: ...

class StepArena:
    step: int
    num_reqs: int
    num_tokens: int
    num_actual_reqs: int
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    max_query_len: int
    max_seq_len: int
    max_prefill_seq_len: int
    max_decode_seq_len: int
    max_decode_query_len: int
    num_encoder_tokens: int
    max_encoder_seq_len: int
    num_cross_slots: int
    changes: int
    req_ids: tuple[Any, ...]
    moves: tuple[tuple[int, int], ...]
    views: tuple[tuple[dict[str, Any], tuple[str, ...]], ...]
    def __init__(
        self,
        fields: dict[str, npt.NDArray[Any]],
        groups: list[dict[str, npt.NDArray[Any]]],
        capacity: tuple[int, int, int],
        has_cross: bool,
    ) -> None: ...

class StepShape:
    arenas: list[StepArena]
    metadata: list[Any]
    pads: bool
    uniform: bool
    num_reqs: int
    num_tokens: int
    query_len: int
    pad_seq_len: int
    def __init__(
        self,
        arenas: list[StepArena],
        metadata: list[Any],
        pads: bool = False,
        num_reqs: int = 0,
        query_len: int = 0,
        pad_seq_len: int = 0,
        uniform: bool = True,
        num_tokens: int = 0,
        sources: list[npt.NDArray[np.uint8]] | None = None,
        device: npt.NDArray[np.uint8] | None = None,
    ) -> None: ...
    capacity: Any
    replay: Any
    bucket: Any
    plans: Any
    recorded: bool
    tail: int
    def commit(self, step: int) -> None: ...

class StepSender:
    sent: int
    pending: int
    pending_shape: StepShape | None
    last: int
    last_shape: StepShape | None
    alone: bool
    def __init__(self, arenas: _Int64, groups: list[TableState], entries: int, receipt: _Int64) -> None: ...
    def write(self, step: int, shape: StepShape, out: StepArena, num_rows: int) -> int: ...
    def publish(self, step: int) -> None: ...
    def withdraw(self, step: int) -> None: ...
    def seen(self, step: int) -> bool: ...
    def note_sent(self, step: int, shape: StepShape) -> None: ...
    def launch(self, step: int, graph: Any) -> bool: ...
    ahead: bool
    published: int
    launched_before: int
    def start_ahead(self) -> None: ...
    def launch_ahead(self, count: int) -> None: ...

class StepKernel:
    next_step: int
    last: list[StepArena | None]
    def __init__(
        self,
        batch: BatchState,
        eager: StepShape,
        query_lens: _Int32,
        swaps: _Int32,
        kinds: npt.NDArray[np.int8],
        ran: _Int32,
        max_model_len: int,
        max_num_tokens: int,
        max_num_encoder_tokens: int,
        decode_threshold: int,
        world: int,
        rank: int,
        interleave: int,
    ) -> None: ...
    def decode_step(self) -> Any | None: ...
    def add_shape(self, bucket: Any, shape: StepShape) -> None: ...
    def add_column(self, column: ColumnState) -> None: ...
    def drop_shape(self, bucket: Any) -> None: ...
    def padded_step(self, num_reqs: Any) -> Any | None: ...
    def decode_step_inside(self, shape: StepShape) -> Any | None: ...
    def empty_step(self, shape: StepShape, max_seq_len: int) -> Any: ...
    def take_back(self, shape: StepShape, step: int) -> None: ...
    def forget_arena(self, arena: int) -> None: ...
    def schedule_all(self, query_len: int) -> None: ...
    def check(self, ahead: bool = False) -> tuple[int, int, int, int]: ...
    def check_shape(self, shape: StepShape) -> tuple[int, int, int]: ...
    def arrange(self, start_moving: Callable[[], None]) -> tuple[tuple[tuple[int, int], ...], int, int]: ...
    def step(self, shape: StepShape, num_decodes: int, num_reqs: int) -> Any: ...

class SentSteps:
    fill: Callable[[Any], None] | None
    def __init__(
        self,
        kernel: StepKernel,
        sender: StepSender,
        core: Any,
        backends: Any,
        side: Any,
        eager: list[StepShape],
        fill: Callable[[Any], None] | None,
        is_capturing: Callable[[], bool],
        current: Callable[[], int] | None,
        index: int,
    ) -> None: ...
    def build(self, scheduled: Any, query_len: Any, bucket: Any) -> Any | None: ...

class SentAhead:
    def __init__(self, sent: SentSteps, make: Callable[..., Any], holders: tuple[Any, ...]) -> None: ...
    def run_ahead(self, num_steps: Any, bucket: Any, scheduled: Any) -> Any | None: ...
    def launch(self, steps: Any, graph: Any, count: Any) -> bool: ...

def append_slots(
    is_profile_run: Any, slot_mapping: Any, seq_id: Any, seq_len: Any, context_len: Any, start_idx: Any,
    block_size: Any, block_tables: Any,
) -> bool: ...  # fmt: skip
def append_blocks(batch: BatchState, table: TableState, order: Any, given: dict[Any, Any]) -> bool: ...
def append_blocks_by_group(
    batch: BatchState, tables: tuple[TableState, ...], names: tuple[str, ...], order: Any, given: dict[Any, Any]
) -> bool: ...
def roll_back(batch: BatchState, order: Any, given: dict[Any, Any]) -> bool: ...

class GroupReader(Entrance):
    num_seqs: int
    num_ids: int
    encoder_group: int
    placeholder_group: int
    def read(self, groups: Iterable[Any]) -> bool: ...
    def measure(
        self, block_size: int, window: int, chunked_prefill: bool, hit_anywhere: bool, multi_token_decode: bool
    ) -> tuple[int, ...]: ...
    def fill(
        self,
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
    def fill_pages(self, indptr: _Int32, indices: _Int32, last_page_len: _Int32) -> None: ...

def fill_slot_mapping(
    block_table: _Int32, context_lens: _Int32, query_lens: _Int32, block_size: int, out: _Int64
) -> int: ...
def fill_positions(
    context_lens: _Int32, query_lens: _Int32, positions: _Int64, token_to_req_indices: _Int32
) -> int: ...
def fill_page_indices(block_table: _Int32, indptr: _Int32, out: _Int32) -> int: ...
def fill_block_table(rows: list[Sequence[int] | npt.NDArray[Any]], out: _Int32) -> int: ...
def classify(
    query_lens: _Int32,
    context_lens: _Int32,
    decode_threshold: int,
    extend_threshold: int,
    kinds: npt.NDArray[np.int8],
    counts: _Int64,
) -> None: ...
def order_kinds(kinds: npt.NDArray[np.int8], swaps: _Int32) -> int: ...
