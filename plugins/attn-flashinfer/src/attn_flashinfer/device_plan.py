"""Plans of captured sizes that the device makes: what a plan writes and where, the proof, and the node that writes it.

Under CUDA graphs a plan's sizes and offsets depend on the captured size alone. What changes from step to step are a few
arrays in the wrapper's integer workspace, which follow from the page counts. ``plan_kernel`` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

PROVEN = "0.7."
"""FlashInfer's versions whose plans were compared."""

AUTO, DEVICE, HOST = "auto", "device", "host"

_ANY_LENGTH = 2**31 - 1
_TENSOR_CORES, _CUDA_CORES = 15, 10  # numbers in the description of a plan: of PrefillPlan, of DecodePlan
_JUNK = 0x7F
_INT = 4


class Sizes(NamedTuple):
    """What the plans of a captured size depend on beside the rows' pages."""

    num_reqs: int
    query_len: int
    num_heads: int
    num_kv_heads: int
    page_size: int
    window_left: int
    """-1: no window."""
    processors: int
    """Multiprocessors of the device."""


class Layout(NamedTuple):
    """Where a plan's arrays begin in the integer workspace (bytes; -1: it has none), and what bounds them."""

    request: int
    qo_tile: int
    kv_tile: int
    o_indptr: int
    merge_indptr: int
    chunk: int
    rows: int
    mask: int
    padded: int
    """Entries of requests, tiles and mask: blocks of the grid for each head."""
    most: int
    """Chunks of keys that there may be, over all rows and tiles of queries."""
    least: int
    """Pages of a chunk, at least."""
    tiles: int
    """Of queries, of each row."""
    longest: int
    """Pages of a row that are read, at most."""
    empty: bool
    """Whether the search for a chunk's pages counts a row without pages as one chunk."""


