"""The blocks of each request as a grid, as text and as HTML: owned, filled, new in this step, passed by a window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from attncore.builder.show import age, lengths_are_bounds, peek
from attncore.show import Markup, cut, escaped, html_table, preformatted, short

MOST_ROWS = 12
MOST_BLOCKS = 28
LEGEND = "# filled  / partly filled  + new in this step  . owned, empty  - null block"
_COLOURS = {"#": "#9ecae1", "/": "#deebf7", "+": "#74c476", ".": "#f7f7f7", "-": "#d9d9d9"}
_WORDS = {"#": "filled", "/": "partly filled", "+": "new in this step", ".": "owned, empty", "-": "null block"}


class GridRow(NamedTuple):
    """A request's row: ``cached`` tokens are in its blocks, ``new`` ones are written behind them in this step.

    ``blocks`` are the last columns of its table, from column ``first`` on, of ``block_size`` tokens each.
    """

    row: int
    request: str
    cached: int
    new: int
    block_size: int
    first: int
    blocks: list[int]

    def cells(self) -> str:
        """A letter of LEGEND for each of ``blocks``."""
        return "".join(self._cell(self.first + i, block) for i, block in enumerate(self.blocks))

    def _cell(self, column: int, block: int) -> str:
        start, stop = column * self.block_size, (column + 1) * self.block_size
        if self.new and stop > self.cached and start < self.cached + self.new:
            return "+"
        if block == 0 and stop <= self.cached:
            return "-"
        if stop <= self.cached:
            return "#"
        return "/" if start < self.cached else "."


def batch_rows(batch: Any, group: str) -> Iterator[GridRow]:
    """The first rows of a batch, in one KV-cache group."""
    core = batch._core
    table = core.tables[group]
    for row, req_id in enumerate(core.order.req_ids[:MOST_ROWS]):
        length = core.encoder_len(row) if table.group.cross else core.num_computed(row)
        first, blocks = _last(table, row)
        request = "(empty)" if row in core.order.holes else short(req_id)
        yield GridRow(row, request, length, 0, table.group.tokens_per_column, first, blocks)


def _last(table: Any, row: int) -> tuple[int, list[int]]:
    held = table.num_columns(row)
    first = max(0, held - MOST_BLOCKS)
    return first, table.array[row, first:held].tolist()


def step_rows(metadata: Any) -> Iterator[GridRow]:
    """The first rows of a step; without blocks where these have moved since, or where it has no table."""
    seq_lens, query_lens, context_lens = (peek(metadata, name) for name in ("seq_lens", "query_lens", "context_lens"))
    if seq_lens is None or query_lens is None or context_lens is None:
        return
    block_size, req_ids = _block_size(metadata), metadata.req_ids
    changed = getattr(metadata.host, "table_changed", False)
    table = peek(metadata, "block_table") if block_size and not changed else None
    live = getattr(metadata.host, "_live_table", None) if table is not None else None
    for row in range(min(len(query_lens), MOST_ROWS)):
        length, new = int(seq_lens[row]), int(query_lens[row])
        if live is not None and live.group.cross:
            cached, new = length, 0
        else:  # a rank's, and a windowed decode's, lengths are shorter than context and query together
            cached = int(context_lens[row])
            cached, new = (cached, length - cached) if cached <= length else (max(0, length - new), min(new, length))
        first = 0
        blocks: list[int] = []
        if live is not None:
            first, blocks = _last(live, row)
        elif table is not None and block_size is not None:
            used = min(table.shape[1], -(-length // block_size))
            first = max(0, used - MOST_BLOCKS)
            blocks = table[row, first:used].tolist()
            if row < metadata.num_prefills and not any(blocks):  # the list builder gives a plain prompt no table
                first, blocks = 0, []
        request = short(req_ids[row]) if row < len(req_ids) else ""
        yield GridRow(row, request, cached, new, block_size or 1, first, blocks)


def _block_size(metadata: Any) -> int | None:
    """Tokens of a column of the step's table; None where it is not known, as in a view."""
    live = getattr(metadata.host, "_live_table", None)
    if live is not None:
        ranks = metadata.builder.context_parallel
        return int(live.group.tokens_per_column) // (ranks.world_size if ranks is not None else 1)
    return None if metadata.source is None else int(metadata.source.builder.block_size)


