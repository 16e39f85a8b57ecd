"""FlashAttention 3 (``flash_attn_3``, Hopper): one layer's calls, by the operator that its own functions call.

Its own package and vLLM's wheel (``generation3_vllm``) register it, with a few arguments of each one's own. Every call
gives where rows start, also those of rows of one length: vLLM's build has no other form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_flash.generation2 import Call, given_caches
from attn_flash.segments import Segment

FP8 = torch.float8_e4m3fn
MOST_ROWS = 1 << 14
"""Of a step whose starts are counted ahead."""
BEFORE_ALL = -(1 << 30)
OUTPUT, OUTPUT_AND_LSE = 0, slice(2)
"""Of what the operator returns."""
LARGEST = 448.0
"""Beyond it a query is cut off: a conversion of torch's would make it NaN."""
_KINDS: dict[Any, int] = {}
"""The kinds of layers of this process by what their schedules follow from, a number below 0 each, of _NUMBERS."""
_NUMBERS = count(-1, -1)


class Library(NamedTuple):
    """The operators, and where the packages' arguments differ."""

    forward: Callable[..., Any]
    schedule: Callable[..., Tensor] | None
    """What writes a schedule ahead; None where calls are to write their own."""
    before_cap: tuple[Any, ...]
    """Between the window and the soft cap."""
    last: Callable[[Tensor | None, Tensor | None], tuple[Any, ...]]
    """Behind the others of ``forward``: for a layer's sinks, and for where rows are said to end, which masks every tile
    (``_before_all``). Empty of a library that takes neither.
    """


@cache
def _counted(device: str) -> Tensor:
    """Where rows of one token start."""
    return torch.arange(MOST_ROWS + 1, dtype=torch.int32, device=device)


@cache
def _before_all(device: str) -> Tensor:
    """Ends of rows, each before every key."""
    return torch.full((MOST_ROWS,), BEFORE_ALL, dtype=torch.int32, device=device)


def load() -> Library:
    """The operator of the package flash_attn_3. That its schedules may be shared by layers was not tried."""
    import_module("flash_attn_3._C")
    return Library(torch.ops.flash_attn_3.fwd, None, (0,), lambda sinks, ends: ())  # 0: no chunks of attention


class StepArguments:
    """What the calls of a segment are given between the cache and the scales, good for all layers of a step; and the
    schedules that those of decodes share: how rows are split among the cores, which a small kernel writes. A call that
    is given none runs that kernel itself, as a step's first layer of a kind does: it may be the only one. (With long
    queries nothing is split, and nothing gained.)

    A layer that comes again begins another run of the step: it schedules anew, so that a graph which is captured after
    a run to warm up holds that kernel. A later step of the same plan does so, too (``renew``).
    """

    __slots__ = ("_shared", "ends", "given")

    def __init__(self, given: tuple[Any, ...], ends: Tensor | None = None) -> None:
        self.given = given
        self.ends = ends
        """Of ``_before_all``, one a row; None where rows have one query at most: no key stands behind it."""
        self._shared: dict[int, Tensor | None] = {}
        """The layers of this run, by their ids, and the schedules, by kinds of layers: numbers below 0."""

    def renew(self) -> None:
        """Forget the schedules: lengths may be others."""
        self._shared.clear()

    def scheduler(self, layer: int, kind: int, make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor | None]:
        """What gives the schedule of layers of a kind, for one of them and a query: what ``make`` gives."""
        shared = self._shared

        def scheduled(query: Tensor) -> Tensor | None:  # one frame for each layer and step
            if layer in shared:
                shared.clear()
            shared[layer] = None
            if kind not in shared:
                shared[kind] = None
                return None
            found = shared[kind]
            if found is None:
                found = shared[kind] = make(query)
            return found

        return scheduled


