"""StepArena: the arrays and counts of one step."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.kernels.numba.columns import OUT, ColumnState
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.memory import SLOT, Struct, Words, address_of, lengths_at, number, struct_at


def check_length(name: str, length: int, least: int) -> None:
    if length < least:
        raise ValueError(f"{name}: {length} elements, and a step of this arena writes {least}")


MAX_COLUMNS = 16
BY_TOKEN = ("positions", "token_to_req_indices")
BY_REQUEST = ("seq_lens", "context_lens", "query_lens", "logits_indices")
SUMS = ("query_start_loc", "seq_start_loc", "prefill_query_start_loc", "prefill_seq_start_loc")
OF_ENCODERS = ("encoder_seq_lens", "encoder_query_lens")
SUMS_OF_ENCODERS = ("encoder_seq_start_loc", "encoder_query_start_loc")


GROUP = Struct("slot_mapping", "paged_kv_indptr", "paged_kv_last_page_len", "num_pages", "shares_pages")
GROUP_FIELDS, GROUP_BYTES = GROUP.type, SLOT * len(GROUP.names)
COUNTS = (
    "step", "num_reqs", "num_tokens", "num_actual_reqs", "num_actual_tokens", "num_decodes", "num_decode_tokens",
    "num_prefills", "num_prefill_tokens", "max_query_len", "max_seq_len", "max_prefill_seq_len", "max_decode_seq_len",
    "max_decode_query_len", "max_prefill_query_len", "num_encoder_tokens", "max_encoder_seq_len", "num_cross_slots",
    "changes", "version",
)  # fmt: skip
STEP_ARENA = Struct(
    *BY_TOKEN, *BY_REQUEST, *SUMS, *OF_ENCODERS, *SUMS_OF_ENCODERS, *COUNTS, "counting", "encoder_reqs", "num_ones",
    "num_seq_tokens", "max_reqs", "max_tokens", "max_cross_slots", "groups", "num_groups", "columns", "num_columns",
    "named", "has_moves",
)  # fmt: skip
"""The C struct StepArena. ``named`` is BatchState.named when ``req_ids`` was taken from the batch, -1: it was not."""
ARENA = STEP_ARENA.type


@jit
def group_at(out, g):
    return struct_at(out.groups + g * GROUP_BYTES, GROUP_FIELDS)


class GroupFields:
    """The arrays of a step that each KV-cache group has of its own, and the struct of their addresses."""

    def __init__(self, arrays: dict[str, Any], slots: int, reqs: int, shares_pages: bool, words: Any) -> None:
        least = {"slot_mapping": slots, "paged_kv_indptr": reqs + 1, "paged_kv_last_page_len": reqs}
        for name in least:
            check_length(name, len(arrays[name]), least[name])
        self._keep = arrays
        dtypes = (np.int64, np.int32, np.int32)
        words[:] = [
            *(address_of(arrays[name], dtype) for name, dtype in zip(least, dtypes, strict=True)),
            0,
            shares_pages,
        ]


class StepArena(Words):
    step = number(STEP_ARENA, "step")
    num_reqs = number(STEP_ARENA, "num_reqs")
    num_tokens = number(STEP_ARENA, "num_tokens")
    num_actual_reqs = number(STEP_ARENA, "num_actual_reqs")
    num_actual_tokens = number(STEP_ARENA, "num_actual_tokens")
    num_decodes = number(STEP_ARENA, "num_decodes")
    num_decode_tokens = number(STEP_ARENA, "num_decode_tokens")
    num_prefills = number(STEP_ARENA, "num_prefills")
    num_prefill_tokens = number(STEP_ARENA, "num_prefill_tokens")
    max_query_len = number(STEP_ARENA, "max_query_len")
    max_seq_len = number(STEP_ARENA, "max_seq_len")
    max_prefill_seq_len = number(STEP_ARENA, "max_prefill_seq_len")
    max_decode_seq_len = number(STEP_ARENA, "max_decode_seq_len")
    max_decode_query_len = number(STEP_ARENA, "max_decode_query_len")
    num_encoder_tokens = number(STEP_ARENA, "num_encoder_tokens")
    max_encoder_seq_len = number(STEP_ARENA, "max_encoder_seq_len")
    num_cross_slots = number(STEP_ARENA, "num_cross_slots")
    changes = number(STEP_ARENA, "changes")
    version = number(STEP_ARENA, "version")
    named = number(STEP_ARENA, "named")
    has_moves = number(STEP_ARENA, "has_moves")

    def __init__(
        self, fields: dict[str, Any], groups: list[dict[str, Any]], capacity: tuple[int, int, int], has_cross: bool
    ) -> None:
        self.max_tokens, self.max_reqs, encoder_tokens = capacity
        tokens, reqs, cross = self.max_tokens, self.max_reqs, len(groups) - has_cross
        least = dict.fromkeys(BY_TOKEN, tokens)
        least |= dict.fromkeys(BY_REQUEST + OF_ENCODERS * has_cross, reqs)
        least |= dict.fromkeys(SUMS + SUMS_OF_ENCODERS * has_cross, reqs + 1)
        for name in least:
            check_length(name, len(fields[name]), least[name])
        self._groups = np.zeros((len(groups), len(GROUP.names)), np.int64)
        self._columns = np.zeros((MAX_COLUMNS, len(OUT.names)), np.int64)
        self._own(
            STEP_ARENA, groups=address_of(self._groups, np.int64), columns=address_of(self._columns, np.int64),
            num_groups=len(groups), max_tokens=tokens, max_reqs=reqs,
            max_cross_slots=encoder_tokens if has_cross else 0, step=-1, named=-1,
            **{n: address_of(fields[n], np.int64 if n == "positions" else np.int32) for n in least},
        )  # fmt: skip
        self.groups = [
            GroupFields(
                group,
                tokens if g < cross else encoder_tokens,
                reqs,
                any(other["paged_kv_indptr"] is group["paged_kv_indptr"] for other in groups[:g]),
                self._groups[g],
            )
            for g, group in enumerate(groups)
        ]
        self._keep = fields
        self.columns: list[tuple[ColumnState, Any]] = []
        self._req_ids: tuple[Any, ...] = ()
        self._moves: tuple[tuple[int, int], ...] = ()
        self.views: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = ()

    @property
    def req_ids(self) -> tuple[Any, ...]:
        return self._req_ids

    @req_ids.setter
    def req_ids(self, req_ids: tuple[Any, ...]) -> None:
        self.named = -1
        self._req_ids = req_ids

    @property
    def moves(self) -> tuple[tuple[int, int], ...]:
        return self._moves

    @moves.setter
    def moves(self, moves: tuple[tuple[int, int], ...]) -> None:
        self.has_moves = True
        self._moves = moves
        self.has_moves = bool(moves)

    def add_column(self, column: ColumnState, out: Any) -> None:
        itemsize = column.values.shape[2]
        if len(self.columns) == MAX_COLUMNS:
            raise ValueError(f"column: a step of this arena has {MAX_COLUMNS} already")
        check_length("column", len(out), (self.max_tokens if column.per_token else self.max_reqs) * itemsize)
        self._columns[len(self.columns)] = column.address, address_of(out, np.uint8)
        self.columns.append((column, out))
        self.words[STEP_ARENA.names.index("num_columns")] = len(self.columns)


@jit
def _forget(out):
    out.counting = 0
    out.version = -1
    lengths_at(out.query_start_loc)[0] = lengths_at(out.seq_start_loc)[0] = 0
    for g in range(out.num_groups):
        lengths_at(group_at(out, g).paged_kv_indptr)[0] = 0
    if out.encoder_seq_lens:
        lengths_at(out.encoder_seq_start_loc)[0] = lengths_at(out.encoder_query_start_loc)[0] = 0


def drop_views(views: tuple[tuple[dict[str, Any], tuple[str, ...]], ...]) -> None:
    for cached, names in views:
        for name in names:
            cached.pop(name, None)
