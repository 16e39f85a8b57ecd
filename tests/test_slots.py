"""The public functions of attncore.slots, and the choice of an implementation."""

import ast
import importlib
import inspect
import pathlib
from array import array
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore import slots


@pytest.fixture(autouse=True)
def chosen(kernels, monkeypatch):
    monkeypatch.setenv("ATTNCORE_KERNELS", kernels)


def test_the_environment_chooses(kernels):
    assert kernels == slots.load_kernels().IMPLEMENTATION
    assert slots.why_kernels() == f"{kernels}: asked for by ATTNCORE_KERNELS"
    assert slots.why_kernels(kernels) == f"{kernels}: asked for by the caller"


def test_a_bad_choice_names_the_variable(monkeypatch):
    monkeypatch.setenv("ATTNCORE_KERNELS", "rust")
    with pytest.raises(ValueError, match=r"ATTNCORE_KERNELS: 'rust' is neither cython nor numba$"):
        slots.load_kernels()
    monkeypatch.setenv("ATTNCORE_KERNELS", "nmba")
    with pytest.raises(ValueError, match=r"'nmba' is neither cython nor numba; did you mean numba\?$"):
        slots.load_kernels()


def test_without_a_choice_the_compiled_one_runs(monkeypatch, kernels):
    monkeypatch.delenv("ATTNCORE_KERNELS")
    importlib.import_module("attncore._slots" if kernels == "cython" else "attncore.kernels.numba")
    assert slots.load_kernels().IMPLEMENTATION == "cython"
    assert slots.why_kernels().startswith("cython: the compiled extension is installed")


# What is done in one call in C; with numba it takes the longer way.
NOT_OF_NUMBA = {"SentSteps", "SentAhead", "KnownStep", "KnownSteps", "append_slots", "fill_counted"}
NOT_OF_NUMBA |= {"append_blocks", "append_blocks_by_group", "roll_back"}


def test_both_implementations_are_what_the_stub_says(kernels):
    module = slots.load_kernels(kernels)
    stub = ast.parse((pathlib.Path(slots.__file__).parent / "_slots.pyi").read_text())
    for node in stub.body:
        if isinstance(node, ast.FunctionDef) and (kernels == "cython" or node.name not in NOT_OF_NUMBA):
            assert parameters(getattr(module, node.name)) in ([a.arg for a in node.args.args], None)
        if isinstance(node, ast.ClassDef) and (kernels == "cython" or node.name not in NOT_OF_NUMBA):
            cls = getattr(module, node.name)
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and (kernels == "cython" or method.name not in NOT_OF_NUMBA):
                    found = parameters(getattr(cls, method.name))
                    slot = kernels == "cython" and method.name == "__init__"  # which takes whatever it is given
                    assert slot or found in ([a.arg for a in method.args.args], None), f"{node.name}.{method.name}"


def parameters(function):
    """Names of a function's parameters; None where it does not tell."""
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return None


