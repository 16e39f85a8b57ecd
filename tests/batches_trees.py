"""Random sequences of calls on a batch whose requests run draft trees: batches.py with trees and kept paths.

Beside the oracle of every field stands a cache of each KV-cache group, slot by slot: a step writes each of its tokens,
the moves that ``keep_paths`` returns are made, and afterwards each request finds its own tokens, in order.
"""

import numpy as np
import pytest
from batches import Batches
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule


def is_chain(parents):
    return list(parents) == list(range(-1, len(parents) - 1))


class TreeBatches(Batches):
    more_drafts = 5

    def __init__(self):
        super().__init__()
        self.ran = {}  # by request: the parents of the tree of its last step, and the tokens computed before it
        self.tokens = {}  # by request: what its computed tokens are
        self.given = {}  # the trees of the step that is built
        self.held = {}  # by group and slot: the token that lies there
        self.next_token = 0

    # Where the tokens of a request lie.

    def slot(self, group, request, index):
        """The slot of the token, or None in a block that a window has passed."""
        size, columns = self.columns(group, request.blocks[group.name])
        block = columns[index // size]
        return None if request.blocks[group.name][index // group.block_size] == 0 else block * size + index % size

    def write(self, request, first, tokens):
        for group in self.groups:
            for index, token in enumerate(tokens, first) if not group.cross else ():
                self.held[group.name, self.slot(group, request, index)] = token

    def fresh_tokens(self, count):
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def follow(self):
        """What calls other than builds did to the requests: those that came, left, were taken back or preempted."""
        for name in self.tokens.keys() - self.requests.keys():
            del self.tokens[name]
            self.ran.pop(name, None)
        for name, request in self.requests.items():
            if name not in self.tokens:
                self.tokens[name] = self.fresh_tokens(request.computed)
                self.write(request, 0, self.tokens[name])
            del self.tokens[name][request.computed :]

    @invariant()
    def each_request_finds_its_tokens(self):
        if not hasattr(self, "batch"):
            return
        self.follow()
        for name, request in self.requests.items():
            for group in self.groups:
                for index, token in enumerate(self.tokens[name]) if not group.cross else ():
                    if (slot := self.slot(group, request, index)) is not None:
                        assert self.held[group.name, slot] == token

    def replaced(self, group, old, new):
        """An engine copies what the block held."""
        for offset in range(group.block_size):
            token = self.held.get((group.name, old * group.block_size + offset))
            self.held[group.name, new * group.block_size + offset] = token

    # Trees.

    def runs(self, scheduled):
        return {n: q for n, r in self.requests.items() if (q := scheduled.get(n, 0 if r.paused else 1))}

    def unsettled(self, name):
        """Whether tokens of the last tree count as computed that are no chain."""
        if name not in self.ran:
            return False
        parents, context = self.ran[name]
        drafts = max(self.requests[name].computed - context - 1, 0)
        return not is_chain(parents[:drafts])

    def keepable(self, name):
        if name not in self.ran:
            return False
        parents, context = self.ran[name]
        return not self.requests[name].paused and self.requests[name].computed == context + 1 + len(parents)

    def settle(self, names):
        """Keeps the root's path of each, or takes the whole tree back, so that a step may run them."""
        for name in names:
            if self.unsettled(name):
                request, (_, context) = self.requests[name], self.ran[name]
                count = request.computed - context
                for group in self.groups:  # a window may have passed what would be seen again: not taken back
                    if group.sliding_window is not None:
                        first = max(0, context + 1 - group.sliding_window) // group.block_size
                        if first < len(request.blocks[group.name]) and request.blocks[group.name][first] == 0:
                            count = None
                if count is None:
                    blocks = request.blocks
                    assert self.batch.remove_request(name) == self.as_given(blocks)
                    del self.requests[name]
                    self.rows[self.rows.index(name)] = None
                else:
                    self.batch.rollback(name, count)
                    request.computed -= count
        self.follow()

    def without_null(self, scheduled):
        """Called by each rule before its step: where trees are not settled, the build says so and changes nothing."""
        scheduled = super().without_null(scheduled)
        names = [name for name in self.runs(scheduled) if self.unsettled(name)]
        if names:
            before = self.batch_bytes(), self.builder._trees._ran
            with pytest.raises(ValueError, match=r"^trees: request 'r\d+' ran a tree of \d+ drafts?, of which its"):
                self.builder.build(scheduled)
            assert (self.batch_bytes(), self.builder._trees._ran) == before
        self.settle(names)
        for name in [name for name in scheduled if name not in self.requests]:
            del scheduled[name]
        return scheduled

    def built(self, scheduled, bucket):
        self.follow()
        given, self.given = self.given, {}
        metadata = self.builder.build(scheduled, bucket=bucket, trees=given or None)
        self.trees = [given.get(name) for name in metadata.req_ids]
        for name, count in self.runs(scheduled).items():
            request, tokens = self.requests[name], self.fresh_tokens(count)
            self.write(request, request.computed, tokens)
            self.tokens[name] += tokens
            self.ran.pop(name, None)
            if name in given:
                self.ran[name] = given[name], request.computed
        return metadata

    def check(self, metadata, running, bucket):
        if not running:
            self.trees = []
        super().check(metadata, running, bucket)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def build_trees(self, data):
        """Trees of some requests, which others rest or run beside; perhaps in a captured size."""
        bucket, each = None, None
        if self.captured and data.draw(st.booleans()):
            bucket = data.draw(st.sampled_from(sorted(self.captured)))
            each = self.captured[bucket]
        self.settle([n for n in list(self.requests) if data.draw(st.booleans())])
        scheduled, trees, left, rows = {}, {}, 64, 0
        for name, request in sorted(self.requests.items()):
            room = min(self.room(request), left, self.threshold) if self.ready(request) else 0
            fits = room >= (each or 1) and (
                bucket is None or (rows < bucket and (request.encoded or not request.encoder))
            )
            if not fits or self.unsettled(name) or not data.draw(st.booleans()):
                scheduled[name] = 0
                continue
            count = each or data.draw(st.integers(1, room))
            scheduled[name], left, rows = count, left - count, rows + 1
            if data.draw(st.integers(0, 3)):
                trees[name] = [data.draw(st.integers(max(-1, draft - 3), draft - 1)) for draft in range(count - 1)]
        scheduled = self.without_null(scheduled)
        self.given = {name: parents for name, parents in trees.items() if scheduled.get(name)}
        self.step(scheduled, bucket=bucket)

    @precondition(lambda self: any(map(self.keepable, self.requests)))
    @rule(data=st.data(), wrong=st.integers(0, 5))
    def keep(self, data, wrong):
        able = [name for name in sorted(self.requests) if self.keepable(name)]
        paths = {}
        for name in data.draw(st.lists(st.sampled_from(able), min_size=1, unique=True)):
            parents, path = self.ran[name][0], []
            while data.draw(st.integers(0, 4)):
                children = [draft for draft, parent in enumerate(parents) if parent == (path[-1] if path else -1)]
                if not children:
                    break
                path.append(data.draw(st.sampled_from(children)))
            paths[name] = path
        refused = None
        if not wrong:
            name = data.draw(st.sampled_from(sorted(self.requests)))
            paths[name] = data.draw(st.lists(st.integers(-2, 9), max_size=4))
            if not self.keepable(name):
                refused = "paths: "
            else:
                before = -1
                for draft in paths[name]:
                    parents = self.ran[name][0]
                    if not 0 <= draft < len(parents) or parents[draft] != before:
                        refused = "paths: "
                    before = draft
        if refused is None and any(self.passed(name, path) for name, path in paths.items()):
            refused = "paths: .* (would see block|its window has passed)"
        if refused:
            before = self.frozen(), dict(self.builder._trees._ran)
            with pytest.raises(ValueError, match=f"^{refused}"):
                self.builder.keep_paths(paths)
            assert (self.frozen(), self.builder._trees._ran) == before
            return
        given = {n: data.draw(st.sampled_from([p, tuple(p), np.array(p, np.int8)])) for n, p in paths.items()}
        moves = self.builder.keep_paths(given)
        moves = {self.groups[0].name: moves} if self.one_group else moves
        assert set(moves) == {group.name for group in self.groups if not group.cross}
        for group, pairs in moves.items():
            assert len({to for _, to in pairs.tolist()}) == len(pairs)
            assert all(source != to for source, to in pairs.tolist())
            read = [self.held[group, source] for source, _ in pairs.tolist()]
            for token, (_, to) in zip(read, pairs.tolist(), strict=True):
                self.held[group, to] = token
        for name, path in paths.items():
            _, context = self.ran.pop(name)
            drafts = self.tokens[name][context + 1 :]
            self.tokens[name][context + 1 :] = [drafts[draft] for draft in path]
            self.requests[name].computed = context + 1 + len(path)

    def passed(self, name, path):
        """Whether a window has passed a block that is needed for what would be kept."""
        request, (_, context) = self.requests[name], self.ran[name]
        left = context + 1 + len(path)
        for group in self.groups:
            blocks, size = request.blocks[group.name], group.block_size
            if group.cross:
                continue
            if group.sliding_window is not None:
                first = max(0, left + 1 - group.sliding_window) // size
                if 0 in blocks[first:]:
                    return True
            for kept, draft in enumerate(path):
                if kept != draft and 0 in (blocks[(context + 1 + kept) // size], blocks[(context + 1 + draft) // size]):
                    return True
        return False


class NumbaTreeBatches(TreeBatches):
    kernels = "numba"
