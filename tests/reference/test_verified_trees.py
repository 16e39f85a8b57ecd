"""What is kept of a draft tree is as if the batch had only ever had it: logits, caches, and the tokens of decoding."""

import numpy as np
import pytest
import torch
from reference.tiny_decoder import VOCABULARY, Runner, TinyDecoder

from attncore import graphs
from attncore.builder import KVCacheGroup

PROMPTS = {"a": [3, 1, 4, 1, 5, 9], "b": [2, 7, 1], "c": [8, 2, 8, 1, 8]}
TREES = {"a": [-1, -1, 1, 1, 3, 0], "b": [-1, -1, -1, 2], "c": [-1, 0, 1]}
PATHS = {"a": [1, 3, 4], "b": [2, 3], "c": [0, 1]}


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def started(**options):
    runner = Runner(TinyDecoder(1, layers=4), **options)
    for name, prompt in PROMPTS.items():
        runner.add(name, 60)
        runner.run({name: prompt})
    return runner


def drawn(trees, seed=0):
    random = np.random.default_rng(seed)
    return {name: random.integers(VOCABULARY, size=len(parents) + 1).tolist() for name, parents in trees.items()}


def of_path(values, path):
    return [values[0], *(values[draft + 1] for draft in path)]


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_a_kept_path_is_all_that_the_batch_ever_had(transport):
    """Beside it a batch that runs the accepted tokens alone, as a chain: the logits of the path are the same, and after
    the moves the caches, and the logits of further steps."""
    tree, chain = started(transport=transport), started(trees=False)
    tokens = drawn(TREES)
    in_tree = tree.run(tokens, TREES)
    in_chain = chain.run({name: of_path(tokens[name], path) for name, path in PATHS.items()})
    for name, path in PATHS.items():
        close(in_tree[name][[0, *(draft + 1 for draft in path)]], in_chain[name])
    moves = tree.keep(PATHS)
    assert [len(pairs) for pairs in moves.values()] == [5, 5]  # three of a, two of b, none of c, which is a chain
    for _ in range(3):
        for name in PROMPTS:
            assert tree.batch.num_computed_tokens(name) == chain.batch.num_computed_tokens(name)
            for found, wanted in zip(tree.cached(name), chain.cached(name), strict=True):
                close(found, wanted)
        more = {name: [5, 6] for name in PROMPTS}
        found, wanted = tree.run(more), chain.run(more)
        for name in PROMPTS:
            close(found[name], wanted[name])


def test_without_the_moves_it_is_another_cache():
    """That the test above can fail: siblings lie where the path belongs."""
    tree, chain = started(), started(trees=False)
    tokens = drawn(TREES)
    tree.run(tokens, TREES)
    chain.run({name: of_path(tokens[name], path) for name, path in PATHS.items()})
    tree.builder.keep_paths(PATHS)
    found, wanted = tree.run({"a": [5], "c": [5]}), chain.run({"a": [5], "c": [5]})
    close(found["c"], wanted["c"])
    assert not torch.allclose(found["a"], wanted["a"], atol=1e-2)


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_and_paths_step_after_step(seed):
    random = np.random.default_rng(seed)
    tree, chain = started(), started(trees=False)
    for _ in range(4):
        trees = {}
        for name in PROMPTS:
            drafts = int(random.integers(0, 9))
            trees[name] = [int(random.integers(-1, draft)) if draft else -1 for draft in range(drafts)]
        tokens = drawn(trees, seed)
        paths = {}
        for name, parents in trees.items():
            paths[name] = []
            while children := [draft for draft, parent in enumerate(parents) if parent == (paths[name] or [-1])[-1]]:
                if random.random() < 0.2:
                    break
                paths[name].append(int(random.choice(children)))
        found = tree.run(tokens, trees)
        wanted = chain.run({name: of_path(tokens[name], path) for name, path in paths.items()})
        for name, path in paths.items():
            close(found[name][[0, *(draft + 1 for draft in path)]], wanted[name])
        tree.keep(paths)
        tree.batch.release_passed_blocks()
        chain.batch.release_passed_blocks()
        seen = {name: tree.batch.num_computed_tokens(name) for name in PROMPTS}
        assert seen == {name: chain.batch.num_computed_tokens(name) for name in PROMPTS}


# Decoding with drafts, in the shape of EAGLE: a small model proposes a tree, the large one verifies it.


def greedy(decoder, prompts, count):
    """Plain greedy decoding."""
    runner = Runner(decoder, trees=False)
    for name in prompts:
        runner.add(name, 120)
    step, tokens = dict(prompts), {name: [] for name in prompts}
    for _ in range(count):
        for name, logits in runner.run(step).items():
            tokens[name].append(int(logits[-1].argmax()))
        step = {name: tokens[name][-1:] for name in prompts}
    return tokens


