"""AdoptedRows: both kernels agree on any input, an engine's nonsense too, and write nothing outside their arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore.kernels import codes, load_kernels

ROWS, TOKENS, BLOCK, MODEL_LEN = 6, 40, 4, 50
CANARY = -77
ONE_LONGER = ("query_start_loc", "seq_start_loc", "paged_kv_indptr", "_starts")
OTHERS = ("query_lens", "logits_indices", "seq_lens", "context_lens", "paged_kv_last_page_len", "_lengths")
SCRATCH = ("_starts", "_lengths")


class Rows:
    """Arrays in the middle of larger ones, so that a write outside is seen."""

    def __init__(self, kernels, decode_threshold=1, pad_seq_len=0):
        self.whole = {
            name: np.full(ROWS + 21, CANARY, np.int32) for names in (ONE_LONGER, OTHERS) for name in names
        }  # fmt: skip
        fields = {name: array[10 : 10 + ROWS + (name in ONE_LONGER)] for name, array in self.whole.items()}
        self.fields = fields
        self.rows = load_kernels(kernels).AdoptedRows(
            fields, ROWS, TOKENS, BLOCK, MODEL_LEN, decode_threshold, pad_seq_len
        )

    def fill(self, starts, lengths, slots=TOKENS, columns=20, query_len=0, uniform=True, capturing=False):
        starts = np.asarray(starts, np.int32)
        lengths = None if lengths is None else np.asarray(lengths, np.int32)
        return self.rows.fill(starts, lengths, slots, columns, query_len, uniform, capturing)

    def untouched(self):
        edges = (np.r_[array[:10], array[10 + len(self.fields[name]) :]] for name, array in self.whole.items())
        return all((edge == CANARY).all() for edge in edges)

    def written(self):
        return {name: array.tolist() for name, array in self.fields.items() if name not in SCRATCH}


def small_or_huge(low, high):
    return st.one_of(st.integers(low, high), st.sampled_from([-(2**31), -1, 2**31 - 1, 2**31 - 2, 2**30]))


@st.composite
def right_steps(draw):
    query_lens = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 3, 5]), max_size=ROWS))
    lengths = [query_len + draw(st.integers(0, 30)) for query_len in query_lens]
    return np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32), lengths


wrong_steps = st.tuples(
    st.lists(small_or_huge(0, 12), max_size=ROWS + 3), st.lists(small_or_huge(0, 60), max_size=ROWS + 2)
)


@settings(max_examples=400, deadline=None)
@given(
    step=st.one_of(right_steps(), wrong_steps),
    known=st.booleans(),
    slots=st.sampled_from([0, 3, 4, 6, 8, 40]),
    columns=st.sampled_from([0, 3, 13, 2**40]),
    query_len=st.integers(0, 3),
    uniform=st.booleans(),
    capturing=st.booleans(),
    threshold=st.integers(1, 3),
    pad=st.integers(0, 1),
)
def test_both_kernels_agree_on_any_input(step, known, slots, columns, query_len, uniform, capturing, threshold, pad):
    both = [Rows(kernels, threshold, pad) for kernels in ("cython", "numba")]
    starts, lengths = step
    rest = (lengths if known else None, slots, columns, query_len, uniform, capturing)
    answers = [rows.fill(starts, *rest) for rows in both]
    assert answers[0] == answers[1]
    assert all(rows.untouched() for rows in both)
    assert both[0].written() == both[1].written()
    if isinstance(answers[0], tuple):  # refused: nothing was written
        assert {value for array in both[0].written().values() for value in array} == {CANARY}


def test_a_mixed_step(kernels):
    rows = Rows(kernels)
    counts = rows.fill([0, 1, 2, 7], [5, 9, 8], slots=7)
    wanted = {"num_decodes": 2, "num_decode_tokens": 2, "num_prefills": 1, "num_prefill_tokens": 5, "max_seq_len": 9}
    assert counts == {
        "num_reqs": 3, "num_tokens": 7, "max_query_len": 5, "max_prefill_seq_len": 8, "max_decode_seq_len": 9,
        "max_decode_query_len": 1, "use_cuda_graph": False, "num_actual_reqs": 3, "num_actual_tokens": 7,
    } | wanted  # fmt: skip
    fields = {name: array[: 3 + (name in ONE_LONGER)].tolist() for name, array in rows.fields.items()}
    assert fields["context_lens"] == [4, 8, 3]
    assert fields["seq_start_loc"] == [0, 5, 14, 22]
    assert fields["paged_kv_indptr"] == [0, 2, 5, 7]
    assert fields["paged_kv_last_page_len"] == [1, 1, 4]
    assert fields["logits_indices"] == [0, 1, 6]


@pytest.mark.parametrize(
    ("query_lens", "threshold", "decodes"),
    [([1, 1, 3], 1, 2), ([1, 2, 1], 1, 1), ([2, 1, 3, 1], 2, 2), ([1, 0, 1], 1, 1), ([3, 1], 1, 0), ([1, 0, 0], 1, 1)],
)
def test_rows_behind_the_first_longer_one_are_prefills(kernels, query_lens, threshold, decodes):
    counts = Rows(kernels, threshold).fill(np.cumsum([0, *query_lens]), np.add(query_lens, 4))
    rows = len(query_lens) - (query_lens[-2:] == [0, 0]) * 2
    assert (counts["num_reqs"], counts["num_decodes"], counts["num_prefills"]) == (rows, decodes, rows - decodes)


def test_a_captured_size_keeps_the_padding(kernels):
    counts = Rows(kernels).fill([0, 1, 2, 2, 2], [5, 9, 0, 0], slots=4, query_len=1)
    assert counts["use_cuda_graph"]
    assert (counts["num_reqs"], counts["num_tokens"], counts["num_decode_tokens"]) == (4, 4, 4)
    assert (counts["num_actual_reqs"], counts["num_actual_tokens"], counts["num_decodes"]) == (2, 2, 2)


def test_padded_rows_are_lent_the_keys_that_a_backend_must_have(kernels):
    rows = Rows(kernels, pad_seq_len=1)
    assert rows.fill([0, 1, 1, 1], [5, 0, 3], slots=3, query_len=1)["num_actual_reqs"] == 1
    fields = {name: array[: 3 + (name in ONE_LONGER)].tolist() for name, array in rows.fields.items()}
    assert (fields["seq_lens"], fields["context_lens"]) == ([5, 1, 3], [4, 0, 0])
    assert (fields["seq_start_loc"], fields["paged_kv_indptr"]) == ([0, 5, 6, 9], [0, 2, 3, 4])
    rows.fill([0, 3, 3], [5, 0])
    assert rows.fields["seq_lens"][:2].tolist() == [5, 1], "of an eager step they are cut off"


REFUSED = {
    codes.TOO_MANY_ROWS: ([0] * (ROWS + 2), [0] * (ROWS + 1), {}),
    codes.STARTS_NOT_AT_0: ([1, 2], [4], {}),
    codes.STARTS_FALL: ([0, 2, 1], [4, 4], {}),
    codes.TOO_MANY_TOKENS: ([0, TOKENS + 1], [50], {"slots": 99}),
    codes.TOO_FEW_SLOTS: ([0, 5], [5], {"slots": 4}),
    codes.TOO_SHORT: ([0, 5], [4], {}),
    codes.TOO_LONG: ([0, 1], [MODEL_LEN + 1], {}),
    codes.BEYOND_TABLE: ([0, 1], [9], {"columns": 2}),
    codes.SLOTS_NOT_PADDED: ([0, 1, 1], [4, 0], {"slots": 1, "query_len": 1}),
    codes.QUERY_NOT_CAPTURED: ([0, 2, 3], [4, 4], {"slots": 4, "query_len": 2, "capturing": True}),
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_is_refused_is_not_written(kernels, code):
    rows = Rows(kernels)
    starts, lengths, rest = REFUSED[code]
    assert rows.fill(starts, lengths, **rest)[0] == code
    assert {value for array in rows.written().values() for value in array} == {CANARY}


def test_a_sum_that_does_not_fit_is_refused(kernels):
    fields = {name: np.zeros(9, np.int32) for name in (*ONE_LONGER, *OTHERS)}
    rows = load_kernels(kernels).AdoptedRows(fields, 8, 8, 1, 2**31 - 1, 1, 0)
    lengths = np.array([2**30, 2**30], np.int32)
    answer = rows.fill(np.array([0, 1, 2], np.int32), lengths, 2, 2**31 - 1, 0, True, False)
    assert answer[0] == codes.TOO_MANY_SEQ_TOKENS


def test_arrays_that_are_too_short_are_refused(kernels):
    fields = {name: np.zeros(8, np.int32) for name in (*ONE_LONGER, *OTHERS)}
    with pytest.raises(ValueError, match=": 8 elements, and a step of this arena writes 9"):
        load_kernels(kernels).AdoptedRows(fields, 8, 8, 4, 64, 1, 0)
