"""Compiled layers of a model over two KV-cache groups: full and windowed layers, whose blocks are not the same ones."""

from collections import deque

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from integrations.models import decoder, greedy  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from attncore import InputBatch, KVCacheGroup, MetadataBuilder  # noqa: E402
from attncore.integrations.transformers import (  # noqa: E402
    attention_layers,
    attncore_context,
    compile_layers,
    paged_caches,
    select_for_model,
)

PROMPTS = [list(range(3, 3 + length)) for length in (20, 1, 40, 9)]
NEW, BLOCK, NUM_BLOCKS = 6, 4, 64


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class TwoGroups:
    """Greedy completions. Blocks that a window has passed are written again, for whoever needs the next one."""

    def __init__(self, model):
        self.model, layers = model.eval(), attention_layers(model)
        self.group_of = {one.name: "full" if one.sliding_window is None else "window" for one in layers}
        self.window = max(one.sliding_window or 0 for one in layers)
        self.backend = select_for_model(model, layers=layers, block_size=BLOCK, backend="reference").create()
        self.caches = paged_caches(model, self.backend, NUM_BLOCKS, layers=layers)
        self.reused = 0
        model.set_attn_implementation("attncore")

    def complete(self, prompts, chunk=8):
        """A request arrives in each step; it runs up to ``chunk`` tokens of its prompt in one, and ``NEW`` new ones."""
        groups = [KVCacheGroup("full", BLOCK), KVCacheGroup("window", BLOCK, sliding_window=self.window)]
        batch = InputBatch(max_num_reqs=len(prompts), max_model_len=64, groups=groups)
        builder = MetadataBuilder(batch, self.backend, max_num_batched_tokens=64)
        free, passed = {"full": [*range(1, NUM_BLOCKS)], "window": [*range(NUM_BLOCKS - 1, 0, -1)]}, set()
        waiting, running, said = deque(range(len(prompts))), {}, {}
        while waiting or running:
            if waiting:
                row = waiting.popleft()
                running[row] = [*prompts[row]]
                batch.add_request(row, {name: [ids.pop()] for name, ids in free.items()})
            counts = {}
            for row, tokens in running.items():
                computed = batch.num_computed_tokens(row)
                counts[row] = min(chunk, len(tokens) - computed)
                missing = -(-(computed + counts[row]) // BLOCK) - len(batch.block_ids(row)["full"])
                if missing > 0:
                    blocks = {name: [ids.pop() for _ in range(missing)] for name, ids in free.items()}
                    batch.append_blocks(row, blocks)
                    self.reused += len(passed.intersection(blocks["window"]))
            for row, token in self._step(builder, batch, running, counts):
                if batch.num_computed_tokens(row) == len(running[row]):
                    running[row].append(token)
            for blocks in batch.release_passed_blocks().values():
                free["window"] += blocks["window"]
                passed.update(blocks["window"])
            for row in [row for row, tokens in running.items() if len(tokens) == len(prompts[row]) + NEW]:
                said[row] = running.pop(row)[len(prompts[row]) :]
                for name, ids in batch.remove_request(row).items():
                    free[name] += filter(None, ids)
        builder.close()
        return [said[row] for row in range(len(prompts))]

    @torch.inference_mode()
    def _step(self, builder, batch, running, counts):
        """The next token of each row; a model's layers see the step as their group does."""
        starts = {row: batch.num_computed_tokens(row) for row in counts}
        step = builder.build(counts)
        ids = [token for row in step.req_ids for token in running[row][starts[row] : starts[row] + counts[row]]]
        by_layer = {name: step.groups[group] for name, group in self.group_of.items()}
        given = {"position_ids": step.positions[None], "logits_to_keep": step.logits_indices}
        with attncore_context(by_layer, self.caches):
            logits = self.model(torch.tensor([ids]), use_cache=False, **given).logits[0]
        return zip(step.req_ids, logits.argmax(1).tolist(), strict=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # which inductor calls
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gemma2", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_compiled_layers_of_two_groups_say_what_eager_ones_say(name, compiler):
    model = decoder(name, num_hidden_layers=4)
    expected = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    grouped = TwoGroups(model)
    assert sorted(grouped.group_of.values()) == ["full", "full", "window", "window"]
    assert grouped.complete(PROMPTS) == expected
    assert grouped.reused > 4
    compile_layers(model, grouped.caches, backend=compiler)
    assert counters["stats"]["unique_graphs"] == 2
    for cache in grouped.caches.values():
        cache.fill_(7)
    assert grouped.complete(PROMPTS) == expected
    assert grouped.complete(PROMPTS[2:3], chunk=5) == expected[2:3]
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
