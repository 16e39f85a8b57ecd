"""Shared prefixes against a search of all groups, and the two passes against dense attention."""

import itertools

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore.builder import CascadeRule, SharedPrefix, count_common_blocks, find_shared_prefix, plan_cascade
from attncore.dense import dense_attention
from attncore.merge import merge_attention

ANY = CascadeRule(2, 1, 0.0)


def common(rows):
    """How many leading entries all rows share."""
    count = 0
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


def best_saving(rows, rule, block_size, total):
    """The most keys that any group of rows (of usable blocks) can save by the rule, 0 where none pays."""
    best = 0
    for size in range(rule.min_requests, len(rows) + 1):
        for group in itertools.combinations(rows, size):
            tokens = common(group) * block_size
            if tokens >= rule.min_prefix_tokens:
                best = max(best, (size - 1) * tokens)
    return best if best >= rule.min_saving * total else 0


@st.composite
def tables(draw):
    block_size = draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=1, max_size=7))
    contexts = [draw(st.integers(0, 5 * block_size)) for _ in rows]
    return rows, contexts, block_size, draw(st.sampled_from([None, 0]))


def usable(rows, contexts, block_size, null_block):
    found = [row[: context // block_size] for row, context in zip(rows, contexts, strict=True)]
    if null_block is None:
        return found
    return [list(itertools.takewhile(lambda block: block != null_block, row)) for row in found]


rules = st.builds(CascadeRule, st.integers(2, 4), st.integers(1, 8), st.sampled_from([0.0, 0.1, 0.5]))


@settings(max_examples=300, deadline=None)
@given(batch=tables(), rule=rules)
def test_the_group_found_saves_the_most(batch, rule):
    rows, contexts, block_size, null_block = batch
    held = usable(rows, contexts, block_size, null_block)
    assert count_common_blocks(rows, contexts, block_size, null_block=null_block) == common(held)
    shared = find_shared_prefix(rows, contexts, block_size, rule, null_block=null_block)
    best = best_saving(held, rule, block_size, sum(contexts))
    if shared is None:
        assert best == 0
        return
    assert (len(shared.rows) - 1) * shared.num_tokens == best
    assert shared.num_tokens == shared.num_blocks * block_size >= rule.min_prefix_tokens
    assert len(shared.rows) >= rule.min_requests
    assert shared.rows.tolist() == sorted(set(shared.rows.tolist()))
    assert common([held[row] for row in shared.rows]) >= shared.num_blocks


def test_of_two_groups_the_one_that_saves_more():
    rows = [[7, 8, 9, 1], [5, 6, 2, 1], [7, 8, 9, 3], [5, 6, 4, 2], [5, 6, 8, 8]]
    shared = find_shared_prefix(rows, [16] * 5, 4, ANY)
    assert (shared.rows.tolist(), shared.num_blocks, shared.num_tokens) == ([1, 3, 4], 2, 8)
    shared = find_shared_prefix(rows, [16] * 5, 4, CascadeRule(2, 9, 0.0))
    assert (shared.rows.tolist(), shared.num_blocks) == ([0, 2], 3)
    assert find_shared_prefix(rows, [16] * 5, 4, CascadeRule(2, 9, 0.5)) is None
    assert find_shared_prefix(rows, [16] * 5, 4) is None  # five requests are too few for the rule
    assert find_shared_prefix([[0] * 300] * 8, [300] * 8, 1, null_block=0) is None
    assert find_shared_prefix([[0] * 300] * 8, [300] * 8, 1).num_tokens == 300


def test_a_partly_filled_block_is_in_no_prefix():
    assert count_common_blocks([[3, 4], [3, 4]], [8, 7], 4) == 1
    assert count_common_blocks(np.zeros((0, 4), int), [], 4) == 0


def test_lengths_are_read_once():
    """A tensor is read as the array that it is; an array of another class may say another sum."""

    class Sums(np.ndarray):
        def sum(self, *_, **__):
            return 2**40

    table, lens = np.tile(np.arange(1, 40, dtype=np.int32), (10, 1)), np.full(10, 500, np.int32)
    wanted = find_shared_prefix(table, lens, 16)
    assert wanted is not None
    for given_lens in (torch.from_numpy(lens), lens.view(Sums), lens.tolist()):
        assert find_shared_prefix(table, given_lens, 16).num_tokens == wanted.num_tokens


def test_two_passes_merged_are_the_whole():
    torch.manual_seed(1)
    block_size, shared_blocks = 4, [9, 3, 6]
    query_lens, contexts = [1, 5, 2, 3], [17, 12, 6, 21]
    lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
    table = np.zeros((4, 6), np.int32)
    free = iter(range(10, 40))
    for row, length in enumerate(lens):
        first = shared_blocks if row != 2 else []
        rest = oracles.cdiv(length, block_size) - len(first)
        table[row, : len(first) + rest] = first + [next(free) for _ in range(rest)]
    keys, values = torch.randn(40 * block_size, 2, 8), torch.randn(40 * block_size, 2, 8)
    query = torch.randn(sum(query_lens), 4, 8)

    shared = find_shared_prefix(table, contexts, block_size, ANY)
    assert (shared.rows.tolist(), shared.num_blocks) == ([0, 1, 3], 3)
    before = table.copy()
    cascade = plan_cascade(shared, table, query_lens, lens)
    assert (table == before).all()
    assert cascade.token_indices.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10]
    assert cascade.suffix.seq_lens.tolist() == [6, 5, 8, 12]
    assert cascade.suffix.block_table.tolist() == [
        [*row[3:], 0, 0, 0] if index != 2 else row for index, row in enumerate(table.tolist())
    ]
    assert (cascade.prefix.causal, cascade.suffix.causal) == (False, True)

    def run(attention_pass, tokens):
        """One pass, a request at a time, by its own arrays; every query of the first comes after all keys."""
        outputs, lses = [], []
        starts = attention_pass.query_start_loc.tolist()
        assert attention_pass.seq_start_loc.tolist() == oracles.sums(attention_pass.seq_lens.tolist())
        for row, length in enumerate(attention_pass.seq_lens.tolist()):
            slots = oracles.slots_of(attention_pass.block_table[row].tolist(), 0, length, block_size)
            for part in [tokens[starts[row] : starts[row + 1]]] if attention_pass.causal else tokens.split(1):
                output, lse = dense_attention(
                    part, keys[slots], values[slots], scale=0.3, causal=attention_pass.causal, return_lse=True
                )
                outputs.append(output)
                lses.append(lse)
        return torch.cat(outputs), torch.cat(lses)

    output, lse = run(cascade.suffix, query)
    tokens = torch.from_numpy(cascade.token_indices)
    prefix = run(cascade.prefix, query[tokens])
    output[tokens], lse[tokens] = merge_attention([prefix[0], output[tokens]], [prefix[1], lse[tokens]])
    for row, (start, stop) in enumerate(itertools.pairwise(oracles.sums(query_lens))):
        slots = oracles.slots_of(table[row].tolist(), 0, lens[row], block_size)
        torch.testing.assert_close(
            output[start:stop], dense_attention(query[start:stop], keys[slots], values[slots], scale=0.3)
        )


TABLE = [[1, 2, 3], [1, 2, 4]]


def shared(rows=(0, 1), num_blocks=2, num_tokens=8):
    return SharedPrefix(np.array(rows), num_blocks, num_tokens)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: count_common_blocks(TABLE, [1], 4), "block_table: 2 rows for 1 request"),
        (
            lambda: count_common_blocks(TABLE, [1, 16], 4),
            "block_table: row 1 holds 3 blocks but its 16 tokens of context",
        ),
        (lambda: count_common_blocks(TABLE, [1, 1], 0), "block_size: 0 is below 1"),
        (lambda: count_common_blocks(TABLE, [1, -1], 4), "context_lens: -1 at index 1"),
        (lambda: find_shared_prefix(TABLE, [8, 8], 4, CascadeRule(min_requests=1)), "rule.min_requests: 1 is below 2"),
        (lambda: find_shared_prefix(TABLE, [8, 8], 4, CascadeRule(2, 0)), "rule.min_prefix_tokens: 0 is below 1"),
        (lambda: find_shared_prefix(TABLE, [8, 8], 4, CascadeRule(2, 1, 1.5)), "rule.min_saving: 1.5 is outside 0"),
        (lambda: plan_cascade(shared((0, 2)), TABLE, [1, 1], [9, 9]), r"shared.rows: \[0, 2\] are not ascending rows"),
        (lambda: plan_cascade(shared((1, 0)), TABLE, [1, 1], [9, 9]), "shared.rows: "),
        (lambda: plan_cascade(shared((0.0, 1.0)), TABLE, [1, 1], [9, 9]), r"shared.rows: float64\[2\]"),
        (lambda: plan_cascade(shared(("0", "1")), TABLE, [1, 1], [9, 9]), r"shared.rows: <U1\[2\]"),
        (lambda: plan_cascade(shared(()), TABLE, [1, 1], [9, 9]), "shared.rows: "),
        (lambda: plan_cascade(shared(), TABLE, [1, 2], [9, 9]), "shared.num_tokens: 8 reach into the queries of row 1"),
        (lambda: plan_cascade(shared(num_tokens=7), TABLE, [1, 1], [9, 9]), "shared.num_tokens: 7 are not 2 whole"),
        (lambda: plan_cascade(shared(num_blocks=0), TABLE, [1, 1], [9, 9]), "shared.num_blocks: 0 is below 1"),
        (
            lambda: plan_cascade(shared(num_blocks=3, num_tokens=3), TABLE, [1, 1], [9, 9]),
            "shared.num_blocks: the rows",
        ),
        (
            lambda: plan_cascade(shared(num_blocks=4, num_tokens=4), TABLE, [1, 1], [9, 9]),
            "shared.num_blocks: the rows",
        ),
        (lambda: plan_cascade(shared(), TABLE, [1], [9, 9]), "seq_lens: 2 lengths for 1 request"),
    ],
)
def test_bad_input_names_its_argument(call, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        call()
