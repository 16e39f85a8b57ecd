"""What an engine has not on the device, made there from its tensors: at fixed addresses, and without reading any.

A field that a backend has asked for once is made in every step from then on: a captured graph, and a plan that outlasts
its step, read it where it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attncore.array_arguments import beyond_its_memory
from attncore.builder.adopted.given import check_memory
from attncore.builder.device.memory import device_zeros

if TYPE_CHECKING:
    from attncore.builder.adopted.given import Given
    from attncore.builder.adopted.settings import Settings

SUMS = ("paged_kv_indptr", "paged_kv_last_page_len", "seq_start_loc")
"""Made together, as they lie in memory."""

OF_ROWS = ("query_lens", "context_lens", "logits_indices")
OF_TOKENS = ("token_to_req_indices", "positions")
MADE = frozenset((*SUMS, "paged_kv_indices", *OF_ROWS, *OF_TOKENS))
_SUMMED = frozenset((*SUMS, "paged_kv_indices"))
_SUMS = frozenset(SUMS)
NOTHING: frozenset[str] = frozenset()


def _nothing() -> None:
    pass


class Prepared(NamedTuple):
    """A launch that makes fields of every step of tensors which stay where they are."""

    names: frozenset[str]
    call: Callable[[int], Any]
    """Takes the most pages of a row."""
    block_size: int


class DeviceFields:
    """The fixed memory of the fields that are made on ``device``; all work is on the current stream."""

    def __init__(self, device: torch.device, settings: Settings, *, page_list: bool) -> None:
        self.device, self._settings = device, settings
        self.live = _SUMMED if page_list else NOTHING
        """Fields that each step makes."""
        self.changed: Callable[[], None] = _nothing
        """Called before there are more of them."""
        self.written = NOTHING
        """Fields that the step under way, or the last one, has written; ``NOTHING`` is set before a step."""
        self._sum_lengths: Any = None
        self._words = self._zeros(3 * settings.gap)
        self._pages: Any = None
        self._page_buffer: Any = None
        self._others: dict[str, torch.Tensor] = {}
        if page_list:
            _ = self.page_buffer  # its memory is taken now
        if device.type == "cuda":
            self._compile()

    def _compile(self) -> None:
        """Compiles the kernel now: within a step that takes a while, and within a capture it is refused."""
        try:
            from attncore.builder.device.triton_kernels import SumLengths
        except ImportError:  # torch does it, in a few launches more
            return
        self._sum_lengths = SumLengths(self._words, self._settings.gap, self._settings.block_size)

    def _zeros(self, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        zeros: torch.Tensor = device_zeros(count, dtype, self.device)
        return zeros

    @property
    def page_buffer(self) -> Any:
        """int32[max_num_reqs * pages of the longest request]: where page indices are written."""
        if self._page_buffer is None:
            self._pages = self._zeros(self._settings.max_num_reqs * self._settings.max_pages + 1)
            # The last one is where torch puts what belongs to no row. Stored last: an interrupted call begins anew.
            self._page_buffer = self._pages[:-1]
        return self._page_buffer

    @property
    def nbytes(self) -> int:
        """Device memory, bytes."""
        taken = [self._words, *self._others.values()] + ([] if self._pages is None else [self._pages])
        return sum(tensor.numel() * tensor.element_size() for tensor in taken)

    def memory(self) -> tuple[Any, ...]:
        """All of it, for who keeps it alive."""
        return self._words, self._pages, *self._others.values()

    def sums(self, num_reqs: int) -> dict[str, torch.Tensor]:
        """The views of ``SUMS`` in a step of so many rows."""
        gap, words = self._settings.gap, self._words
        return {
            "paged_kv_indptr": words[: num_reqs + 1],
            "paged_kv_last_page_len": words[gap : gap + num_reqs],
            "seq_start_loc": words[2 * gap : 2 * gap + num_reqs + 1],
        }

    def make(
        self, given: Given, longest: int, names: frozenset[str] | None = None, but: frozenset[str] = NOTHING
    ) -> None:
        """Makes fields of a step: ``names``, or what is asked for and its plan has not made already, without ``but``.

        ``longest`` bounds its rows' keys.
        """
        if names is None:
            names = self.live - self.written - but if self.written or but else self.live
        self.written = self.written | names if self.written else names  # first: an interrupted call may write them
        if not names.isdisjoint(_SUMMED):
            self._make_sums(given, longest, gathers="paged_kv_indices" in names)
        for name in self._others:
            if name in names:
                self._make_other(name, given)

    def make_rest(
        self, given: Given, seq_lens: torch.Tensor, longest: int, *, least: int, by_graph: frozenset[str]
    ) -> None:
        """Makes what neither the plan of a step has made nor its graph makes.

        ``seq_lens`` are the engine's, and ``least`` is what its padded rows are lent: 0 where they are lent nothing.
        """
        rest = self.live - by_graph  # of lengths, too: where the graph lends keys later, they are lent now as well
        if least and "seq_lens" not in self.written and (rest or "seq_lens" not in by_graph):
            self.lend(given, seq_lens, least)
        if rest:
            self.make(given, longest, but=by_graph)

    def ask(self, name: str, given: Given, longest: int, *, under_way: bool) -> None:
        """From now on each step makes a field; the step of ``given`` does at once.

        ``under_way``: it is not built yet, so that what lies there is the last step's. ValueError where the engine has
        taken memory of its tensors away since.
        """
        if name in (self.written if under_way else self.live):
            return
        check_memory(given)
        names = frozenset((name,))
        if name in _SUMMED:
            names |= (self.live & _SUMMED) | _SUMS
        else:
            self._buffer(name)
        self.make(given, longest, names)
        self.changed()
        self.live |= names  # last: what is not made must not count as made

    def lend(self, given: Given, seq_lens: torch.Tensor, least: int) -> None:
        """Writes the lengths of ``given``, those of the engine but ``least`` at least."""
        self.written |= {"seq_lens"}
        torch.clamp(seq_lens, min=least, out=given.seq_lens)

    def restore(self, given: Given, kept: Given, longest: int, *, least: int) -> None:
        """Makes what a step wrote that was not built in the end again of the last one, whose arguments these are.

        ``kept``: as the engine gave them. Nothing is, where the engine has taken memory of theirs away since
        (``untyped_storage().resize_``): torch would read beyond it.
        """
        if any(map(beyond_its_memory, (*given, kept.seq_lens))):
            return
        self.remake(given, kept, longest, self.written & (self.live | {"seq_lens"}), least=least)

    def remake(self, given: Given, kept: Given, longest: int, names: frozenset[str], *, least: int) -> None:
        """Makes ``names`` of a step; ``seq_lens`` among them are those of ``kept``, the engine's, lent keys."""
        if "seq_lens" in names and given.seq_lens is not kept.seq_lens:
            self.lend(given, kept.seq_lens, least)
        self.make(given, longest, names - {"seq_lens"})

    def other(self, name: str, given: Given) -> torch.Tensor:
        """The view of a field of OF_ROWS or OF_TOKENS in a step, or of ``seq_lens`` where padded rows are lent keys."""
        return self._buffer(name)[: given.slot_mapping.shape[0] if name in OF_TOKENS else given.seq_lens.shape[0]]

    def _buffer(self, name: str) -> torch.Tensor:
        buffer = self._others.get(name)
        if buffer is None:
            count = self._settings.max_num_tokens if name in OF_TOKENS else self._settings.max_num_reqs
            buffer = self._zeros(count, torch.int64 if name == "positions" else torch.int32)
            self._others[name] = buffer
        return buffer

    def _make_sums(self, given: Given, longest: int, *, gathers: bool) -> None:
        longest = -(-longest // self._settings.block_size)
        tensors = self._of_sums(given, gathers=gathers)  # memory of pages is taken here, at the latest
        if self._sum_lengths is not None:
            self._sum_lengths(*tensors, longest)
        else:
            self._make_sums_in_torch(given, tensors[-1], min(longest, tensors[-1]) if gathers else 0)

    def prepared(self, given: Given, names: frozenset[str]) -> Prepared | None:
        """What makes ``names`` of later steps whose tensors are ``given``; None where no single launch does."""
        if self._sum_lengths is None or not names or not names <= _SUMMED:
            return None
        call = self._sum_lengths.prepared(*self._of_sums(given, gathers="paged_kv_indices" in names))
        return Prepared(names, call, self._settings.block_size)

    def make_prepared(self, prepared: Prepared, longest: int) -> None:
        """Makes the fields of a step whose rows have up to ``longest`` keys; nothing of it is made yet."""
        self.written = prepared.names  # first: an interrupted call may write them
        prepared.call(-(-longest // prepared.block_size))

    def _of_sums(self, given: Given, *, gathers: bool) -> tuple[Any, ...]:
        """What the kernel takes of a step, but for its longest row."""
        columns = min(given.block_table.shape[1], self._settings.max_pages)
        return given.seq_lens, given.block_table, self.page_buffer if gathers else None, columns

    def _make_sums_in_torch(self, given: Given, columns: int, longest: int) -> None:
        """What the kernel does, and page indices of rows of up to ``longest`` pages; nothing is read back."""
        size, num_reqs = self._settings.block_size, len(given.seq_lens)
        sums = self.sums(num_reqs)
        lengths = given.seq_lens.clamp(0, columns * size)
        counts = (lengths + (size - 1)).div(size, rounding_mode="floor").to(torch.int32)
        for name, of_rows in (("paged_kv_indptr", counts), ("seq_start_loc", lengths)):
            sums[name][:1].zero_()
            torch.cumsum(of_rows, 0, dtype=torch.int32, out=sums[name][1:])
        last = torch.where(counts > 0, lengths - (counts - 1) * size, 0)
        sums["paged_kv_last_page_len"].copy_(last)
        if not num_reqs or not longest:
            return
        column = torch.arange(longest, device=self.device)
        held = column < counts[:, None]
        places = torch.where(held, sums["paged_kv_indptr"][:-1, None] + column, len(self._pages) - 1)
        self._pages.index_copy_(0, places.flatten(), given.block_table[:, :longest].flatten())

    def _make_other(self, name: str, given: Given) -> None:
        starts, lengths, _, slots = given
        out, queries = self.other(name, given), starts.diff()
        if name == "query_lens":
            out.copy_(queries)
        elif name == "context_lens":
            out.copy_(torch.where(queries > 0, lengths - queries, 0))
        elif name == "logits_indices":
            out.copy_(torch.where(queries > 0, starts[1:] - 1, 0))
        elif len(slots):
            token = torch.arange(len(slots), dtype=torch.int32, device=self.device)
            row = torch.searchsorted(starts[1:], token, right=True).clamp_(max=len(lengths) - 1)
            if name == "positions":
                position = lengths[row] - starts[row + 1] + token
                out.copy_(torch.where(token < starts[-1], position, 0))
            else:
                out.copy_(row)
