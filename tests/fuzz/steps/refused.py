"""Calls of a program that are refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from fuzz.steps.captured import CapturedSize
from fuzz.steps.requests import Requests
from fuzz.steps.schedule import Schedule
from fuzz.steps.settings import MODEL_LEN

from attncore import MetadataBuilder


def refused_calls(
    draw: random.Random, builder: MetadataBuilder, requests: Requests, schedule: Schedule, bucket: Any,
    sizes: Iterable[CapturedSize],
) -> list[Callable[[], Any]]:  # fmt: skip
    """Calls of ``builder`` that ask for too much, for what is not there, or for a part of a span."""
    build = partial(builder.build, **schedule.options, **({"bucket": bucket} if bucket else {}))
    given = dict(*schedule.given)
    calls: list[Callable[[], Any]] = [
        partial(build, given | {"nobody": 1}),
        partial(builder.build, *schedule.given, **schedule.options, bucket=77),
        partial(builder.keep_paths, {"nobody": [0]}),
        partial(builder.run_ahead, 2, bucket=77),
    ]
    for name in draw.sample(sorted(schedule.running), min(len(schedule.running), 1)):
        request = requests.held[name]
        computed = request.computed
        cut = [end - 1 - computed for start, end in request.spans if computed <= start < end - 1]
        calls += [
            partial(build, given | {name: MODEL_LEN + 1 - computed}),
            partial(build, given, trees=schedule.trees | {name: [7]}),
            partial(requests.batch.rollback_many, {name: computed + 1}),
            partial(builder.keep_paths, {name: [77]}),
            *(partial(build, given | {name: count}) for count in cut),
        ]
        rest = {other: 0 for other in requests.held if other != name}
        spanned = [start + 1 - computed for start, _ in request.spans if start > computed]
        if spanned:  # no refusal of the first step, of which nothing would be sent
            requests.make_room(name, computed + max(spanned))
        calls += [
            partial(builder.run_ahead, count, bucket=size.bucket, scheduled=rest)
            for size in sizes if size.ahead
            for count in [MODEL_LEN + 1 - computed, *spanned]
        ]  # fmt: skip
    return calls
