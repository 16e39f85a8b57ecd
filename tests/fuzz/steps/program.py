"""A program: random steps of a random batch, and what is made of each, compared with the oracle field by field."""

from __future__ import annotations

import random
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fuzz.steps.builders import new_backends, new_builder
from fuzz.steps.captured import CapturedSize
from fuzz.steps.compared import LIVE, Comparer, Part, as_list
from fuzz.steps.parts import Parts
from fuzz.steps.refused import refused_calls
from fuzz.steps.requests import Requests
from fuzz.steps.rows import Row
from fuzz.steps.schedule import Schedule, draw_ahead, draw_schedule
from fuzz.steps.settings import MAX_REQS, MAX_TOKENS, MODEL_LEN, WORDS, draw_needs, draw_settings
from interrupted_calls import AtOpcode

from attncore import MetadataBuilder
from attncore.errors import AttncoreError

TOUCHED = ("seq_lens", "query_start_loc", "positions", "paged_kv_indptr", "seq_start_loc", "paged_kv_num_pages",
           "span_ends", "tree_mask")  # fmt: skip


class NotNowError(Exception):
    """What a fill or a plan raises that fails."""


class Program:
    def __init__(self, draw: random.Random, kernels: str, device: str = "cpu") -> None:
        self.draw = draw
        self.settings = settings = draw_settings(draw, kernels, device)
        self.patches = ExitStack()
        self.requests = Requests(draw, settings)
        self.rejected = torch.zeros(MAX_REQS, dtype=torch.int32, device=device) if settings.overlap else None
        self.comparer = Comparer(draw, settings)
        self.captured: dict[Any, CapturedSize] = {}
        """By bucket."""
        self.verdicts: dict[str, int] = {}
        """What was rejected of the last step, of which the host does not know yet."""
        self.building: Schedule | None = None
        self.fails = ""
        """Which of fill and plan fails."""
        self.quiet = draw.random() < 0.25
        """Whether few fields are looked at, so that one may be asked for first behind or in a call that fails."""
        self.earlier: deque[Part] = deque(maxlen=settings.depth - 1)
        self.last: Part | None = None
        other: dict[str, Any] = {"max_num_batched_tokens": MAX_TOKENS, "decode_threshold": settings.threshold}
        self.other = MetadataBuilder(self.requests.batch, **other)
        self._new_builder()
        self._capture()

    def _new_builder(self) -> None:
        draw, settings = self.draw, self.settings
        self.backends = new_backends(settings, self._planned) if settings.backend else None
        self.parts = Parts(draw, settings, self.backends)
        with mock.patch.dict("os.environ", {"ATTNCORE_POISON": str(int(settings.poison))}):
            self.builder = new_builder(settings, self.requests.batch, self.backends, self.rejected, self.patches)
        for column in draw.sample([self.requests.ids, self.requests.number], 2):
            self.builder.register_column(column)
        self.per = draw.choice(["token", "request", None])
        if self.per:
            self.builder.register_field("checked", "int64", self.per, self._fill)

    def _renew(self) -> None:
        """Another builder in the place of the one that is closed, over the same requests; other fields are declared."""
        for bucket in self.captured:
            self.builder.release(bucket)
        self.captured.clear()
        self._not_made(self.builder.close)
        self.builder.close()
        self._forget()
        draw_needs(self.draw, self.settings)
        self._new_builder()
        self._capture()

    def close(self) -> None:
        self.comparer.check()
        self.patches.close()

    def _capture(self) -> None:
        draw, settings = self.draw, self.settings
        while draw.random() < 0.4:
            rows, each = draw.randint(1, MAX_REQS), draw.choice([1, draw.randint(1, settings.threshold)])
            self._forget()
            if rows not in self.captured:
                self._not_made(lambda rows=rows, each=each: self.builder.capture(rows, each), 3000)
                self._captured(rows, self.builder.capture(rows, each), (rows, rows * each, each))
            if draw.random() < 0.3 and not settings.rank and not settings.states:
                tokens = draw.choice([rows, 6, 20])
                if (rows, tokens) not in self.captured:
                    metadata = self.builder.capture(rows, num_tokens=tokens)
                    self._captured((rows, tokens), metadata, (rows, tokens, tokens))
        if draw.random() < 0.2:
            self._profile()
        if self.captured and draw.random() < 0.2 and settings.transport != "graph":
            self._forget()
            bucket = draw.choice(list(self.captured))
            size = self.captured[bucket]
            metadata = self.builder.build_empty(bucket)
            self.comparer.compare(size.part([], [], how="empty", metadata=metadata))
            if draw.random() < 0.3:
                self.builder.release(bucket)
                del self.captured[bucket]

    def _profile(self) -> None:
        """A step without a cache, which takes no arena."""
        lengths = [self.draw.randint(1, 9) for _ in range(self.draw.randint(1, MAX_REQS))]
        blocks = {name: [0] * MODEL_LEN for name in self.comparer.groups}
        rows = [Row("", blocks, 0, tuple(range(n)), (0,) * n, (0,) * n, decode=False) for n in lengths]
        missing = {"tree_mask", "span_ends", "paged_kv_indptr", "paged_kv_num_pages", "paged_kv_last_page_len",
                   "paged_kv_indices"}  # fmt: skip
        self.building = None
        metadata = {next(iter(self.comparer.groups)): self.builder.build_profile(lengths)}
        part = Part(metadata, rows, rows, ("profile",), names=False, whole=False, encoder=False, tableless=True,
                    lists=True, missing=frozenset(missing))  # fmt: skip
        for one in (part, *self.parts.of(part)):
            self.comparer.compare(one)

    def _captured(self, bucket: Any, metadata: Any, padded: tuple[int, int, int]) -> None:
        self.captured[bucket] = CapturedSize(self.draw, self.settings, self.comparer, metadata, bucket, padded)

    def _forget(self) -> None:
        """An empty step takes an arena, and lies on the device."""
        self.earlier.clear()
        self.last = None

    def step(self) -> None:
        draw, requests = self.draw, self.requests
        if self.settings.lags:
            self.comparer.lag()
        self.parts.adopts = True
        self._settle()
        requests.change()
        requests.check()
        self.verdicts = {name: count for name, count in self.verdicts.items() if name not in requests.gone}
        requests.gone.clear()
        if draw.random() < 0.1:
            self._capture()
        if not self.verdicts and draw.random() < 0.04:
            self._renew()
        bucket = draw.choice(list(self.captured)) if self.captured and draw.random() < 0.4 else None
        overlapped = bool(self.verdicts) and draw.random() < 0.7
        before = self.verdicts
        if not overlapped:
            self._tell(self.verdicts)
            self.verdicts = before = {}
            if bucket in self.captured and self.captured[bucket].ahead and draw.random() < 0.6:
                self._run_ahead(bucket)
                return
        size = self.captured.get(bucket)
        schedule = draw_schedule(draw, self.settings, requests, size, overlapped=overlapped)
        others = bucket is None and not overlapped and not schedule.trees and self.settings.may_have_others
        if others and draw.random() < 0.1:
            self._by_another(schedule)
            return
        whole = self._built(schedule, bucket)
        self._go_on(whole, schedule)
        if overlapped:
            self._tell(before)

    def _built(self, schedule: Schedule, bucket: Any) -> Part:
        draw = self.draw
        if draw.random() < 0.15 and (self.per or self.settings.planned):
            self._fail(schedule, bucket)
        if draw.random() < (0.4 if self.quiet else 0.1):
            self._refused(schedule, bucket)
        self.building = schedule
        metadata = None
        if draw.random() < 0.1 and self.settings.transport != "graph":  # to take a step back waits for a GPU
            metadata = self._interrupted(schedule, bucket)
        if metadata is None:
            metadata = self.builder.build(*schedule.given, **schedule.options, **({"bucket": bucket} if bucket else {}))
            if bucket is not None and self.settings.transport == "graph" and draw.random() < 0.2:
                metadata.abandon()
                metadata = self.builder.build(*schedule.given, **schedule.options, bucket=bucket)
        self.building = None
        self.requests.move(metadata.moves)
        whole = self._whole(metadata, schedule, bucket)
        if self.settings.planned:
            for one in whole.metadata.values():
                assert one.kept == {"planned": metadata.step}
        late = self.settings.transport == "graph" and bucket is not None  # the device has it once it is replayed
        if bucket is not None and (late or draw.random() < 0.5):
            self._replay(whole, metadata, bucket)
        self._look(whole)
        if bucket is not None and not late and draw.random() < 0.3:
            self._replay(whole, metadata, bucket)
        self._again()
        self.earlier.append(whole)
        self.last = whole
        return whole

    def _whole(self, metadata: Any, schedule: Schedule, bucket: Any, how: str = "step") -> Part:
        order = list(metadata.req_ids)
        assert set(order) == schedule.running
        assert how in ("fill", "plan") or self.requests.by_row[: len(order)] == order
        rows, host_rows = (schedule.rows(self.requests, order, exact=exact) for exact in (True, False))
        padded = None if bucket is None else self.captured[bucket].padded
        return Part(dict(metadata.groups), rows, host_rows, (how,), self.settings.rank, padded,
                    bounded=schedule.overlapped, of_tokens=isinstance(bucket, tuple), engine=True,
                    requests={name: self.requests.held[name] for name in order})  # fmt: skip

    def _fail(self, schedule: Schedule, bucket: Any) -> None:
        """A build whose fill or plan raises changes nothing, and the step before is as it was."""
        self.fails = self.draw.choice([*(["fill"] if self.per else []), *(["plan"] if self.settings.planned else [])])
        with pytest.raises(NotNowError):
            self.builder.build(*schedule.given, **schedule.options, **({"bucket": bucket} if bucket else {}))
        self.fails, self.building = "", None
        self._as_before()

    def _refused(self, schedule: Schedule, bucket: Any) -> None:
        """A call that is refused changes nothing, on the host or on the device."""
        sizes = self.captured.values()
        calls = refused_calls(self.draw, self.builder, self.requests, schedule, bucket, sizes)
        before = self.builder.last_step
        for call in self.draw.sample(calls, self.draw.randint(1, 3)):
            with pytest.raises((ValueError, LookupError, AttncoreError)):
                call()
            assert self.builder.last_step == before
        self._as_before()

    def _as_before(self) -> None:
        """The last step is what it was, but for what the requests of its rows have become."""
        if self.last is not None and self.settings.depth > 1 and self.last.any.req_ids == self.last.names_of_rows:
            named = (name not in self.requests.gone for name in self.last.names_of_rows)
            if all(named) and not self.settings.poison:
                self.comparer.compare(replace(self.last, stale=True), some=1.0 if self.quiet else 0.5)

    def _interrupted(self, schedule: Schedule, bucket: Any) -> Any:
        """A build that an exception from outside interrupts: its step, where it has happened, or None."""
        before = self.builder.last_step
        options = {"bucket": bucket} if bucket else {}
        with AtOpcode(self.draw.choice([200, 800, 3000, self.draw.randrange(3000)])) as interrupt:
            metadata = self.builder.build(*schedule.given, **schedule.options, **options)
        if not interrupt.fired:
            return metadata
        if self.builder.last_step > before:
            assert self.builder.last_metadata is not None
            return self.builder.last_metadata
        assert self.builder.last_step == before
        if self.last is not None and self.builder.last_metadata is not None and self.settings.depth > 1:
            self.comparer.compare(replace(self.last, stale=True), some=0.5)
        return None

    def _not_made(self, call: Any, most: int = 800) -> bool:
        """Whether a call is still to be made, or has been interrupted by an exception from outside."""
        if self.draw.random() < 0.8 or self.settings.transport == "graph":
            return True
        with AtOpcode(self.draw.randrange(most)) as interrupt:
            call()
        return interrupt.fired

    def _fill(self, metadata: Any, out: Any) -> None:
        self._inside(metadata, "fill")
        host = metadata.host
        out[:] = 3 * host.positions + 1 if self.per == "token" else 3 * host.seq_lens + 1

    def _planned(self, metadata: Any) -> None:
        if metadata.from_groups:  # a profiling run, which is one step for the backends of all groups
            return
        assert metadata.kept == {}
        metadata.kept["planned"] = metadata.step
        self._inside(metadata, "plan")

    def _inside(self, metadata: Any, where: str) -> None:
        """What a fill or a plan finds: the step's host arrays, and nothing that later readers are left with."""
        draw = self.draw
        if self.fails == where:
            if draw.random() < 0.5:
                self._touch(metadata)
            raise NotNowError
        if draw.random() < 0.4:
            self._touch(metadata)
        if self.building is None or draw.random() < 0.5 or metadata.use_cuda_graph:
            return
        whole = self._whole(metadata, self.building, None, where)
        if where == "plan":
            whole.metadata = {metadata.group: metadata}
        parts = [whole, *self.parts.views(whole), *self.parts.slices(whole)]
        for part in parts:
            self.comparer.compare(replace(part, whole=False), sides=("host",), live=False)

    def _touch(self, metadata: Any) -> None:
        """Asks for fields on the device, where they are an earlier step's yet."""
        views = [metadata, metadata.decode_metadata, metadata.prefill_metadata]
        for view in views:
            if view is not None and self.draw.random() < 0.7:
                for name in self.draw.sample(TOUCHED, 3):
                    getattr(view, name, None)

    def _by_another(self, schedule: Schedule) -> None:
        """A step of another builder of the batch, whose steps are NumPy arrays."""
        metadata = self.other.build(*schedule.given, **schedule.options)
        self.requests.move(metadata.moves)
        whole = replace(self._whole(metadata, schedule, None, "another builder"), engine=False, tree_mask=False)
        self.comparer.compare(whole)
        self.last = None
        self._go_on(whole, schedule, judged=False)
        self.verdicts = {}

    def _replay(self, whole: Part, metadata: Any, bucket: Any) -> None:
        size = self.captured[bucket]
        size.expect(whole)
        metadata.replay(size.graphs[1])
        size.replayed()

    def _run_ahead(self, bucket: Any) -> None:
        """Several steps of one token each, of which the first alone is built."""
        draw, requests, size = self.draw, self.requests, self.captured[bucket]
        count = draw.randint(1, 5)
        scheduled, running = draw_ahead(draw, self.settings, requests, size.padded[0], count)
        self.building = None
        before, run = self.builder.last_step, partial(self.builder.run_ahead, count, bucket=bucket, scheduled=scheduled)
        if self._not_made(run, 2000) and self.builder.last_step == before:
            run()
        steps: Any = self.builder.steps_ahead
        self._forget()
        order = list(steps.first.req_ids)
        requests.move(steps.first.moves)
        assert requests.by_row[: len(order)] == order
        assert set(order) == running
        first = [requests.row(name, 1, self.settings.threshold, None, exact=False) for name in order]
        every = [[row.moved(index) for row in first] for index in range(count)]
        until, moves = draw.choice([count, count, draw.randint(0, count)]), tuple(steps.first.moves)
        built = Part(dict(steps.first.groups), first, first, ("ahead",), None, size.padded, engine=True)
        if self.settings.transport != "graph" and (not until or draw.random() < 0.5):
            self._look(built, deep=False)
        while steps.launched < until:
            at = steps.launched
            several = draw.choice([n for n in size.graphs if n <= until - at])
            for index in range(at, at + several):
                size.expect(replace(built, metadata={}, rows=every[index], how=("ahead", f"{index} of {count}")))
            if several == 1 and draw.random() < 0.5:
                steps.first.replay(size.graphs[1])
            else:
                steps.replay(size.graphs[several], several)
            size.replayed()
            if draw.random() < 0.3:  # fields that nobody asked for before are there, or an error
                now = replace(built, rows=every[at + several - 1], how=("ahead, now",), ahead=True)
                self.comparer.compare(now, sides=("device",), names=WORDS, some=0.5)
        if 0 < until < count and draw.random() < 0.4:
            names = [name for name in order if draw.random() < 0.4]
            for name in names:
                requests.held[name].computed += count  # of which some are given back
                requests.leave(name, draw.choice(["remove", "preempt"]))
            first = [row for row in first if row.name not in names]
            every = []
        if until < count or draw.random() < 0.2:
            self._not_made(steps.stop)
            assert steps.stop() == until == len(steps)
            if not until:  # the step was taken back, and its moves
                requests.move(reversed(moves))
        for index in range(until if every else 0):
            part = Part(dict(steps[index].groups), every[index], every[index], (f"steps[{index}]",), None, size.padded,
                        whole=False)  # fmt: skip
            self.comparer.compare(part)
            for deeper in self.parts.of(part):
                self.comparer.compare(deeper)
        for row in first:
            requests.held[row.name].computed += until
        self.verdicts = {}

    def _look(self, whole: Part, *, deep: bool = True) -> None:
        draw = self.draw
        if self.quiet:
            self.comparer.compare(whole, some=draw.choice([0.0, 0.1]))
            return
        self.comparer.compare(whole, some=draw.choice([0.0, 0.3, 1.0]))
        self._engine_fields(whole)
        parts = [whole] if deep else []
        for _ in range(draw.choice([1, 2, 3])):
            made = [deeper for part in parts if draw.random() < 0.8 for deeper in self.parts.of(part)]
            for part in made:
                self.comparer.compare(part, some=draw.choice([0.3, 1.0, 1.0]))
            parts = made + parts[:1]
        self.comparer.compare(whole)

    def _engine_fields(self, whole: Part) -> None:
        metadata, rows = whole.any, whole.host_rows
        more, tokens = 0, 0
        if whole.padded is not None:
            more = whole.padded[0] - len(rows)
            tokens = whole.padded[1] - sum(row.count for row in rows)
        wanted = {
            "input_ids": [one for row in rows for one in row.columns["input_ids"]] + [0] * tokens,
            "number": [row.columns["number"] for row in rows] + [0.0] * more,
        }
        if self.per == "token":
            wanted["checked"] = [3 * at + 1 for row in rows for at in row.positions] + [1] * tokens
        elif self.per == "request":
            group = next(iter(self.comparer.groups.values()))
            lengths = self.comparer.expected(whole, group, rows)["seq_lens"]
            wanted["checked"] = [3 * length + 1 for length in lengths]
        for name, values in wanted.items():
            for of in (metadata, metadata.host):
                self.comparer.equal(getattr(of, name), values, (*whole.how, name))

    def _again(self) -> None:
        """The host arrays of the steps before, which are still valid."""
        for part in self.earlier:
            for group, metadata in part.metadata.items():
                wanted = self.comparer.expected(part, self.comparer.groups[group], part.host_rows)
                for name, value in wanted.items():
                    if name in LIVE or name.startswith(("num_", "max_")):
                        continue
                    found = as_list(getattr(metadata.host, name))
                    assert found == value, ("earlier", group, name, found, value)

    def _go_on(self, whole: Part, schedule: Schedule, *, judged: bool = True) -> None:
        draw, requests = self.draw, self.requests
        for row in whole.rows:
            request = requests.held[row.name]
            if row.name in schedule.trees:
                request.tree = schedule.trees[row.name], request.computed
            request.computed += row.count
            request.encoded = True
        if self.rejected is not None and judged:
            wrong = {row.name: min(draw.randint(0, 4), row.count - 1)
                     for row in whole.rows}  # fmt: skip
            numbers = torch.tensor(list(wrong.values()), dtype=torch.int32)
            self.rejected[: len(wrong)].copy_(
                numbers.pin_memory() if self.settings.lags else numbers, non_blocking=True
            )
            self.verdicts = wrong
            for name, count in wrong.items():
                requests.held[name].late += count
        for part in [whole, *self.earlier]:
            if draw.random() < 0.3 and part.requests:
                self._write_numbers(part)
        if draw.random() < 0.7:
            numbers = [draw.randrange(1000) for _ in whole.rows]
            made: Any = draw.choice([list, np.array, torch.tensor])
            requests.ids.write(whole.any, made(numbers) if numbers else numbers)
            for row, number in zip(whole.rows, numbers, strict=True):
                requests.held[row.name].own[0] = number
        elif draw.random() < 0.3:
            requests.ids.leave(whole.any)
            for row in whole.rows:
                requests.held[row.name].own = [-1] * requests.width

    def _write_numbers(self, part: Part) -> None:
        """Sets a column by the rows of a step; those whose request has left since are passed over."""
        numbers = [self.draw.choice([0.25, 3.0, -8.0]) for _ in part.rows]
        self.requests.number.write(part.any, numbers)
        for row, number in zip(part.rows, numbers, strict=True):
            if self.requests.held.get(row.name) is part.requests[row.name]:
                part.requests[row.name].number = number

    def _tell(self, verdicts: dict[str, int]) -> None:
        """The host learns how many tokens of a step were rejected."""
        requests = self.requests
        known = {name: count for name, count in verdicts.items() if name in requests.held}
        computed = requests.batch.num_computed_tokens
        if self._not_made(lambda: requests.batch.rollback_many(known)):
            again = all(computed(name) == requests.held[name].computed for name in known)
            requests.batch.rollback_many(known if again else {})
        for name, count in known.items():
            requests.held[name].computed -= count
            requests.held[name].late -= count

    def _settle(self) -> None:
        """Keeps a path of each tree."""
        held, paths = self.requests.held, {}
        for name, request in held.items():
            if request.tree:
                parents, base = request.tree
                path, at = [], -1
                while (after := [d for d, parent in enumerate(parents) if parent == at]) and self.draw.random() < 0.7:
                    at = self.draw.choice(after)
                    path.append(at)
                paths[name] = path
                request.computed, request.tree = base + 1 + len(path), None
        computed = self.requests.batch.num_computed_tokens
        before = {name: computed(name) for name in paths}
        if not paths or not self._not_made(lambda: self.builder.keep_paths(paths)):
            return
        if all(computed(name) == before[name] for name in paths):
            with suppress(ValueError):  # it has happened where all tokens were kept
                self.builder.keep_paths(paths)
