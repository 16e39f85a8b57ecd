"""Attention over a paged cache, causal: how ``reference`` gathers keys and values for the arithmetic of ``scoring``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attncore.reference import cache as paged
from attncore.reference.scoring import Scoring, attend

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attncore.abstract import AttentionMetadata

#: Elements of one temporary (gathered keys, scores, mask) on a CPU: 2 MiB in float32, what its caches hold; and on
#: other devices, where every chunk costs a launch of each operation.
CPU_ELEMENTS = 1 << 19
DEVICE_ELEMENTS = 1 << 24
#: Requests with at most so many tokens in a step (decodes, drafts) are computed together; longer ones one by one.
MAX_BATCHED_QUERY = 16


class Answer(NamedTuple):
    """Where results go: ``output`` (num_tokens, heads, value size), and ``lse`` float32 (num_tokens, heads) or None."""

    output: Tensor
    lse: Tensor | None

    def put(self, tokens: slice | Tensor, result: Tensor, lse: Tensor | None) -> None:
        """What ``attend`` gave for ``tokens``."""
        self.output[tokens] = result.to(self.output.dtype)
        if self.lse is not None and lse is not None:
            self.lse[tokens] = lse

    def put_nothing(self, tokens: slice, lse: Tensor | float = -torch.inf) -> None:
        """Zeros, for tokens that see no key."""
        self.output[tokens] = 0
        if self.lse is not None:
            self.lse[tokens] = lse


class Paged(NamedTuple):
    """What a step's attention reads: its tensors ``(num_tokens, heads, size)``, the caches, the block table."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor  # int32 (rows, width), on the device
    k_scale: paged.Scale = 1.0
    v_scale: paged.Scale = 1.0

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of ``slots``, float32."""
        return (
            paged.restored(paged.read(self.key_cache, slots), self.k_scale),
            paged.restored(paged.read(self.value_cache, slots), self.v_scale),
        )

    def cached(self, row: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens ``start:end`` of table row ``row``, float32."""
        position = torch.arange(start, end, dtype=torch.int64, device=self.query.device)
        return self.gather(_slots(self.block_table[row], position, self.key_cache.shape[1]))

    def fresh(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """This step's keys and values of tokens ``start:end``, float32, rounded as the cache rounds them."""
        return self.rounded(self.key[start:end], self.value[start:end])

    def rounded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of any tokens, float32, as they are when they are read again in the cache."""
        return (
            paged.restored(paged.held(key, self.key_cache.dtype, self.k_scale), self.k_scale),
            paged.restored(paged.held(value, self.value_cache.dtype, self.v_scale), self.v_scale),
        )

    @property
    def temporary_elements(self) -> int:
        """How many elements a temporary may have on this device."""
        return CPU_ELEMENTS if self.query.device.type == "cpu" else DEVICE_ELEMENTS


class CausalRows(NamedTuple):
    """The requests of a step that have tokens in it, int64 each: table row, first and last token, context."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """Keys of each request: its context and its query's."""
    cached: NDArray[np.bool_]
    """Whether some of them lie in the cache."""
    shared: NDArray[np.bool_]
    """Whether other ranks hold the rest (context parallelism): all of this rank's lie in the cache."""
    slots: NDArray[np.int64]
    """Of the step's tokens."""
    masks: NDArray[np.int64] | None
    """``tree_mask`` of the step's tokens; None of a step without draft trees."""
    span_ends: NDArray[np.int32] | None
    """``span_ends`` of the step's tokens; None of a step without spans."""

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> CausalRows:
        """From the metadata's host arrays; ValueError where a request is shorter than its query."""
        host = metadata.host
        bounds = np.asarray(host.query_start_loc, dtype=np.int64)
        slots, context_lens = np.asarray(host.slot_mapping, dtype=np.int64), getattr(host, "context_lens", None)
        rows = np.flatnonzero(np.diff(bounds))  # a padded row may have no token
        starts, ends = bounds[rows], bounds[rows + 1]
        lengths = np.asarray(host.seq_lens, dtype=np.int64)[rows]
        shared = np.zeros(len(rows), dtype=np.bool_)
        if context_lens is not None:  # a rank counts those of the step's tokens only that it keeps
            sums = np.concatenate(([0], np.cumsum(slots >= 0)))
            kept = sums[ends] - sums[starts]
            shared = (kept < ends - starts) & (lengths - np.asarray(context_lens)[rows] == kept)
        contexts = lengths - (ends - starts)
        if (wrong := np.flatnonzero((contexts < 0) & ~shared)).size:
            row = rows[wrong[0]]
            raise ValueError(f"metadata: row {row} has seq_lens {host.seq_lens[row]}, fewer than its query tokens")
        # Of the list builder a request without a slot for its last token owns no cache. Elsewhere the table says so.
        owns = (slots[ends - 1] >= 0) | has_tables(metadata)
        cached = np.where(shared, lengths > 0, (contexts > 0) & owns)
        masks, span_ends = getattr(host, "tree_mask", None), getattr(host, "span_ends", None)
        return cls(
            rows, starts, ends, lengths, cached, shared, slots, masks if masks is not None and masks.any() else None,
            span_ends if span_ends is not None and span_ends.any() else None,
        )  # fmt: skip

    @property
    def unslotted(self) -> NDArray[np.int64]:
        """The tokens without a slot that their requests attend to: of a profiling run, masked by a window, or written
        by whoever gave them none.
        """
        counts = np.where(self.shared, 0, self.ends - self.starts)
        mine = np.repeat(self.starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        missing: NDArray[np.int64] = mine[self.slots[mine] < 0]
        return missing

    def slots_of(self, tokens: NDArray[np.int64], block_table: Tensor, block_size: int) -> Tensor:
        """The slots of ``tokens`` by ``block_table``."""
        of = np.searchsorted(self.ends, tokens, side="right")
        places = np.stack((self.rows[of], self.lengths[of] - self.ends[of] + tokens))
        rows, positions = torch.from_numpy(places).to(block_table.device, non_blocking=True)
        return _slots(block_table[rows], positions.unsqueeze(1), block_size).squeeze(1)

    def reads(self, sliding_window: int | None) -> tuple[NDArray[np.int64], ...]:
        """Of the requests with keys in the cache: table row, and the first token that is read there and the last."""
        counts = self.ends - self.starts
        contexts = np.where(self.shared, 0, self.lengths - counts)
        first = np.maximum(0, contexts - sliding_window + 1) if sliding_window else np.zeros_like(contexts)
        end = np.where(self.shared | (counts <= MAX_BATCHED_QUERY), self.lengths, contexts)
        some = self.cached & (first < end)
        return self.rows[some], first[some], end[some]

    def attend(self, step: Paged, scoring: Scoring, answer: Answer) -> None:
        """Attention of every request over its context and itself: short queries together, others one by one."""
        rows, starts, ends, lengths, cached, shared, _, masks, span_ends = self
        counts = ends - starts
        trees = np.zeros(len(rows), dtype=np.bool_) if masks is None else masks[starts] != 0
        batched = cached & ~shared & ~trees & (counts <= MAX_BATCHED_QUERY)
        if span_ends is not None and len(rows):
            batched &= np.maximum.reduceat(span_ends[: ends[-1]], starts) == 0
        for num_queries in np.unique(counts[batched]):
            some = batched & (counts == num_queries)
            _many_requests(
                step,
                scoring,
                answer,
                rows=rows[some],
                starts=starts[some],
                contexts=(lengths - counts)[some],
                num_queries=int(num_queries),
            )
        for i in np.flatnonzero(~batched).tolist():
            tokens = slice(int(starts[i]), int(ends[i]))
            if shared[i]:
                _shared_request(step, scoring, answer, int(rows[i]), tokens, int(lengths[i]), self.slots[tokens] >= 0)
            else:
                context = int(lengths[i] - counts[i]) if cached[i] else 0
                if masks is not None and trees[i]:
                    _tree(step, scoring, answer, int(rows[i]), tokens, context, masks[tokens])
                else:
                    spans = None if span_ends is None else span_bounds(span_ends[tokens])
                    _one_request(step, scoring, answer, int(rows[i]), tokens, context, spans)


def has_tables(metadata: AttentionMetadata) -> bool:
    """Whether each row with tokens has a block table: docs/contract.md says which steps have none, or empty rows."""
    return not getattr(metadata, "from_groups", True) and metadata.block_table.shape[1] > 0


def over_keys(
    step: Paged,
    scoring: Scoring,
    answer: Answer,
    tokens: slice,
    keys: tuple[Tensor, Tensor],
    *,
    position: int = 0,
    first: int = 0,
    spans: NDArray[np.int64] | None = None,
) -> None:
    """Attention of ``tokens``, which stand at ``position`` and after it, over keys and values that stand at ``first``
    and after it. Queries go in chunks of bounded temporaries. ``spans`` int64 (2, tokens): where the span of each token
    begins and ends, counted from ``position``; both 0 of a token in none.
    """
    key, value = keys
    num_heads = step.query.shape[1]
    copies = num_heads // key.shape[1] if scoring.plain else num_heads  # of the mask, or of the scores
    chunk = max(1, step.temporary_elements // (copies * len(key)))
    for start in range(tokens.start, tokens.stop, chunk):
        some = slice(start, min(start + chunk, tokens.stop))
        places = range(position + some.start - tokens.start, position + some.stop - tokens.start)
        low, high = scoring.visible(places[0], places[-1], first + len(key))
        beside = None
        if spans is not None:
            bounds = spans[:, some.start - tokens.start : some.stop - tokens.start]
            if bounds[1].any():
                low = min(low, position + int(bounds[0][bounds[1] > 0].min()))
                high = max(high, position + int(bounds[1].max()))
                beside = torch.from_numpy(bounds + position).to(key.device).unsqueeze(2)
        low = max(first, low)
        seen = slice(low - first, high - first)
        key_position = torch.arange(low, high, dtype=torch.int64, device=key.device)
        if beside is not None:
            beside = ((beside[0] <= key_position) & (key_position < beside[1])).unsqueeze(0)
        result, lse = attend(
            step.query[some].float().unsqueeze(0),
            key[seen].unsqueeze(0),
            value[seen].unsqueeze(0),
            torch.arange(places.start, places.stop, dtype=torch.int64, device=key.device).unsqueeze(0),
            key_position.unsqueeze(0),
            scoring,
            beside=beside,
        )
        answer.put(some, result[0], None if lse is None else lse[0])


def span_bounds(span_ends: NDArray[np.int32]) -> NDArray[np.int64] | None:
    """int64 (2, tokens): where the span of each of a request's tokens in a step begins and ends, counted from the first
    of them; both 0 of a token in none. None where no token is in one.

    Tokens of one span are those that have the same end, so that nothing depends on where positions count from.
    """
    if not span_ends.any():
        return None
    edges = np.flatnonzero(np.diff(span_ends)) + 1
    starts, stops = np.concatenate(([0], edges)), np.concatenate((edges, [len(span_ends)]))
    bounds: NDArray[np.int64] = np.repeat(np.stack((starts, stops)), stops - starts, axis=1)
    return np.where(span_ends != 0, bounds, 0)


def _one_request(
    step: Paged, scoring: Scoring, answer: Answer, row: int, tokens: slice, context: int,
    spans: NDArray[np.int64] | None,
) -> None:  # fmt: skip
    """Attention of ``tokens``, which follow ``context`` cached tokens of table row ``row``; ``spans`` as of
    ``over_keys``.

    Context is read from the cache, no further back than a window reaches; the step's own keys are taken as they came,
    so that a prompt whose early slots are masked, or that has no table at all, is right too.
    """
    first = scoring.visible(context, context, context + 1)[0]
    key, value = step.fresh(tokens.start, tokens.stop)
    if first < context:
        cached_key, cached_value = step.cached(row, first, context)
        key, value = torch.cat((cached_key, key)), torch.cat((cached_value, value))
    over_keys(step, scoring, answer, tokens, (key, value), position=context, first=first, spans=spans)


def _tree(
    step: Paged, scoring: Scoring, answer: Answer, row: int, tokens: slice, context: int, masks: NDArray[np.int64]
) -> None:
    """Attention of ``tokens``, a draft tree of ``masks`` that follows ``context`` cached tokens of table row ``row``.

    A token sees the context and those of the tree in its mask. Positions are by depth, of which windows and slopes make
    distances: a key of the tree is as far away as there are tokens on the path to it.
    """
    first, device = scoring.visible(context, context, context + 1)[0], step.query.device
    key, value = step.fresh(tokens.start, tokens.stop)
    if first < context:
        cached_key, cached_value = step.cached(row, first, context)
        key, value = torch.cat((cached_key, key)), torch.cat((cached_value, value))
    bits = np.unpackbits(masks.astype("<i8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    position = torch.from_numpy(context - 1 + bits.sum(axis=1, dtype=np.int64)).to(device)
    seen = torch.from_numpy(bits[:, : len(masks)].astype(np.bool_)).to(device)
    result, lse = attend(
        step.query[tokens].float().unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        position.unsqueeze(0),
        torch.cat((torch.arange(first, context, dtype=torch.int64, device=device), position)).unsqueeze(0),
        scoring,
        torch.cat((seen.new_ones((len(masks), context - first)), seen), dim=1).unsqueeze(0),
    )
    answer.put(tokens, result[0], None if lse is None else lse[0])


def _shared_request(
    step: Paged, scoring: Scoring, answer: Answer, row: int, tokens: slice, length: int, kept: NDArray[np.bool_]
) -> None:
    """Attention of ``tokens`` over this rank's ``length`` keys of their request, all in the cache.

    ``kept`` says which of the tokens' own keys are among them: the last so many. A token sees all but those after it.
    """
    visible = length - np.cumsum(kept[::-1])[::-1] + kept
    keys = step.cached(row, 0, length) if length else step.fresh(0, 0)
    for token, count in zip(range(tokens.start, tokens.stop), visible.tolist(), strict=True):
        one = slice(token, token + 1)
        if count:
            over_keys(step, scoring, answer, one, (keys[0][:count], keys[1][:count]), position=count - 1)
        else:
            answer.put_nothing(one, -torch.inf if scoring.sinks is None else scoring.sinks.flatten())


def _many_requests(
    step: Paged,
    scoring: Scoring,
    answer: Answer,
    *,
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    contexts: NDArray[np.int64],
    num_queries: int,
) -> None:
    """Attention of requests that each have ``num_queries`` tokens this step, few and cached.

    Request i is block-table row ``rows[i]``; its tokens begin at ``starts[i]`` and follow ``contexts[i]`` cached
    ones. Requests of like length share a chunk; a position past a request's context repeats its last token, so that
    every slot read is a written one of its own.
    """
    first = np.zeros_like(contexts)
    if scoring.sliding_window is not None:
        first = np.maximum(first, contexts - scoring.sliding_window + 1)
    lengths = contexts + num_queries - first
    order = np.argsort(lengths, kind="stable")
    token_elements = step.key.shape[1] * max(step.key.shape[2], step.value.shape[2])
    if not scoring.plain:
        token_elements = max(token_elements, step.query.shape[1] * num_queries)
    done = 0
    while done < len(order):
        # Lengths rise, so a chunk's last request sets its width: its size is count times that.
        sizes = lengths[order[done:]] * np.arange(1, len(order) - done + 1) * token_elements
        count = max(1, int(np.searchsorted(sizes, step.temporary_elements, side="right")))
        chosen = order[done : done + count]
        done += count
        packed = torch.from_numpy(np.stack((rows[chosen], starts[chosen], contexts[chosen], first[chosen])))
        # A live table is as wide as the longest request that may ever come: take the columns in use.
        columns = -(-int(contexts[chosen].max() + num_queries) // step.key_cache.shape[1])
        used = step._replace(block_table=step.block_table[:, :columns])
        _batch(used, scoring, answer, packed, int(lengths[chosen[-1]]), num_queries)


def _batch(step: Paged, scoring: Scoring, answer: Answer, packed: Tensor, width: int, num_queries: int) -> None:
    device = step.query.device
    rows, starts, contexts, first = packed.to(device, non_blocking=True).unsqueeze(2).unbind()
    ahead = torch.arange(num_queries, dtype=torch.int64, device=device)
    key_position = first + torch.arange(width, dtype=torch.int64, device=device)
    table = step.block_table[rows.squeeze(1)]
    readable = torch.where(key_position < contexts, key_position, contexts + num_queries - 1)
    key, value = step.gather(_slots(table, readable, step.key_cache.shape[1]))
    tokens = starts + ahead
    query_position = contexts + ahead
    if num_queries > 1:  # the step's own keys are taken as they came: a window may have masked the slots of some
        line = torch.arange(len(rows), dtype=torch.int64, device=device).unsqueeze(1)
        own_key, own_value = step.rounded(step.key[tokens], step.value[tokens])
        key[line, query_position - first], value[line, query_position - first] = own_key, own_value
    answer.put(tokens, *attend(step.query[tokens].float(), key, value, query_position, key_position, scoring))


def _slots(block_table: Tensor, position: Tensor, block_size: int) -> Tensor:
    """Slots of ``position`` (int64) in the rows of ``block_table``; both have the same leading dimensions."""
    block = block_table.gather(-1, torch.div(position, block_size, rounding_mode="floor"))
    return block.long() * block_size + torch.remainder(position, block_size)