def layout_of(plan_info: Any, sizes: Sizes) -> Layout:
    """The layout that FlashInfer's description of a plan says; ValueError where it is no plan that is known here."""
    info = [] if plan_info is None else [int(number) for number in plan_info]
    least = max(128 // sizes.page_size, 1)
    if len(info) == _TENSOR_CORES:
        padded, total, rows, tile, request, qo_tile, kv_tile, merge, o, chunk, _, _, mask, graph, split = info
        if not (graph and split and tile > 0 and total == sizes.num_reqs * sizes.query_len):
            raise ValueError(f"a plan that is described as {info} is not known")
        longest = _ANY_LENGTH
        if sizes.window_left >= 0:
            longest = min(-(-(sizes.window_left + tile) // sizes.page_size), _ANY_LENGTH)
        group = sizes.num_heads // sizes.num_kv_heads
        tiles, most = -(-sizes.query_len * group // tile), 2 * sizes.processors // sizes.num_kv_heads
        return Layout(
            request, qo_tile, kv_tile, o, merge, chunk, rows, mask, padded, most, least, tiles, longest, empty=True
        )
    if len(info) == _CUDA_CORES:
        padded, _, _, request, kv_tile, o, mask, chunk, graph, split = info
        if not graph or sizes.query_len != 1:
            raise ValueError(f"a plan that is described as {info} is not known")
        if not split:  # a block for each row: a chunk is as long as the longest
            padded, mask, least = sizes.num_reqs, -1, 1
        most = padded if split else 0
        return Layout(request, -1, kv_tile, o, -1, chunk, -1, mask, padded, most, least, 1, _ANY_LENGTH, empty=False)
    raise ValueError(f"a plan is described by {len(info)} numbers, {_CUDA_CORES} or {_TENSOR_CORES} are known")


def table_row(layout: Layout, sizes: Sizes, address: int) -> list[int]:
    """The plan's row of the table that the kernel reads; ``address`` is that of the integer workspace."""
    places = {
        "request": layout.request, "qo_tile": layout.qo_tile, "kv_tile": layout.kv_tile, "o_indptr": layout.o_indptr,
        "merge_indptr": layout.merge_indptr, "chunk": layout.chunk, "rows": layout.rows,
    }  # fmt: skip
    for name, place in places.items():
        if place >= 0 and place % _INT:
            raise ValueError(f"{name} begins at byte {place}, which is no multiple of {_INT}")
    words = [place // _INT if place >= 0 else -1 for place in places.values()]
    return [
        address, *words, layout.mask, layout.padded, layout.most, layout.least, layout.tiles, layout.longest,
        int(layout.empty), sizes.query_len, sizes.page_size,
    ]  # fmt: skip


def words_that_run_reads(workspace: Tensor, layout: Layout, sizes: Sizes) -> dict[str, Tensor]:
    """What the kernels of a captured size read of the plan in ``workspace`` uint8, as CPU tensors by name."""
    held = workspace.to("cpu", copy=True)
    words = held.view(torch.int32)

    def array(place: int, count: int) -> Tensor:
        return words[place // _INT : place // _INT + count] if place >= 0 else words[:0]

    o_indptr = array(layout.o_indptr, sizes.num_reqs + 1)
    entries = int(o_indptr[-1]) // sizes.query_len * layout.tiles
    entries = min(max(entries, 0), layout.padded)
    return {
        "request_indices": array(layout.request, entries),
        "qo_tile_indices": array(layout.qo_tile, entries),
        "kv_tile_indices": array(layout.kv_tile, entries),
        "o_indptr": o_indptr,
        "merge_indptr": array(layout.merge_indptr, sizes.num_reqs * sizes.query_len + 1),
        "kv_chunk_size": array(layout.chunk, 1),
        "total_num_rows": array(layout.rows, 1),
        "block_valid_mask": held[layout.mask : layout.mask + layout.padded] if layout.mask >= 0 else held[:0],
    }


def page_counts(num_reqs: int, most: int) -> list[Tensor]:
    """Pages of each row, int32[num_reqs]: the patterns that the proof at a capture compares."""
    random = torch.Generator("cpu").manual_seed(num_reqs)
    on_host: Any = {"device": "cpu"}

    def drawn(high: int) -> Tensor:
        return torch.randint(1, max(high, 1) + 1, (num_reqs,), generator=random, **on_host)

    full, draws = torch.full((num_reqs,), most, **on_host), torch.rand(num_reqs, generator=random, **on_host)
    patterns = [
        full,
        torch.ones(num_reqs, dtype=torch.int64, **on_host),
        drawn(most),
        drawn(min(most, 24)),
        torch.where(draws < 0.1, full, 1),
        torch.where(draws < 0.3, 0, drawn(most)),  # rows without pages: padding, behind the others or between them
        torch.where(torch.arange(num_reqs, **on_host) * 2 < num_reqs, drawn(most), 0),
        torch.zeros(num_reqs, dtype=torch.int64, **on_host),
    ]
    return [pattern.to(torch.int32) for pattern in patterns]


class DevicePlan:
    """The node that plans one captured size for all its keys: a launch, recorded behind what fetches the step.

    ``indptr`` int32[num_reqs + 1] is where each step's page pointers lie on the device; ``rows`` is a row of the table
    for each key. It is made before the capture, since it copies the table to the device.
    """

    def __init__(self, indptr: Tensor, rows: Sequence[Sequence[int]]) -> None:
        from attn_flashinfer.plan_kernel import write_plans

        self._write, self._indptr, self._num_reqs = write_plans, indptr, len(indptr) - 1
        with torch.inference_mode(False):
            self._table = torch.tensor([*rows], dtype=torch.int64, device=indptr.device)

    def __call__(self) -> None:
        """Launches the kernel on the current stream."""
        self._write(self._indptr, self._table, self._num_reqs)


def why_not(version: str) -> str:
    """Why plans of this version of FlashInfer are not made on the device; empty where they may be."""
    if version.startswith(PROVEN):
        return ""
    return f"plans of FlashInfer {version or 'of no version'} were not compared, those of {PROVEN}x were"


def prove(plan: Callable[[Tensor], Any], workspace: Tensor, sizes: Sizes, most_pages: int) -> tuple[Layout | None, str]:
    """Compares the kernel with FlashInfer for a few batches; the layout, None where the host is to plan, and why.

    ``plan(indptr)``, of int32 page pointers on the host, lets FlashInfer plan and returns its description of the plan,
    which lies in ``workspace`` uint8 on the device. Waits for the device.
    """
    try:
        return _compared(plan, workspace, sizes, most_pages)
    except Exception as error:  # whatever the compiler, the driver or another FlashInfer raises: the host plans instead
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _compared(
    plan: Callable[[Tensor], Any], workspace: Tensor, sizes: Sizes, most_pages: int
) -> tuple[Layout | None, str]:
    layout = node = None
    patterns = page_counts(sizes.num_reqs, most_pages)
    on_device = torch.zeros(sizes.num_reqs + 1, dtype=torch.int32, device=workspace.device)
    for pages in patterns:
        indptr = torch.zeros(sizes.num_reqs + 1, dtype=torch.int32, device="cpu")
        indptr[1:] = pages.cumsum(0)
        found = layout_of(plan(indptr), sizes)
        if layout is None or node is None:
            layout = found
            node = DevicePlan(on_device, [table_row(layout, sizes, workspace.data_ptr())])
        elif found != layout:
            return None, "the plan's offsets change with the lengths"
        expected = words_that_run_reads(workspace, layout, sizes)
        workspace.fill_(_JUNK)
        on_device.copy_(indptr)
        node()
        written = words_that_run_reads(workspace, layout, sizes)
        for name, array in expected.items():
            if not torch.equal(array, written[name]):
                return None, f"{name} of a plan on the device is not FlashInfer's, for pages {_first(pages)}"
    return layout, f"{len(patterns)} plans of each captured size were FlashInfer's own, word for word"


def _first(pages: Tensor) -> str:
    shown = ", ".join(map(str, pages[:8].tolist()))
    return f"{shown}, ..." if len(pages) > 8 else shown


def processors(device: str) -> int:
    """Multiprocessors of ``device``; 0 where it is no CUDA device."""
    if not device.startswith("cuda"):
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
