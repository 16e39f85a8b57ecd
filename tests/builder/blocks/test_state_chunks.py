"""Chunks of recurrent layers: each token in one, each of one request, and the same however a prompt is divided."""

import itertools

import numpy as np
import pytest

from attncore.builder import StateChunks, state_chunks


def oracle(query_lens, chunk_size, context_lens=None):
    """(row, number of the chunk, tokens) of each chunk, a token at a time."""
    found, token = [], 0
    for row, query_len in enumerate(query_lens):
        number, position = -1, 0 if context_lens is None else context_lens[row]
        for k in range(query_len):
            if k == 0 or (position + k) % chunk_size == 0:
                number += 1
                found.append((row, number, []))
            found[-1][2].append(token)
            token += 1
    return found


def as_lists(chunks):
    starts = chunks.chunk_start_loc.tolist()
    tokens = [list(range(start, stop)) for start, stop in itertools.pairwise(starts)]
    return list(zip(chunks.chunk_to_req.tolist(), chunks.chunk_index.tolist(), tokens, strict=True))


def test_chunks_are_those_of_an_oracle():
    rng = np.random.default_rng(3)
    for _ in range(300):
        n, size = int(rng.integers(0, 6)), int(rng.integers(1, 9))
        lens, contexts = rng.integers(0, 30, n), rng.integers(0, 20, n)
        for context_lens in (None, contexts):
            chunks = state_chunks(lens, size, context_lens)
            assert as_lists(chunks) == oracle(lens.tolist(), size, context_lens)
            assert {array.dtype for array in chunks} == {np.dtype(np.int32)}
            counts = np.bincount(chunks.chunk_to_req, minlength=n) if n else []
            assert chunks.req_start_loc.tolist() == [0, *np.cumsum(counts).tolist()]


def test_a_divided_prompt_has_the_chunks_of_the_whole():
    whole = state_chunks([30], 8).chunk_start_loc.tolist()
    parts = {int(start) + first for first, count in ((0, 11), (11, 2), (13, 17))
             for start in state_chunks([count], 8, [first]).chunk_start_loc[:-1]}  # fmt: skip
    assert set(whole[:-1]) <= parts
    assert parts - set(whole) == {11, 13}


def test_no_request_and_no_token():
    empty = state_chunks([], 4)
    assert isinstance(empty, StateChunks)
    assert empty.req_start_loc.tolist() == empty.chunk_start_loc.tolist() == [0]
    assert as_lists(state_chunks([0, 0], 4)) == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (([1], 0), "chunk_size: 0 is below 1"),
        (([-1], 4), "query_lens"),
        (([1, 2], 4, [1]), "context_lens: 1 given, but query_lens has 2"),
        (([1 << 30], 4), "query_lens"),
    ],
)
def test_mistakes(given, text):
    with pytest.raises(ValueError, match=text):
        state_chunks(*given)