class Layer:
    """The calls of one layer. Its members are those of ``generation2.Layer``.

    ``descales``: of the queries, keys and values of an fp8 cache, float32 (3, num_kv_heads) on the device, which every
    call reads. Queries over such a cache are rounded to fp8, too: the kernel takes no others.
    """

    together = True
    """One call for decodes and prefills: the query heads of a group share their keys in every call."""
    captured_by_starts = False
    """Every call is told where rows begin."""
    splits_by_width = False
    """How a row's keys are split among the cores follows from its length, on the device."""

    def __init__(
        self,
        library: Library,
        *,
        scale: float,
        sliding_window: int | None,
        logits_soft_cap: float | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        causal: bool,
        synchronises: bool = False,
        device: str = "cpu",
        descales: Tensor | None = None,
    ) -> None:
        self._library, self._given_sinks = library, sinks
        self._sinks = None if sinks is None else sinks.bfloat16()  # what the kernel takes
        self.rows_without_keys = ("packed", "paged", "decode") if sinks is None else ()  # their logarithm is the sink's
        left, cap = -1 if sliding_window is None else sliding_window - 1, logits_soft_cap or 0.0
        self._window = causal, left, 0 if causal and left >= 0 else left, *library.before_cap
        self._fixed, self._capped = (scale, *self._window, cap, True), cap > 0
        self._last = (0, None, 0, *library.last(self._sinks, None))
        # Made here, not first inside a capture, which would only record it.
        self._one_token_each, self._before_all = _counted(device), _before_all(device)
        self._descales = descales

    def sinks_changed(self) -> None:
        """Take over what was written to the layer's sinks, in place."""
        if self._sinks is not None and self._given_sinks is not None:
            self._sinks.copy_(self._given_sinks)

    def arguments(self, segment: Segment, with_lse: bool = False) -> StepArguments:
        """What the call of a segment is given, as far as all layers of a step share it."""
        starts, rows = segment.query_starts, segment.last - segment.first
        if segment.entry == "decode" and segment.query_len == 1 and rows <= MOST_ROWS:
            starts = self._one_token_each[: rows + 1]  # a captured size of the list builder has none of its padding
        elif segment.entry == "decode" and segment.start:
            starts = starts - segment.start
        packed = segment.entry == "packed"
        keys = (segment.key_starts, None, None, None) if packed else (None, None, None, segment.lengths)
        longest = max(1, segment.max_query_len), max(1, segment.max_seq_len)
        ends = None
        if longest[0] > 1:
            ends = self._before_all[:rows] if rows <= MOST_ROWS else torch.full_like(starts[:rows], BEFORE_ALL)
        return StepArguments((starts, *keys, *longest, None if packed else segment.block_table, *[None] * 5), ends)

    def bound(self, segment: Segment, arguments: StepArguments, caches: tuple[Tensor, Tensor] | None) -> Call:
        """The call of a segment. For ``decode`` it takes and gives the segment's tokens alone."""
        return self._call(segment, arguments, caches)

    def with_lse(
        self, segment: Segment, caches: tuple[Tensor, Tensor] | None, tensors: tuple[Tensor, Any, Any], places: Any
    ) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp (tokens, heads) of a segment."""
        output, lse = self._call(segment, self.arguments(segment, True), caches, OUTPUT_AND_LSE)(*tensors)
        if self._sinks is not None:  # the kernel's is infinite where a sink is more than 88 above every score
            lse = lse.where(lse != torch.inf, self._sinks.float()[:, None])
        return output, lse.transpose(0, 1)

    def _call(
        self,
        segment: Segment,
        arguments: StepArguments,
        caches: tuple[Tensor, Tensor] | None,
        wanted: int | slice = OUTPUT,
    ) -> Callable[[Tensor, Any, Any], Any]:
        """``bound``, of which ``wanted`` is given: all in one function, for each takes the host time."""
        forward, given, fixed, last = self._library.forward, arguments.given, self._fixed, self._last_of(arguments)
        if segment.entry == "packed":
            rest = (None, None, None, None, *given, None, None, None, *fixed, None, *last)
            return lambda query, key, value: forward(query, *segment.packed_keys(key, value), *rest)[wanted]
        keys, values = given_caches(caches)
        rows, fp8 = segment.last - segment.first, keys.dtype == FP8
        scales: Sequence[Tensor | None] = (None, None, None)
        if fp8 and self._descales is not None:
            scales = [one.expand(rows, -1) for one in self._descales]
        rest = (keys, values, None, None, None, None, *given, *scales, *fixed)
        schedule = self._scheduler(segment, (keys, values), arguments, last)

        def call(query: Tensor, key: Any, value: Any) -> Any:
            written = None if schedule is None else schedule(query)
            if fp8:
                query = query.clamp(-LARGEST, LARGEST).to(FP8)
            return forward(query, *rest, written, *last)[wanted]

        return call

    def _last_of(self, arguments: StepArguments) -> tuple[Any, ...]:
        """The last arguments of a call. Left alone, vLLM's build does not mask some keys behind a query in layers with
        a window; told that rows end before every key, it masks all tiles. Where the window holds all keys the kernel
        has none, and would then read no key (docs/design/flash-attention-3.md).
        """
        left = self._window[1]
        if left < 0 or arguments.ends is None or left >= arguments.given[6] - 1:
            return self._last
        return (*self._last[:3], *self._library.last(self._sinks, arguments.ends))

    def _scheduler(
        self, segment: Segment, caches: tuple[Tensor, Tensor], arguments: StepArguments, last: tuple[Any, ...]
    ) -> Callable[[Tensor], Tensor | None] | None:
        """What gives the schedule of a call over ``caches``, for a query; None where the call is to write its own.
        ``last`` are the call's own last arguments, the first of which bounds the parts of a row.
        """
        keys, values = caches
        operator = self._library.schedule
        if operator is None or segment.entry != "decode":
            return None
        starts, lengths, longest_query, longest = arguments.given[0], *arguments.given[4:7]
        # The sizes are those of the call, which makes room for as many splits as it counts from them.
        rest = (
            keys.dtype, lengths, starts, None, None, None, None, keys.shape[1], 0, *self._window, self._capped,
            *last[:3],
        )  # fmt: skip

        def make(query: Tensor) -> Tensor:
            (heads, size), (kv_heads, size_v) = query.shape[1:], values.shape[2:]
            return operator(len(lengths), longest_query, longest, heads, kv_heads, size, size_v, *rest)

        return arguments.scheduler(id(self), self._kind(keys.dtype), make)

    def _kind(self, cache_dtype: torch.dtype) -> int:
        """The number of the kind of layers that may share a schedule: a layer looks it up in each step."""
        return _KINDS.setdefault((self._window, self._capped, cache_dtype), next(_NUMBERS))
