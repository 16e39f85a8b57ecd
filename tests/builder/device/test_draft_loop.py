"""The loop of a drafting model: k steps ahead over a builder of its own, then one step that verifies what they drafted.

The models are functions of a token and its position, so that what is spoken is known without a cache.
"""

import random

import numpy as np
import pytest
import torch

from attncore import InputBatch, MetadataBuilder
from attncore.graphs import capturing, new_graph

DRAFTS, ROWS, BLOCK, LEN = 3, 4, 4, 96
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def target(token, position):
    return (token * 7 + position) % 1000


def drafter(token, position):
    """Agrees with the target at two positions of three."""
    return (token * 7 + position + (position % 3 == 2)) % 1000


class Side:
    """A batch and a builder over it: the target's, or the drafter's; ``inputs`` has the tokens of a request's step."""

    def __init__(self, device, kernels):
        backend = None
        if device == "cuda":
            from builder.device.test_run_ahead_gpu import on_cuda

            backend = on_cuda(BLOCK, {"paged_kv_indices", "seq_lens"})
        self.batch = InputBatch(max_num_reqs=ROWS, max_model_len=LEN, block_size=BLOCK, kernels=kernels)
        options = {"transport": "copy"} if device == "cpu" else {}
        self.builder = MetadataBuilder(self.batch, backend, max_num_batched_tokens=64, **options)
        self.inputs = {}
        self.builder.register_field("input_ids", np.int64, "token", self._fill)

    def _fill(self, metadata, out):
        tokens = [token for req_id in metadata.req_ids for token in self.inputs.get(req_id, ())]
        out[: len(tokens)] = tokens


class DraftGraph:
    """DRAFTS steps of the drafter: one graph on a GPU, what it would run on a CPU."""

    def __init__(self, side, device, *, goes_on=True):
        self.goes_on = goes_on
        self.metadata = side.builder.capture(ROWS)
        self.drafts = torch.zeros((DRAFTS, ROWS), dtype=torch.int64, device=device)
        self.seen = torch.zeros_like(self.drafts)
        self.device = device
        if device == "cuda":
            torch.cuda.synchronize()
            with capturing(new_graph(device)) as self.graph:
                self._run()

    def _run(self):
        step = self.metadata
        for index in range(DRAFTS):
            if index and self.goes_on:
                step.record_next()
            else:
                step.record()
            if self.device == "cpu":
                step.forget_step()
            ids, slots = torch.as_tensor(step.input_ids), torch.as_tensor(step.slot_mapping)
            sampled = drafter(ids, torch.as_tensor(step.positions))
            self.drafts[index] = sampled
            self.seen[index] = slots
            ids.copy_(sampled)  # the next input

    def replay(self):
        if self.device == "cuda":
            self.graph.replay()
        else:
            self._run()


class Speculative:
    """An engine of two models: what was spoken, and the two sides, whose requests have blocks of their own."""

    def __init__(self, device, kernels="cython"):
        self.target, self.drafter = Side(device, kernels), Side(device, kernels)
        self.graph = DraftGraph(self.drafter, device)
        self.spoken, self.prompts, self.accepted, self.drafted = {}, {}, 0, 0

    def add(self, name, prompt):
        count = LEN // BLOCK
        for side in (self.target, self.drafter):
            side.batch.add_request(name, range(1 + name * count, 1 + (name + 1) * count), len(prompt) - 1)
        self.spoken[name], self.prompts[name] = list(prompt), len(prompt)

    def remove(self, name):
        for side in (self.target, self.drafter):
            side.batch.remove_request(name)
        return self.spoken.pop(name), self.prompts.pop(name) - 1

    def draft(self):
        """Each request's drafts, by one replay; the slots are those of its tokens one behind the other."""
        self.drafter.inputs = {name: [said[-1]] for name, said in self.spoken.items()}
        steps = self.drafter.builder.run_ahead(DRAFTS, bucket=ROWS)
        names = steps.first.req_ids
        steps.replay(self.graph, DRAFTS)
        slots = self.graph.seen.T.tolist()
        for name, found in zip(names, slots, strict=False):
            start, first = len(self.spoken[name]) - 1, (1 + name * (LEN // BLOCK)) * BLOCK
            assert found == [first + start + index for index in range(DRAFTS)]
        assert all(found == [-1] * DRAFTS for found in slots[len(names) :])
        return dict(zip(names, self.graph.drafts.T.tolist(), strict=False))

    def verify(self, drafts):
        """One step of the target over the last token and the drafts; how many of each request it agrees with."""
        self.target.inputs = {name: [said[-1], *drafts[name]] for name, said in self.spoken.items()}
        metadata = self.target.builder.build(query_len=1 + DRAFTS)
        answers = target(torch.as_tensor(metadata.input_ids), torch.as_tensor(metadata.positions)).tolist()
        kept = {}
        for row, name in enumerate(metadata.req_ids):
            said = answers[row * (1 + DRAFTS) :][: 1 + DRAFTS]
            agreed = [draft == answer for draft, answer in zip(drafts[name], said, strict=False)]
            kept[name] = [*agreed, False].index(False)
            self.spoken[name] += said[: kept[name] + 1]
        self.accepted += sum(kept.values())
        self.drafted += DRAFTS * len(kept)
        return kept

    def turn(self):
        drafts = self.draft()
        kept = self.verify(drafts)
        self.target.batch.rollback_many({name: DRAFTS - count for name, count in kept.items()})
        # The drafter has run the last token and all drafts but the last, whose keys it lacks where all were accepted.
        self.drafter.batch.rollback_many({name: max(DRAFTS - 1 - count, 0) for name, count in kept.items()})
        lacking = {name for name, count in kept.items() if count == DRAFTS}
        if lacking:
            self.drafter.inputs = {name: [self.spoken[name][-2]] for name in lacking}
            self.drafter.builder.build({name: int(name in lacking) for name in kept})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_spoken_is_the_targets_own(device, seed):
    """However many drafts were accepted, beside requests that come and go."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    draw, engine, spoken = random.Random(seed), Speculative(device), 0
    for name in range(60):
        if len(engine.spoken) == ROWS:
            gone = min(engine.spoken)
            said, start = engine.remove(gone)
            for position in range(start, len(said) - 1):
                assert said[position + 1] == target(said[position], position)
            spoken += len(said) - 1 - start
        engine.add(name, [draw.randrange(1000) for _ in range(draw.randrange(1, 20))])
        for _ in range(draw.randrange(1, 5)):
            engine.turn()
    assert spoken > 150
    assert 0.3 < engine.accepted / engine.drafted < 0.9


def test_drafts_of_a_graph_that_does_not_go_on_are_found_out():
    """The control: without ``record_next`` each of the steps is the first one."""
    engine = Speculative("cpu")
    engine.graph = DraftGraph(engine.drafter, "cpu", goes_on=False)
    engine.add(0, [1, 2, 3])
    with pytest.raises(AssertionError):
        engine.draft()
