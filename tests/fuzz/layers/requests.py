"""Requests that come, grow, go and are taken back in a batch, and the history of what their layers wrote."""

from __future__ import annotations

import math
import random
from collections import Counter
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
    ahead: int = 0
    """Tokens of the last step that were rejected, as the host does not know yet."""
    shared: int = 0
    """The first tokens lie in blocks that other requests have too: they are not taken back."""
    sparse: bool = False
    """Whether tokens that no window shows any more were never written."""
    state: int = 0
    """Its slot of the group of states."""
    inputs: list[float] = field(default_factory=list)
    """Of its tokens: what a recurrent layer reads."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    written: dict[tuple[str, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By group and cache: the keys and values of its tokens, float64, one row a token (cross: an encoder's)."""

    def keep(self, count: int) -> None:
        """Forgets the tokens behind the first ``count``."""
        for (group, cache), (keys, values) in self.written.items():
            if group != "cross":
                self.written[group, cache] = keys[:count], values[:count]
        self.computed = count
        del self.inputs[count:]


class Requests:
    """The requests of ``batch``; ``left`` is told of blocks that are nobody's any more."""

    def __init__(self, draw: random.Random, settings: Settings) -> None:
        self.draw, self.settings = draw, settings
        self.batch = InputBatch(
            max_num_reqs=MAX_REQS, max_model_len=settings.sizes.model_len, groups=settings.all_groups,
            max_encoder_len=MAX_ENCODER if settings.groups[-1].cross else None, spans=settings.spans,
        )  # fmt: skip
        self.free = {}
        for group in settings.groups:
            ids = range(1, settings.of(group.name).num_blocks)
            self.free[group.name] = draw.sample(ids, len(ids))
        self.held: dict[str, Request] = {}
        self.moved: list[tuple[str, int, int | None]] = []
        """In order, what happened to blocks of the manager's size since the last step: group, block, and the block to
        which it was copied; None where it came back, so that the next step finds it as nobody's."""
        self.owners: Counter[tuple[str, int]] = Counter()
        """How many requests have a block."""
        self.free_states = list(range(1, MAX_REQS + 3))
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
        if self.held and draw.random() < 0.2:
            self._move(draw.choice(list(self.held)))
        if draw.random() < 0.2 and self.batch.num_rows > 1:
            self.batch.swap_rows(*draw.sample(range(self.batch.num_rows), 2))

    def arrive(self) -> None:
        """What may be done while the last step's drafts are not judged: requests come and go."""
        for name, request in list(self.held.items()):
            if request.computed > self.settings.sizes.model_len - 12 or self.draw.random() < 0.05:
                self._leave(name)
        while len(self.held) < MAX_REQS and self.draw.random() < 0.4:
            self._add()

    def _change(self, name: str) -> None:
        draw, request = self.draw, self.held[name]
        chance = draw.random()
        if request.computed > self.settings.sizes.model_len - 8 or chance < 0.08:
            self._leave(name)
        elif chance < 0.14 and request.computed:
            self._preempt(name)
        elif chance < 0.25 and self._knows_earlier(request):
            left = request.computed - draw.randint(1, 3)
            if not any(start < left < stop for start, stop in request.spans):
                self.batch.rollback(name, request.computed - left)
                request.keep(left)

    def _knows_earlier(self, request: Request) -> bool:
        """Whether three tokens can be taken back: no window has passed or left out what comes before, and no state."""
        whole = all(all(blocks) for blocks in request.blocks.values())
        return whole and request.computed > request.shared + 3 and not (self.settings.states or request.sparse)

    def _leave(self, name: str) -> None:
        self.batch.remove_request(name)
        self._give_all_back(self.held.pop(name))

    def _preempt(self, name: str) -> None:
        """It starts anew."""
        request = self.held[name]
        self.batch.preempt(name)
        self._give_all_back(request)
        request.keep(0)
        request.written.clear()
        request.encoded = request.sparse = False
        request.shared = 0
        request.blocks = {group: [] for group in request.blocks}
        more: dict[str, list[int]] = {}
        if ids := self._encoder_blocks(request.encoder):
            more["cross"] = request.blocks["cross"] = ids
        if self.settings.states:
            request.state = self.free_states.pop()
            more["states"] = [request.state]
        if more:
            self.batch.append_blocks(name, more)

    def _give_all_back(self, request: Request) -> None:
        for group, ids in request.blocks.items():
            self._give_back(group, [block for block in ids if block])
        if self.settings.states:
            self.free_states.insert(0, request.state)

    def _add(self) -> None:
        name = f"r{next(self.names)}"
        blocks: dict[str, list[int]] = {group.name: [] for group in self.settings.groups}
        encoder = self.draw.choice([0, 1, 5, MAX_ENCODER]) if "cross" in blocks else 0
        if encoder:
            blocks["cross"] = self._encoder_blocks(encoder)
        options = {"encoder_seq_len": encoder} if "cross" in blocks else {}
        request = self.held[name] = Request(blocks, encoder)
        self._share_prefix(request)
        given = dict(blocks)
        if self.settings.states:
            request.state = self.free_states.pop()
            given["states"] = [request.state]
        self.batch.add_request(name, given, request.computed, **options)
        if self.settings.spans:
            stop = 0
            while (start := stop + self.draw.randint(0, 4)) < self.settings.sizes.model_len - 16:
                stop = start + self.draw.randint(1, 7)
                self.held[name].spans.append((start, stop))
            self.batch.set_spans(name, self.held[name].spans)

    def _share_prefix(self, request: Request) -> None:
        """The whole first blocks of another request, sometimes."""
        if self.settings.spans or self.settings.states or self.draw.random() < 0.5:
            return
        whole = math.lcm(*(group.block_size for group in self.settings.decoders))
        donors = [
            one for one in self.held.values()
            if one.computed >= whole and not one.sparse
        ]  # fmt: skip
        if not donors:
            return
        donor = self.draw.choice(donors)
        count = whole * self.draw.randint(1, donor.computed // whole)
        taken = {group.name: donor.blocks[group.name][: count // group.block_size] for group in self.settings.decoders}
        if not all(all(ids) for ids in taken.values()):
            return
        for group, ids in taken.items():
            request.blocks[group] += ids
            self.owners.update((group, block) for block in ids)
        request.written = {
            key: (keys[:count], values[:count]) for key, (keys, values) in donor.written.items() if key[0] != "cross"
        }
        request.computed = request.shared = count
        donor.shared = max(donor.shared, count)

    def _encoder_blocks(self, tokens: int) -> list[int]:
        return self._taken("cross", -(-tokens // self.settings.block_size))

    def _taken(self, group: str, count: int) -> list[int]:
        ids = [self.free[group].pop() for _ in range(count)]
        self.owners.update((group, block) for block in ids)
        return ids

    def _move(self, name: str) -> None:
        """Another block for one of a request's, which is copied."""
        request = self.held[name]
        group = self.draw.choice(self.settings.groups).name
        places = [index for index, block in enumerate(request.blocks[group]) if block]
        if not places:
            return
        index = self.draw.choice(places)
        (new,) = self._taken(group, 1)
        old = request.blocks[group][index]
        assert self.batch.replace_block(name, index, new, group) == old
        request.blocks[group][index] = new
        self.moved.append((group, old, new))
        self._give_back(group, [old])

    def make_room(self, name: str, tokens: int) -> None:
        """Blocks for ``tokens`` tokens in all."""
        request = self.held[name]
        more = {
            group.name: self._taken(group.name, count)
            for group in self.settings.decoders
            if (count := -(-tokens // group.block_size) - len(request.blocks[group.name])) > 0
        }
        if more:
            self.batch.append_blocks(name, more)
        for group, ids in more.items():
            request.blocks[group] += ids

    def _give_back(self, group: str, ids: list[int]) -> None:
        for block in ids:
            self.owners[group, block] -= 1
            if not self.owners[group, block]:
                self.free[group].insert(0, block)
                self.moved.append((group, block, None))

    def scheduled(self, most: int, each: int | None = None) -> dict[str, int]:
        """Tokens of each request in the next step, ``most`` in all; ``each``: 0 or so many of each."""
        found = {}
        for name, request in self.held.items():
            room = min(most, self.settings.sizes.model_len - request.computed - request.ahead)
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
                self.make_room(name, request.computed + request.ahead + count)
        return found

    @staticmethod
    def _whole_spans(request: Request, count: int, room: int) -> int:
        """``count``, or more or fewer tokens where it would cut a span."""
        for start, stop in request.spans:
            if start < request.computed + count < stop:
                return stop - request.computed if stop - request.computed <= room else start - request.computed
        return count
