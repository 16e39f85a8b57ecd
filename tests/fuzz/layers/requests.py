"""Requests that come, grow, go and are taken back in a batch, and the history of what their layers wrote."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from fuzz.layers.settings import MAX_ENCODER, MAX_REQS, Settings
from torch import Tensor

from attncore import InputBatch


@dataclass
class Request:
    blocks: dict[str, list[int]]
    encoder: int = 0
    """Tokens of its encoder."""
    encoded: bool = False
    computed: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    written: dict[tuple[str, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By group and cache: the keys and values of its tokens, float64, one row a token (cross: an encoder's)."""

    def keep(self, count: int) -> None:
        """Forgets the tokens behind the first ``count``."""
        for (group, cache), (keys, values) in self.written.items():
            if group != "cross":
                self.written[group, cache] = keys[:count], values[:count]
        self.computed = count


class Requests:
    """The requests of ``batch``; ``left`` is told of blocks that are nobody's any more."""

    def __init__(self, draw: random.Random, settings: Settings) -> None:
        self.draw, self.settings = draw, settings
        self.batch = InputBatch(
            max_num_reqs=MAX_REQS, max_model_len=settings.sizes.model_len, groups=settings.groups,
            max_encoder_len=MAX_ENCODER if settings.groups[-1].cross else None, spans=settings.spans,
        )  # fmt: skip
        ids = range(1, settings.num_blocks)
        self.free = {group.name: draw.sample(ids, len(ids)) for group in settings.groups}
        self.held: dict[str, Request] = {}
        self.freed: list[tuple[str, int]] = []
        """(group, block) of blocks that came back, of the manager's size, which the next step finds as nobody's."""
        self.names = iter(range(10**6))

    def change(self) -> None:
        """What an engine does between two steps."""
        draw = self.draw
        for name in list(self.held):
            self._change(name)
        while len(self.held) < MAX_REQS and draw.random() < 0.5:
            self._add()
        if draw.random() < 0.2:
            for name, blocks in self.batch.release_passed_blocks(num_rollback=3).items():
                for group, ids in blocks.items():
                    mine = self.held[name].blocks[group]
                    mine[:] = [0 if block in ids else block for block in mine]
                    self._give_back(group, ids)
        if draw.random() < 0.2 and self.batch.num_rows > 1:
            self.batch.swap_rows(*draw.sample(range(self.batch.num_rows), 2))

    def _change(self, name: str) -> None:
        draw, request = self.draw, self.held[name]
        chance = draw.random()
        if request.computed > self.settings.sizes.model_len - 8 or chance < 0.08:
            self.batch.remove_request(name)
            del self.held[name]
        elif chance < 0.14 and request.computed:
            self.batch.preempt(name)
        elif chance < 0.25 and request.computed > 3:
            if all(all(blocks) for blocks in request.blocks.values()):  # no window has passed one
                left = request.computed - draw.randint(1, 3)
                if not any(start < left < stop for start, stop in request.spans):
                    self.batch.rollback(name, request.computed - left)
                    request.keep(left)
            return
        else:
            return
        for group, ids in request.blocks.items():
            self._give_back(group, [block for block in ids if block])
        if name in self.held:  # preempted: it starts anew
            request.keep(0)
            request.written.clear()
            request.encoded = False
            request.blocks = {group: [] for group in request.blocks}
            if more := self._encoder_blocks(request.encoder):
                self.batch.append_blocks(name, {"cross": more})
                request.blocks["cross"] = more

    def _add(self) -> None:
        name = f"r{next(self.names)}"
        blocks: dict[str, list[int]] = {group.name: [] for group in self.settings.groups}
        encoder = self.draw.choice([0, 1, 5, MAX_ENCODER]) if "cross" in blocks else 0
        if encoder:
            blocks["cross"] = self._encoder_blocks(encoder)
        options = {"encoder_seq_len": encoder} if "cross" in blocks else {}
        self.batch.add_request(name, blocks, **options)
        self.held[name] = Request(blocks, encoder)
        if self.settings.spans:
            stop = 0
            while (start := stop + self.draw.randint(0, 4)) < self.settings.sizes.model_len - 16:
                stop = start + self.draw.randint(1, 7)
                self.held[name].spans.append((start, stop))
            self.batch.set_spans(name, self.held[name].spans)

    def _encoder_blocks(self, tokens: int) -> list[int]:
        return [self.free["cross"].pop() for _ in range(-(-tokens // self.settings.block_size))]

    def make_room(self, name: str, tokens: int) -> None:
        """Blocks for ``tokens`` tokens in all."""
        request = self.held[name]
        more = {
            group.name: [self.free[group.name].pop() for _ in range(count)]
            for group in self.settings.decoders
            if (count := -(-tokens // group.block_size) - len(request.blocks[group.name])) > 0
        }
        if more:
            self.batch.append_blocks(name, more)
        for group, ids in more.items():
            request.blocks[group] += ids

    def _give_back(self, group: str, ids: list[int]) -> None:
        self.free[group][:0] = ids
        self.freed += [(group, block) for block in ids]

    def scheduled(self, most: int, each: int | None = None) -> dict[str, int]:
        """Tokens of each request in the next step, ``most`` in all; ``each``: 0 or so many of each."""
        found = {}
        for name, request in self.held.items():
            room = min(most, self.settings.sizes.model_len - request.computed)
            longest = self.draw.choice([1, self.settings.threshold, room])
            if each is None:
                count = self._whole_spans(request, self.draw.randint(0, min(longest, room)), room)
            else:
                count = each * self.draw.randint(0, 1)
                ran = range(request.computed, request.computed + count)
                if count > room or any(start < ran.stop and ran.start < stop for start, stop in request.spans):
                    count = 0  # graphs of decodes hold no spans
            found[name] = count
            most -= count
            if count:
                self.make_room(name, request.computed + count)
        return found

    @staticmethod
    def _whole_spans(request: Request, count: int, room: int) -> int:
        """``count``, or more or fewer tokens where it would cut a span."""
        for start, stop in request.spans:
            if start < request.computed + count < stop:
                return stop - request.computed if stop - request.computed <= room else start - request.computed
        return count