class Drafter:
    """Proposes trees: the ``width`` likeliest children of each of the likeliest tokens of a level.

    A mask is of one step's tokens, so each level runs the tree so far again, whose tokens are then taken back.
    """

    def __init__(self, decoder, prompts, *, width, depth):
        self.runner = Runner(decoder)
        self.width, self.depth = width, depth
        for name, prompt in prompts.items():
            self.runner.add(name, 120)
            self.runner.run({name: prompt})

    def accept(self, tokens):
        """Takes in tokens that were decoded, but the last of each request, which is the next tree's root."""
        if some := {name: given[:-1] for name, given in tokens.items() if len(given) > 1}:
            self.runner.run(some)

    def propose(self, roots):
        """Parents, and tokens with the root's, by request."""
        trees = {name: [] for name in roots}
        tokens = {name: [root] for name, root in roots.items()}
        leaves = {name: [-1] for name in roots}
        for _ in range(self.depth):
            logits = self.runner.run(tokens, trees)
            self.runner.batch.rollback_many({name: len(tokens[name]) for name in roots})
            for name, scores in logits.items():
                grown = []
                for leaf in leaves[name]:
                    for token in scores[leaf + 1].topk(self.width).indices.tolist():
                        grown.append(len(trees[name]))
                        trees[name].append(leaf)
                        tokens[name].append(token)
                leaves[name] = grown[: self.width]
        return trees, tokens


def verified(parents, tokens, logits):
    """The drafts that greedy decoding would have taken, and the token behind them."""
    path, wanted = [], int(logits[0].argmax())
    while True:
        last = path[-1] if path else -1
        children = [draft for draft, parent in enumerate(parents) if parent == last and tokens[draft + 1] == wanted]
        if not children:
            return path, wanted
        path.append(children[0])
        wanted = int(logits[children[0] + 1].argmax())


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_tokens_of_tree_drafts_are_those_of_plain_decoding(transport):
    """A target of three layers, a drafter of its first: every token is the target's own, in fewer steps."""
    decoder, small, count = TinyDecoder(5, layers=3), TinyDecoder(5, layers=3), 40
    small.layers = small.layers[:1]
    wanted = greedy(decoder, PROMPTS, count)
    target, drafter = Runner(decoder, transport=transport), Drafter(small, PROMPTS, width=3, depth=3)
    found = {}
    for name, prompt in PROMPTS.items():
        target.add(name, 120)
        found[name] = [int(target.run({name: prompt})[name][-1].argmax())]
    steps = moved = accepted = 0
    while running := {name: tokens[-1] for name, tokens in found.items() if len(tokens) < count}:
        trees, tokens = drafter.propose(running)
        assert all(len(parents) == 21 for parents in trees.values())
        paths, new = {}, {}
        for name, logits in target.run(tokens, trees).items():
            paths[name], behind = verified(trees[name], tokens[name], logits)
            new[name] = [*(tokens[name][draft + 1] for draft in paths[name]), behind]
            found[name] += new[name]
        moved += sum(map(len, target.keep(paths).values()))
        accepted += sum(map(len, paths.values()))
        steps += 1
        drafter.accept({name: [running[name], *new[name]] for name in running})
    assert {name: tokens[:count] for name, tokens in found.items()} == wanted
    assert steps < 0.8 * count
    assert accepted > 20
    assert moved > 10  # paths that were no chains


def test_trees_over_one_group_of_captured_size():
    """Uniform trees in the graph of a captured size, and the moves between replays."""
    groups = (KVCacheGroup("full", 4),)
    runner, plain = (started(groups=groups, trees=trees) for trees in (True, False))
    captured = runner.builder.capture(3, query_len=4)
    ids = torch.zeros(12, dtype=torch.int64)
    graph = graphs.new_graph("cpu")
    with graphs.capturing(graph):
        captured.record()
        logits = graphs.launch(runner.forward, ids, captured)
    for round_, paths in enumerate(({"a": [1], "b": [0, 2], "c": []}, {"a": [0, 2], "b": [1], "c": [0]})):
        trees = {name: [-1, -1, 0] for name in PROMPTS}
        tokens = drawn(trees, round_)
        metadata = runner.builder.build(trees=trees, bucket=3)
        ids.copy_(torch.tensor([one for name in metadata.req_ids for one in tokens[name]]))
        metadata.replay(graph)
        wanted = plain.run({name: of_path(tokens[name], path) for name, path in paths.items()})
        for row, name in enumerate(metadata.req_ids):
            close(logits[4 * row : 4 * row + 4][[0, *(draft + 1 for draft in paths[name])]], wanted[name])
        runner.keep(paths)
