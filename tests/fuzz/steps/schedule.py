"""What runs in a step: tokens and trees of requests, as an engine says it to ``build`` and to ``run_ahead``."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from fuzz.steps.captured import CapturedSize
from fuzz.steps.requests import Request, Requests
from fuzz.steps.rows import Row
from fuzz.steps.settings import MAX_REQS, MAX_TOKENS, MODEL_LEN, Settings


@dataclass
class Schedule:
    counts: dict[str, int]
    """Tokens of each request, 0 of those that rest."""
    threshold: int
    trees: dict[str, list[int]] = field(default_factory=dict)
    overlapped: bool = False
    given: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def running(self) -> set[str]:
        return {name for name, count in self.counts.items() if count}

    def rows(self, requests: Requests, order: list[str], *, exact: bool) -> list[Row]:
        """Rows in the order of requests that a build has chosen, before it counts their tokens as computed."""
        return [
            requests.row(name, self.counts[name], self.threshold, self.trees.get(name), exact=exact) for name in order
        ]


def draw_schedule(
    draw: random.Random,
    settings: Settings,
    requests: Requests,
    size: CapturedSize | None,
    *,
    overlapped: bool,
) -> Schedule:
    """A step that fits, also a captured size where one is given."""
    rows, left, each = (MAX_REQS, MAX_TOKENS, 0) if size is None else size.padded
    of_decodes = size is not None and not size.of_tokens
    most = draw.choice([1, settings.threshold, 20, 20])
    found = Schedule({}, settings.threshold, overlapped=overlapped)
    names = list(requests.held)
    draw.shuffle(names)
    all_run = draw.random() < 0.3
    for name in names:
        request = requests.held[name]
        room = min(left, MODEL_LEN - request.computed)
        if of_decodes:
            count = each * draw.randint(int(all_run), 1)
        else:
            count = draw.randint(int(all_run), min(max(room, 0), draw.choice([1, most]))) if room > 0 else 0
        if count > room or rows == 0 or (size is not None and request.encoder and not request.encoded):
            count = 0
        count = _whole_spans(request, count, room, none=of_decodes)
        if _passed(settings, request):
            count = 0
        found.counts[name] = count
        if not count:
            continue
        stop = request.computed + count
        spanned = any(start < stop and request.computed < end for start, end in request.spans)
        if settings.trees and 1 < count <= settings.threshold and not spanned and draw.random() < 0.6:
            found.trees[name] = [draw.randint(-1, draft - 1) for draft in range(count - 1)]
        rows, left = rows - 1, left - count
        requests.make_room(name, stop)
        if count > 1 and stop - max(len(request.given), request.computed) > requests.width:
            request.given = [draw.randrange(1000) for _ in range(stop)]
            requests.ids.give(name, request.given)
    _say(draw, requests, found)
    return found


def _say(draw: random.Random, requests: Requests, schedule: Schedule) -> None:
    """The arguments: requests that run ``query_len`` tokens need not be named, nor those of a tree."""
    query_len = draw.choice([1, 1, 1, 2, 3])
    paused = {name for name, request in requests.held.items() if request.paused}
    named = {
        name: count for name, count in schedule.counts.items()
        if not ((count == query_len and name not in paused) or (name in schedule.trees and query_len == 1)
                or (count == 0 and name in paused)) or draw.random() < 0.2
    }  # fmt: skip
    if draw.random() < 0.2:
        named = {name: draw.choice([np.int64, np.int8, int])(count) for name, count in named.items()}
    schedule.given = (draw.choice([dict, MappingProxyType])(named),) if named or draw.random() < 0.5 else ()
    schedule.options = {"query_len": query_len} if query_len > 1 or draw.random() < 0.3 else {}
    if schedule.overlapped:
        schedule.options["overlapped"] = True
    if schedule.trees:
        schedule.options["trees"] = schedule.trees


def _whole_spans(request: Request, count: int, room: int, *, none: bool) -> int:
    """``count``, or more or fewer tokens where it would cut a span; 0 where a size of decodes holds ``none``."""
    for start, end in request.spans:
        stop = request.computed + count
        if none and start < stop and request.computed < end:
            return 0
        if start < stop < end:
            return end - request.computed if end - request.computed <= room else max(start - request.computed, 0)
    return count


def _passed(settings: Settings, request: Request) -> bool:
    """Whether a window has passed a block of tokens that are to run again."""
    return any(
        0 in request.blocks[group.name][request.computed // group.block_size :]
        for group in settings.groups
        if not group.cross
    )


def draw_ahead(
    draw: random.Random, settings: Settings, requests: Requests, rows: int, count: int
) -> tuple[dict[str, int], set[str]]:
    """``scheduled`` of ``count`` steps ahead, and who runs."""
    scheduled, running = {}, set()
    for name, request in requests.held.items():
        stop = request.computed + count
        fits = rows and stop <= MODEL_LEN and (request.encoded or not request.encoder) and draw.random() < 0.8
        fits = fits and not any(start < stop and request.computed < end for start, end in request.spans)
        fits = fits and not (count > 1 and len(request.given) - request.computed > 1)
        if not fits or _passed(settings, request):
            scheduled[name] = 0
            continue
        rows -= 1
        running.add(name)
        requests.make_room(name, stop)
        if draw.random() < 0.5:
            scheduled[name] = 1
    return scheduled, running