def test_compute_slot_mapping_is_the_first_generations():
    out = []
    slots.compute_slot_mapping(False, out, 7, 10, 0, 2, 4, {7: [0, 1, 0]})
    assert out == [-1, -1, 2, 3, 4, 5, 6, 7, 0, 1]
    slots.compute_slot_mapping(False, out, 7, 10, 6, 0, 4, {7: np.array([3, 1, 2])})
    assert out[10:] == [6, 7, 8, 9]
    slots.compute_slot_mapping(True, out, 7, 3, 1, 0, 4, {})
    assert out[14:] == [-1, -1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((False, [], 7, 9, 0, 0, 4, {7: [5, 6]}), "sequence 7 holds 2 blocks but needs 3 for its 9 tokens"),
        ((False, [], 7, 9, 0, 0, 4, {8: [5, 6]}), r"block_tables: no table for sequence 7; it has \[8\]"),
        ((False, [], 7, 4, 4, 0, 4, {7: [5]}), "seq_len: 4 is below 5"),
        ((False, [], 7, 4, 0, 0, 0, {7: [5]}), "block_size: 0 is below 1"),
        ((False, [], 7, 4, 0, 2, 2**31, {7: [5]}), "block_size: 2147483648 does not fit int32"),
        ((False, [], 7, 2**31 + 4, 2**31 - 1, 0, 4, {7: [5]}), "seq_len: 2147483652 does not fit int32"),
        ((False, [], 7, 4, 0, 0, 4, {7: None}), "no table for sequence 7"),
        ((False, [], 7, 4, 0, 0, 4, {7: [-5]}), "block id -5 at index 0"),
    ],
)
def test_compute_slot_mapping_appends_nothing_when_it_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        slots.compute_slot_mapping(*arguments)
    assert arguments[1] == []


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=6), st.integers(0, 24), st.integers(1, 12), st.integers(0, 30),
    st.sampled_from([1, 3, 4]), st.sampled_from([dict, MappingProxyType]),
)  # fmt: skip
def test_compute_slot_mapping_token_by_token(table, context_len, query_len, start_idx, block_size, mapping):
    """A dict of lists, the usual case, has a way of its own; any other mapping goes by the checks."""
    tokens, out = range(context_len, context_len + query_len), []
    arguments = (7, context_len + query_len, context_len, start_idx, block_size, mapping({7: table}))
    if start_idx < tokens.stop and tokens[-1] // block_size >= len(table):
        with pytest.raises(ValueError, match=rf"^block_tables: sequence 7 holds {len(table)} blocks? but needs"):
            slots.compute_slot_mapping(False, out, *arguments)
        assert out == []
        return
    slots.compute_slot_mapping(False, out, *arguments)
    of = lambda token: table[token // block_size] * block_size + token % block_size  # noqa: E731
    assert out == [of(token) if token >= start_idx else -1 for token in tokens]


@pytest.mark.parametrize("bad", [-1, 2**31, 1.0, "x", True])
def test_compute_slot_mapping_refuses_ids_that_it_reads(bad):
    for context_len, seq_len in ((5, 6), (5, 12)):
        out = []
        with pytest.raises((ValueError, TypeError), match="block id"):
            slots.compute_slot_mapping(False, out, 7, seq_len, context_len, 0, 4, {7: [1, bad, 2]})
        assert out == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: slots.is_block_tables_empty([1]), "block_tables: list is no mapping"),
        (lambda: slots.compute_slot_mapping(False, [], 7, 4, 0, 0, 4, None), "block_tables: NoneType is no mapping"),
        (lambda: slots.compute_slot_mapping("no", [], 7, 4, 0, 0, 4, {}), "is_profile_run: 'no' is not True or False"),
        (lambda: slots.compute_slot_mapping_start_idx("no", 5, 0, 2), "is_prompt: 'no' is not True or False"),
        (lambda: slots.pad_block_table([np.array(3)]), r"rows: row 0: int64\[\]; it must be a list of block ids"),
    ],
)
def test_what_is_of_another_type_is_named(call, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        call()


@pytest.mark.parametrize("dtype", ["M8[s]", "i4,i4", "O", "f8"])
def test_no_lengths_are_none_whatever_their_dtype(dtype):
    assert slots.build_query_start_loc(np.zeros(0, dtype)).tolist() == [0]


def test_compute_slot_mapping_names_the_argument_of_keys_that_cannot_be_compared_or_hashed():
    with pytest.raises(ValueError, match=r"^block_tables: no table for sequence 7; it has \[8, 'a', None\]"):
        slots.compute_slot_mapping(False, [], 7, 4, 0, 0, 4, {8: [5], "a": [6], None: [7]})
    with pytest.raises(TypeError, match=r"^seq_id: \[7\] cannot name a sequence"):
        slots.compute_slot_mapping(False, [], [7], 4, 0, 0, 4, {7: [5]})


def test_empty_block_tables():
    assert slots.is_block_tables_empty(None)
    assert slots.is_block_tables_empty({1: None, 2: None})
    assert slots.is_block_tables_empty({})
    assert not slots.is_block_tables_empty({1: None, 2: [3]})


def test_prefix_sums():
    assert slots.build_query_start_loc([5, 1, 0, 2]).tolist() == [0, 5, 6, 6, 8]
    assert slots.build_query_start_loc([]).tolist() == [0]
    out = np.full(3, -7, np.int32)
    assert slots.build_query_start_loc([4, 4], out) is out
    with pytest.raises(ValueError, match=r"out: int32\[3\]; it must be int32\[2\]"):
        slots.build_query_start_loc([4], out)
    with pytest.raises(ValueError, match="query_lens: the sum 4294967294 does not fit int32"):
        slots.build_query_start_loc([2**31 - 1] * 2)
    with pytest.raises(ValueError, match="query_lens: -1 at index 1 is outside"):
        slots.build_query_start_loc([1, -1])


def test_slots_and_positions_of_a_rectangle():
    table = [[4, 6, 0], [9, 2, 7], [0, 0, 0]]
    assert slots.build_slot_mapping(table, [3, 8, 0], [5, 1, 0], 4).tolist() == [19, 24, 25, 26, 27, 28]
    positions, rows = slots.build_positions([3, 8, 0], [5, 1, 0])
    assert positions.tolist() == [3, 4, 5, 6, 7, 8]
    assert rows.tolist() == [0, 0, 0, 0, 0, 1]
    assert slots.build_logits_indices([0, 5, 6]).tolist() == [4, 5]
    with pytest.raises(ValueError, match="row 1 holds 3 blocks but needs 4 for its 13 tokens"):
        slots.build_slot_mapping(table, [3, 12, 0], [5, 1, 0], 4)
    with pytest.raises(ValueError, match="query_lens: 1 length for 2 context_lens"):
        slots.build_positions([3, 8], [5])
    with pytest.raises(ValueError, match="context_lens: row 0 ends at token 2147483648"):
        slots.build_positions([2**31 - 1], [1])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.array([[2**32 + 5]]), "block id 4294967301 is outside"),
        ([[-3]], "block id -3 is outside"),
        (np.array([[-3]], np.int32), "block id -3 is outside"),
        ([[1.7]], r"block_table: float64\[1, 1\]; it must be a rectangle"),
        ([["7"]], "it must be a rectangle"),
        ([[True]], r"block_table: bool\[1, 1\]"),
        ([7], r"block_table: int64\[1\]"),
    ],
)
def test_a_bad_rectangle_is_refused_not_wrapped(table, message):
    with pytest.raises(ValueError, match=message):
        slots.build_slot_mapping(table, [0], [1], 4)
    with pytest.raises(ValueError, match=message):
        slots.build_page_lists(table, [1], 4)


