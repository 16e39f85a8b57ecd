"""An engine that runs steps ahead, beside one that builds each step: every field of every step is compared.

``AheadEngine`` works over any transport; what its graphs do is the caller's (``new_graph``). Requests join, end in the
middle of what was booked, are preempted, rest, and run chunks of prompts between.
"""

import numpy as np

from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder

GROUPS = {
    "one": [KVCacheGroup("decoder", 4)],
    "sizes": [KVCacheGroup("a", 3), KVCacheGroup("b", 16), KVCacheGroup("c", 3), KVCacheGroup("d", 1)],
    "expanded": [KVCacheGroup("small", 8), KVCacheGroup("large", 12, kernel_block_size=4, sliding_window=20)],
    "cross": [KVCacheGroup("decoder", 4), KVCacheGroup("encoder", 8, kernel_block_size=4, cross=True)],
}
SIZES = (1, 3, 6)
MAX_LEN = 96
OF_STEP = ("seq_lens", "context_lens", "positions", "seq_start_loc", "query_start_loc", "token_to_req_indices")
OF_GROUP = ("slot_mapping", "paged_kv_indptr", "paged_kv_last_page_len", "paged_kv_num_pages", "paged_kv_indices")
COUNTS = ("num_reqs", "num_tokens", "num_actual_reqs", "num_decodes", "max_seq_len", "max_decode_seq_len")


def fields_of(metadata, rows=None):
    """Every field of a step by (group, name), as lists; page indices as far as the pointers reach."""
    found = {}
    for group, of_group in metadata.groups.items():
        for name in OF_STEP + OF_GROUP:
            if name != "slot_mapping" or hasattr(of_group, name):
                found[group, name] = getattr(of_group, name).tolist()
        found[group, "paged_kv_indices"] = found[group, "paged_kv_indices"][: found[group, "paged_kv_indptr"][-1]]
    return found


class Calls:
    """In place of a captured graph on a CPU: its steps, made at each replay, and what each of them saw."""

    def __init__(self, metadata, count=1):
        self.metadata, self.count, self.seen = metadata, count, []

    def replay(self):
        for step in range(self.count):
            if step:
                self.metadata.record_next()
            else:
                self.metadata.record()
            self.metadata.forget_step()  # as a graph's kernels, which keep nothing of the replay before
            self.seen.append(fields_of(self.metadata))

    def take(self):
        """What the steps since the last call saw."""
        seen, self.seen = self.seen, []
        return seen


