"""StepArena: the arrays and counts of one step."""

from __future__ import annotations

from typing import Any

from attncore.kernels.numba.columns import ColumnState


def check_length(name: str, length: int, least: int) -> None:
    if length < least:
        raise ValueError(f"{name}: {length} elements, and a step of this arena writes {least}")


MAX_COLUMNS = 16
BY_TOKEN = ("positions", "token_to_req_indices")
BY_REQUEST = ("seq_lens", "context_lens", "query_lens", "logits_indices")
SUMS = ("query_start_loc", "seq_start_loc", "prefill_query_start_loc", "prefill_seq_start_loc")
OF_ENCODERS = ("encoder_seq_lens", "encoder_query_lens")
SUMS_OF_ENCODERS = ("encoder_seq_start_loc", "encoder_query_start_loc")


class GroupFields:
    """The arrays of a step that each KV-cache group has of its own."""

    def __init__(self, arrays: dict[str, Any], slots: int, reqs: int, shares_pages: bool) -> None:
        least = {"slot_mapping": slots, "paged_kv_indptr": reqs + 1, "paged_kv_last_page_len": reqs}
        for name in least:
            check_length(name, len(arrays[name]), least[name])
        self.slot_mapping = arrays["slot_mapping"]
        self.paged_kv_indptr = arrays["paged_kv_indptr"]
        self.paged_kv_last_page_len = arrays["paged_kv_last_page_len"]
        self.num_pages = 0
        self.shares_pages = shares_pages


class StepArena:
    encoder_seq_lens: Any = None
    encoder_query_lens: Any
    encoder_seq_start_loc: Any
    encoder_query_start_loc: Any

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
        self.positions = fields["positions"]
        self.token_to_req_indices = fields["token_to_req_indices"]
        self.query_start_loc = fields["query_start_loc"]
        self.seq_start_loc = fields["seq_start_loc"]
        self.seq_lens = fields["seq_lens"]
        self.context_lens = fields["context_lens"]
        self.query_lens = fields["query_lens"]
        self.logits_indices = fields["logits_indices"]
        self.prefill_query_start_loc = fields["prefill_query_start_loc"]
        self.prefill_seq_start_loc = fields["prefill_seq_start_loc"]
        if has_cross:
            self.encoder_seq_lens = fields["encoder_seq_lens"]
            self.encoder_query_lens = fields["encoder_query_lens"]
            self.encoder_seq_start_loc = fields["encoder_seq_start_loc"]
            self.encoder_query_start_loc = fields["encoder_query_start_loc"]
        self.groups = [
            GroupFields(
                group,
                tokens if g < cross else encoder_tokens,
                reqs,
                any(other["paged_kv_indptr"] is group["paged_kv_indptr"] for other in groups[:g]),
            )
            for g, group in enumerate(groups)
        ]
        self.columns: list[tuple[ColumnState, Any]] = []
        self.counting = self.version = self.encoder_reqs = 0
        self.step = -1
        self.num_reqs = self.num_tokens = self.num_actual_reqs = self.num_actual_tokens = 0
        self.num_decodes = self.num_decode_tokens = self.num_prefills = self.num_prefill_tokens = 0
        self.max_query_len = self.max_seq_len = self.max_prefill_seq_len = self.max_decode_seq_len = 0
        self.max_decode_query_len = self.max_prefill_query_len = 0
        self.num_encoder_tokens = self.max_encoder_seq_len = self.num_cross_slots = 0
        self.num_seq_tokens = self.changes = 0
        self.req_ids: tuple[Any, ...] = ()
        self.moves: tuple[tuple[int, int], ...] = ()
        self.views: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = ()

    def add_column(self, column: ColumnState, out: Any) -> None:
        itemsize = column.values.shape[2]
        if len(self.columns) == MAX_COLUMNS:
            raise ValueError(f"column: a step of this arena has {MAX_COLUMNS} already")
        check_length("column", len(out), (self.max_tokens if column.per_token else self.max_reqs) * itemsize)
        self.columns.append((column, out.reshape(-1, itemsize)))

    def _forget(self) -> None:
        self.counting = 0
        self.version = -1
        self.query_start_loc[0] = self.seq_start_loc[0] = 0
        for group in self.groups:
            group.paged_kv_indptr[0] = 0
        if self.encoder_seq_lens is not None:
            self.encoder_seq_start_loc[0] = self.encoder_query_start_loc[0] = 0


def drop_views(views: tuple[tuple[dict[str, Any], tuple[str, ...]], ...]) -> None:
    for cached, names in views:
        for name in names:
            cached.pop(name, None)