@pytest.mark.parametrize("starts", [[0, 2**32 + 7], [0, 1.5], [[0, 1]], [1, 2], [0, 3, 2], []])
def test_logits_indices_need_prefix_sums(starts):
    with pytest.raises(ValueError, match="query_start_loc"):
        slots.build_logits_indices(starts)


def test_page_lists_of_a_rectangle():
    indptr, indices, last = slots.build_page_lists([[4, 6, 0], [9, 2, 7], [0, 0, 0]], [8, 9, 0], 4)
    assert indptr.tolist() == [0, 2, 5, 5]
    assert indices.tolist() == [4, 6, 9, 2, 7]
    assert last.tolist() == [4, 1, 0]
    with pytest.raises(ValueError, match="row 0 has 3 columns but needs 4 pages"):
        slots.build_page_lists([[4, 6, 0]], [13], 4)


def test_padding_a_block_table():
    assert slots.pad_block_table([[4, 6], np.array([9, 2, 7]), []]).tolist() == [[4, 6, 0], [9, 2, 7], [0, 0, 0]]
    assert slots.pad_block_table([], 3).shape == (0, 3)
    out = np.full((1, 2), 9, np.int32)
    assert slots.pad_block_table([[5]], 2, out).tolist() == [[5, 0]]
    with pytest.raises(ValueError, match="rows: row 0: 3 block ids but room for 2"):
        slots.pad_block_table([[1, 2, 3]], 2)
    with pytest.raises(ValueError, match="rows: row 1: block id -1 at index 0"):
        slots.pad_block_table([[1], [-1]], 1, kept := np.full((2, 1), 9, np.int32))
    assert kept.tolist() == [[9], [9]]
    with pytest.raises(TypeError, match="rows: row 0: 5 is not a sequence"):
        slots.pad_block_table([5])
    with pytest.raises(TypeError, match="out: list is no array"):
        slots.pad_block_table([[5]], 1, [[0]])
    with pytest.raises(TypeError, match=r"rows: row 0: block id 1\.5 at index 0 is not an integer"):
        slots.pad_block_table([[1.5]])