class AheadEngine:
    def __init__(self, seed, *, groups="one", kernels="cython", depth=2, new_graph=Calls, backend=None, **options):
        self.rng = np.random.default_rng(seed)
        self.groups, self.next_name, self.next_block = GROUPS[groups], 0, 1
        options = {"max_num_batched_tokens": 64, "depth": depth} | options
        own = {"groups": self.groups, "max_encoder_len": 20 if groups == "cross" else None}
        self.batches = [InputBatch(max_num_reqs=6, max_model_len=MAX_LEN, kernels=kernels, **own) for _ in range(2)]
        self.batch = self.batches[0]
        self.builder = MetadataBuilder(self.batch, backend, **options)
        self.each = MetadataBuilder(self.batches[1], max_num_batched_tokens=64)
        self.graphs = {}
        for size in SIZES:
            metadata = self.builder.capture(size)
            self.each.capture(size)
            for count in (1, 2, 4):
                self.graphs[size, count] = new_graph(metadata, count)
                self.graphs[size, count].replay()
                self.graphs[size, count].take()
        self.steps = 0

    def both(self, method, *args):
        found = [getattr(batch, method)(*args) for batch in self.batches]
        assert found[0] == found[1]
        return found[0]

    def blocks(self, tokens):
        """Blocks for so many tokens in each group, of its own numbers."""
        found = {}
        for group in self.groups:
            count = -(-tokens // group.block_size) if not group.cross else 0
            found[group.name] = list(range(self.next_block, self.next_block + count))
            self.next_block += count
        return found

    def give_blocks(self, tokens):
        """So that every request can run ``tokens`` more, as far as the longest sequence."""
        for req_id in self.batch.req_ids:
            held, wanted = self.batch.block_ids(req_id), self.batch.num_computed_tokens(req_id) + tokens
            more = {}
            for group in self.groups:
                count = -(-min(wanted, MAX_LEN) // group.block_size) - len(held[group.name])
                if count > 0 and not group.cross:
                    more[group.name] = list(range(self.next_block, self.next_block + count))
                    self.next_block += count
            if more:
                self.both("append_blocks", req_id, more)

    def churn(self):
        """Requests join and leave, or lose their blocks."""
        rng = self.rng
        for req_id in list(self.batch.req_ids):
            if self.batch.num_computed_tokens(req_id) > MAX_LEN - 12 or rng.random() < 0.08:
                self.both("remove_request", req_id)
            elif rng.random() < 0.05:
                self.both("preempt", req_id)
        while len(self.batch) < 6 and rng.random() < 0.5:
            computed = int(rng.integers(0, MAX_LEN - 30))
            self.both("add_request", self.next_name, self.blocks(computed), computed)
            self.next_name += 1
        if len(self.batch) > 1 and rng.random() < 0.05:
            self.both("swap_rows", 0, self.batch.num_rows - 1)

    def turn(self):
        """Some steps ahead, or one of another kind."""
        rng = self.rng
        self.churn()
        if rng.random() < 0.3:
            self.step()
            return
        count = int(rng.integers(1, 9))
        self.give_blocks(count)
        resting = {req_id: 0 for req_id in self.batch.req_ids if rng.random() < 0.1}
        running = len(self.batch) - len(resting.keys() | set())
        size = next(size for size in SIZES if size >= running)
        steps = self.builder.run_ahead(count, bucket=size, scheduled=resting)
        assert len(steps) == steps.left == count
        until = int(rng.integers(0, count + 1)) if rng.random() < 0.3 else count
        seen = self.replay(steps, size, until)
        if until < count and rng.random() < 0.5 and seen:
            self.both("rollback_many", {})
        if until < count or rng.random() < 0.2:
            assert steps.stop() == until == len(steps)
        for index in range(until):
            expected = self.each.build(resting, bucket=size)
            assert seen[index] == fields_of(expected), (self.steps, index)
            asked = steps[index]
            assert fields_of(asked) == fields_of(expected)
            for group, of_group in expected.groups.items():
                found = {name: getattr(asked.groups[group], name) for name in COUNTS}
                assert found == {name: getattr(of_group, name) for name in COUNTS}
            assert asked.req_ids == expected.req_ids
            self.steps += 1
        self.end_some(until)

    def replay(self, steps, size, until):
        """Replays graphs of some steps each, until so many have run; what each of these saw."""
        seen = []
        while steps.launched < until:
            most = until - steps.launched
            count = int(self.rng.choice([count for count in (1, 2, 4) if count <= most]))
            graph = self.graphs[size, count]
            if count == 1 and self.rng.random() < 0.5:
                steps.first.replay(graph)
            else:
                steps.replay(graph, count)
            seen += graph.take()
        return seen

    def end_some(self, ran):
        """Requests that ended, or whose tokens were not accepted, in the middle of the steps."""
        back = {}
        for req_id in self.batch.req_ids:
            most = min(self.batch.num_computed_tokens(req_id), ran)
            if most and self.rng.random() < 0.2:
                back[req_id] = int(self.rng.integers(1, most + 1))
        self.both("rollback_many", back)

    def step(self):
        """A step with chunks of prompts, or of one token each, with a graph or without."""
        rng = self.rng
        queries = {req_id: int(rng.integers(0, 6)) for req_id in self.batch.req_ids if rng.random() < 0.5}
        self.give_blocks(6)
        for req_id in self.batch.req_ids:
            room = MAX_LEN - self.batch.num_computed_tokens(req_id)
            queries[req_id] = min(queries.get(req_id, 1), room)
        plain = all(count <= 1 for count in queries.values())
        size = next(size for size in SIZES if size >= sum(queries.values())) if plain and rng.random() < 0.7 else None
        metadata, expected = self.builder.build(queries, bucket=size), self.each.build(queries, bucket=size)
        if size is not None:
            metadata.replay(self.graphs[size, 1])
            assert self.graphs[size, 1].take() == [fields_of(expected)]
        else:
            assert fields_of(metadata) == fields_of(expected)
        self.steps += 1