def batch_grid(batch: Any) -> str:
    """``str`` of a batch: its ``repr``, and a row of blocks for each of the first requests."""
    parts = [repr(batch)]
    for name in batch._core.tables:
        title = [f"group {short(name)}:"] if len(batch._core.tables) > 1 else []
        parts += [*title, *_text(list(batch_rows(batch, name)), len(batch._core.order.req_ids), "")]
    return "\n".join(parts if len(parts) == 1 else [*parts, LEGEND])


def step_grid(metadata: Any) -> str:
    """``str`` of metadata: its ``repr``, and a row of blocks for each of the first requests."""
    if age(metadata)[1]:
        return repr(metadata)
    rows = list(step_rows(metadata))
    bounded = "<=" if lengths_are_bounds(metadata) else ""
    lines = _text(rows, len(metadata.req_ids) or metadata.num_reqs, bounded)
    return "\n".join([repr(metadata), *lines, *([LEGEND] if any(row.blocks for row in rows) else [])])


def _text(rows: list[GridRow], total: int, bounded: str) -> list[str]:
    if not rows:
        return []
    texts = [(str(row.row), cut(row.request, 16), f"{bounded}{_tokens(row)}", _cells(row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(text, widths, strict=True)).rstrip() for text in texts]
    return [*lines, *_left_out(rows, total)]


def _tokens(row: GridRow) -> str:
    return f"{row.cached} + {row.new}" if row.new else str(row.cached)


def _cells(row: GridRow) -> str:
    return (f"({row.first} before) " if row.first else "") + row.cells()


def _left_out(rows: list[GridRow], total: int) -> list[str]:
    return [f"... {total - len(rows)} more rows"] if total > len(rows) else []


def batch_html(batch: Any) -> str:
    """``_repr_html_`` of a batch."""
    tables = "".join(
        _html(list(batch_rows(batch, name)), len(batch._core.order.req_ids), name) for name in batch._core.tables
    )
    return preformatted(repr(batch)) + tables


def step_html(metadata: Any) -> str:
    """``_repr_html_`` of metadata."""
    if age(metadata)[1]:
        return preformatted(repr(metadata))
    rows = list(step_rows(metadata))
    return preformatted(repr(metadata)) + _html(rows, len(metadata.req_ids) or metadata.num_reqs, metadata.group)


def _html(rows: list[GridRow], total: int, group: str) -> str:
    if not rows:
        return ""
    cells = [(row.row, row.request, _tokens(row), Markup(_html_cells(row))) for row in rows]
    more = "".join(f"<p>{escaped(line)}</p>" for line in _left_out(rows, total))
    legend = " ".join(_square(word, _COLOURS[letter], word) for letter, word in _WORDS.items())
    return html_table(("row", "request", "tokens", f"blocks of {group}" if group else "blocks"), cells) + more + legend


def _html_cells(row: GridRow) -> str:
    before = f"{row.first} before " if row.first else ""
    squares = (
        _square(str(block), _COLOURS[letter], f"column {row.first + i}: block {block}, {_WORDS[letter]}")
        for i, (block, letter) in enumerate(zip(row.blocks, row.cells(), strict=True))
    )
    return escaped(before) + "".join(squares)


def _square(text: str, colour: str, title: str) -> str:
    style = f"background:{colour};color:#000;border:1px solid #999;padding:0 4px;margin:1px"
    return f"<span style='{style}' title='{escaped(title)}'>{escaped(text)}</span>"