def test_a_row_is_as_long_as_what_it_yields():
    """Else tokens beyond would lie in block 0."""

    class Liar(list):
        def __len__(self):
            return 3

    assert slots.pad_block_table([Liar([7])]).tolist() == [[7]]
    out = []
    with pytest.raises(ValueError, match="sequence 0 holds 1 block but needs 3"):
        slots.compute_slot_mapping(False, out, 0, 9, 0, 0, 4, {0: Liar([7])})
    assert out == []


def test_a_tensor_that_reaches_beyond_its_memory_is_refused():
    """torch leaves the shape of a resize_ that it refuses."""
    torch = pytest.importorskip("torch")
    view = torch.from_numpy(np.ones(2000, np.int32))[1000:1002]
    with pytest.raises(RuntimeError):
        view.resize_(60000)
    with pytest.raises(ValueError, match=r"^query_lens: .* beyond its memory"):
        slots.build_query_start_loc(view)


def test_integers_whose_parts_have_names_are_integers():
    parts = np.dtype((np.int32, {"low": (np.int16, 0), "high": (np.int16, 2)}))
    np.testing.assert_array_equal(slots.build_query_start_loc(np.array([2, 3], np.int32).view(parts)), [0, 2, 5])


def test_compute_slot_mapping_appends_all_or_nothing():
    for table in ([5, 2**28], (5, 2**28)):
        given = array("i", [7])
        with pytest.raises(ValueError, match=r"^slot_mapping: it does not hold slot 429496"):
            slots.compute_slot_mapping(False, given, 0, 20, 10, 0, 16, {0: table})
        assert given.tolist() == [7]


@pytest.mark.parametrize("kind", ["f", "d"])
def test_slots_are_not_rounded(kind):
    given = array(kind, [7])
    for profiling in (True, False):
        with pytest.raises(TypeError, match=r"^slot_mapping: an array of floats found"):
            slots.compute_slot_mapping(profiling, given, 0, 2, 1, 0, 16, {0: [2**21]})
    assert given.tolist() == [7]


def test_an_array_that_cannot_grow_is_refused():
    given = array("q", [7])
    with memoryview(given), pytest.raises(ValueError, match=r"^slot_mapping: .*cannot resize.*; give a list"):
        slots.compute_slot_mapping(False, given, 0, 2, 0, 0, 16, {0: [2]})
    assert given.tolist() == [7]


@pytest.mark.parametrize("kind", ["i", "I"])
def test_a_slot_that_an_array_does_not_hold_is_named(kind):
    given = array(kind, [7])
    with pytest.raises(ValueError, match=r"^slot_mapping: it does not hold slot 4294967298"):
        slots.compute_slot_mapping(False, given, 1, 3, 2, 0, 16, {1: [2**28]})  # one token: the shortest way
    if kind == "I":
        for profiling in (True, False):
            with pytest.raises(ValueError, match=r"^slot_mapping: it does not hold slot -1"):
                slots.compute_slot_mapping(profiling, given, 1, 3, 0, 2, 16, {1: [3]})
    assert given.tolist() == [7]
    for none in (None, 3):
        with pytest.raises(TypeError, match=r"^slot_mapping: .* found; give a list"):
            slots.compute_slot_mapping(False, none, 1, 3, 2, 0, 16, {1: [2]})
