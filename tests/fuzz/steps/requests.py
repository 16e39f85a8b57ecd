"""The requests of a program: what an engine keeps of them, and what it does to them between steps."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fuzz.steps.rows import Row
from fuzz.steps.settings import MAX_ENCODER, MAX_REQS, MODEL_LEN, NUM_BLOCKS, Settings

from attncore import InputBatch


@dataclass
class Request:
    blocks: dict[str, list[int]]
    """The manager's, by group; a group of states has one slot."""
    encoder: int = 0
    encoded: bool = False
    computed: int = 0
    """As the host has it."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    late: int = 0
    """Tokens that the device has rejected, of which the host does not know yet."""
    given: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    number: float = 0.0
    tree: tuple[list[int], int] | None = None
    """The parents of the tree of its last step and the tokens before it, of which no path was kept."""
    paused: bool = False


class Requests:
    def __init__(self, draw: random.Random, settings: Settings) -> None:
        self.draw, self.settings = draw, settings
        self.batch = InputBatch(
            max_num_reqs=MAX_REQS, max_model_len=MODEL_LEN, groups=[*settings.groups, *settings.states],
            max_encoder_len=MAX_ENCODER if settings.cross else None, spans=settings.spans, kernels=settings.kernels,
        )  # fmt: skip
        self.free = {group.name: draw.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1) for group in settings.groups}
        self.free |= {group.name: draw.sample(range(1, 40), 39) for group in settings.states}
        self.held: dict[str, Request] = {}
        self.by_row: list[str | None] = [None] * MAX_REQS
        """What an engine keeps by rows, which follows what is said of moves alone."""
        self.gone: set[str] = set()
        """Names whose requests left, or lost their tokens, since the last step."""
        self.width = settings.threshold
        self.ids = self.batch.token_column("input_ids", width=self.width, unknown=-1)
        self.number = self.batch.column("number", "float32")

    def change(self) -> None:
        draw = self.draw
        for name in list(self.held):
            self._change(name)
        while len(self.held) < MAX_REQS and draw.random() < 0.5:
            self.add()
        if draw.random() < 0.2:
            self._release()
        if draw.random() < 0.2 and self.batch.num_rows > 1:
            swapped = draw.sample(range(self.batch.num_rows), 2)
            self.batch.swap_rows(*swapped)
            self.move([swapped])

    def _release(self) -> None:
        most = 12  # no more are taken back
        for name, blocks in self.batch.release_passed_blocks(num_rollback=most).items():
            for group, ids in blocks.items():
                mine = self.held[name].blocks[group]
                mine[:] = [0 if block in ids else block for block in mine]
                self.free[group][:0] = ids

    def _change(self, name: str) -> None:
        draw, request = self.draw, self.held[name]
        chance = draw.random()
        if request.computed > MODEL_LEN - 14 or chance < 0.07:
            self.leave(name, "remove")
        elif chance < 0.12:
            self.leave(name, "preempt")
        elif chance < 0.2:
            self._roll_back(name)
        elif chance < 0.3:
            self._replace(name)
        elif chance < 0.36:
            self._truncate(name)
        elif chance < 0.5:
            self.number[name] = request.number = draw.choice([0.5, -1.25, 7.0])
        elif chance < 0.55:
            request.given = [draw.randrange(1000) for _ in range(draw.randint(0, MODEL_LEN))]
            self.ids.give(name, request.given)
        elif chance < 0.6:
            request.own = [draw.randrange(1000) for _ in range(self.width)]
            self.ids[name] = request.own if self.width > 1 else request.own[0]

    def move(self, moves: Iterable[Sequence[int]]) -> None:
        """Follows swaps of rows."""
        for one, other in moves:
            self.by_row[one], self.by_row[other] = self.by_row[other], self.by_row[one]

    def check(self) -> None:
        """What the batch answers."""
        batch, needy = self.batch, []
        assert [name for name in self.by_row if name is not None] == list(batch.req_ids)
        assert set(batch.req_ids) == self.held.keys()
        for name, request in self.held.items():
            assert batch.num_computed_tokens(name) == request.computed
            assert batch.block_ids(name) == request.blocks
            assert self.number[name] == request.number
            if self.settings.spans:
                assert batch.spans(name) == request.spans
            short = any(len(request.blocks[one.name]) * one.block_size <= request.computed < MODEL_LEN
                        for one in self.settings.groups if not one.cross)  # fmt: skip
            if short and not request.paused:
                needy.append(name)
        assert set(batch.needs_block()) == set(needy)

    def leave(self, name: str, how: str) -> None:
        """The request is removed, or preempted."""
        request = self.held[name]
        self.gone.add(name)
        if how == "remove":
            self._give_back(name, self.batch.remove_request(name))
            self.by_row[self.by_row.index(name)] = None
            del self.held[name]
            return
        self._give_back(name, self.batch.preempt(name))
        request.blocks = {group: [] for group in request.blocks}
        request.computed, request.encoded, request.late, request.tree, request.paused = 0, False, 0, None, True

    def _give_back(self, name: str, blocks: Any) -> None:
        mine = self.held[name].blocks
        assert blocks == mine, (blocks, mine)
        for group, ids in mine.items():
            self.free[group][:0] = [block for block in ids if block]

    def _roll_back(self, name: str) -> None:
        request = self.held[name]
        most = min(request.computed - request.late, 4)
        if self.settings.states or request.tree or most <= 0 or not all(map(all, request.blocks.values())):
            return
        count = self.draw.randint(1, most)
        left = request.computed - count
        if request.late or any(start < left < stop for start, stop in request.spans):
            return
        self.batch.rollback(name, count)
        request.computed = left

    def _replace(self, name: str) -> None:
        """Copy on write."""
        groups = [group for group, ids in self.held[name].blocks.items() if ids]
        if not groups:
            return
        group = self.draw.choice(groups)
        mine = self.held[name].blocks[group]
        index = self.draw.randrange(len(mine))
        if mine[index]:
            new = self.free[group].pop()
            assert self.batch.replace_block(name, index, new, group) == mine[index]
            self.free[group][:0] = [mine[index]]
            mine[index] = new

    def _truncate(self, name: str) -> None:
        request = self.held[name]
        group = self.draw.choice(self.settings.groups)
        mine = request.blocks[group.name]
        needed = -(-(request.encoder if group.cross else request.computed) // group.block_size)
        if len(mine) <= needed:
            return
        keep = self.draw.randint(needed, len(mine))
        assert self.batch.truncate_blocks(name, keep, group.name) == mine[keep:]
        self.free[group.name][:0] = mine[keep:]
        del mine[keep:]

    def add(self) -> None:
        draw = self.draw
        names = [name for name in map("r{}".format, range(9)) if name not in self.held]
        again = sorted(self.gone.intersection(names))  # another request of the name of one that has just left
        name = draw.choice(again if again and draw.random() < 0.6 else names)
        cross = self.settings.cross
        encoder = draw.choice([0, 1, 5, MAX_ENCODER]) if cross else 0
        computed = draw.choice([0, 0, 0, draw.randint(0, 20)])
        request = Request({group.name: [] for group in [*self.settings.groups, *self.settings.states]}, encoder)
        for group, count in self._missing(request, computed).items():
            request.blocks[group] = [self.free[group].pop() for _ in range(count)]
        options = {"encoder_seq_len": encoder, "encoder_computed": draw.random() < 0.3} if cross else {}
        request.encoded, request.computed = options.get("encoder_computed", False), computed
        row = self.batch.add_request(name, request.blocks, computed, **options)
        assert self.by_row[row] is None
        self.by_row[row] = name
        self.held[name] = request
        request.own = [-1] * self.width
        if draw.random() < 0.7:
            request.given = [draw.randrange(1000) for _ in range(draw.randint(0, MODEL_LEN))]
            self.ids.give(name, request.given)
        if self.settings.spans:
            stop = 0
            while (start := stop + draw.randint(0, 6)) < MODEL_LEN - 16:
                stop = start + draw.randint(1, 7)
                if not start < computed < stop:
                    request.spans.append((start, stop))
            self.batch.set_spans(name, request.spans)

    def _missing(self, request: Request, tokens: int) -> dict[str, int]:
        """Blocks of each group that ``tokens`` tokens need beyond those held."""
        found = {}
        for group in self.settings.groups:
            wanted = -(-(request.encoder if group.cross else tokens) // group.block_size)
            found[group.name] = max(wanted - len(request.blocks[group.name]), 0)
        for slots in self.settings.states:
            found[slots.name] = 1 - len(request.blocks[slots.name])
        return {group: count for group, count in found.items() if count}

    def make_room(self, name: str, tokens: int) -> None:
        request = self.held[name]
        more = {group: [self.free[group].pop() for _ in range(count)]
                for group, count in self._missing(request, tokens).items()}  # fmt: skip
        if more:
            if self.draw.random() < 0.5:
                self.batch.append_blocks(name, more)
            else:
                self.batch.append_blocks_many({name: more})
        for group, ids in more.items():
            request.blocks[group] += ids
        request.paused = False

    def row(self, name: str, count: int, threshold: int, parents: list[int] | None, *, exact: bool) -> Row:
        """The row of a request that runs ``count`` tokens, as the device has it (``exact``), or as the host."""
        request, settings = self.held[name], self.settings
        first = request.computed - (request.late if exact else 0)
        positions, masks = list(range(first, first + count)), [0] * count
        if parents is not None:
            seen = [{0}]
            for draft, parent in enumerate(parents):
                seen.append(seen[parent + 1] | {draft + 1})
            positions = [first + len(tokens) - 1 for tokens in seen]
            masks = [sum(1 << token for token in tokens) for tokens in seen]
        ends = [next((stop for start, stop in request.spans if start <= at < stop), 0)
                for at in range(first, first + count)]  # fmt: skip
        blocks = {}
        for group in settings.groups:
            each = group.block_size // (group.kernel_block_size or group.block_size)
            blocks[group.name] = [block * each + k for block in request.blocks[group.name] for k in range(each)]
        tokens = tuple(
            request.given[at] if at < len(request.given) else self._own(request, at - max(first, len(request.given)))
            for at in range(first, first + count)
        )
        return Row(
            name, blocks, first, tuple(positions), tuple(masks), tuple(ends), count <= threshold,
            encoder=request.encoder, fresh=0 if request.encoded else request.encoder,
            states={slots.name: request.blocks[slots.name][0] for slots in settings.states},
            columns={"input_ids": tokens, "number": request.number},
        )  # fmt: skip

    @staticmethod
    def _own(request: Request, index: int) -> int:
        return request.own[index] if index < len(request.own) else 0
