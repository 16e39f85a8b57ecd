"""What AdoptedSteps refuses, by name; a refused step changes nothing."""

import copy
import pickle

import numpy as np
import pytest
import torch
from builder.adopted.adopted_engine import BLOCK, MODEL_LEN, as_on_a_device, int32, reference
from builder.plain_backend import Least, config

from attncore import AdoptedSteps, BackendSpec, MultipleOf

BOUNDED = BackendSpec(
    name="least", api=1, factory="nowhere:Least", devices={"any": 0}, dtypes={"float32"}, head_sizes={8},
    block_sizes=MultipleOf(1), host_needs={"context_lens", "query_start_loc"}, host_lengths="bounded",
)  # fmt: skip
LARGEST = {"max_num_reqs": 4, "max_num_tokens": 16, "max_model_len": MODEL_LEN, "num_blocks": 200}


@pytest.fixture(scope="module")
def backend():
    return reference()


@pytest.fixture
def steps(backend, kernels):
    return AdoptedSteps(backend, **LARGEST, kernels=kernels)


def tensors():
    return {
        "query_start_loc": int32(0, 1, 2, 5),
        "seq_lens": int32(5, 9, 8),
        "block_table": torch.arange(1, 46, dtype=torch.int32).view(3, 15),
        "slot_mapping": torch.arange(5),
    }


@pytest.mark.parametrize(("row", "column", "block"), [(0, 1, -1), (1, 2, 200), (2, 0, -(2**31)), (2, 1, 2**31 - 1)])
def test_blocks_that_the_cache_has_not(steps, row, column, block):
    """On a CPU, where they can be read: of what holds keys, and of rows that run."""
    given = tensors()
    last = steps.build(**given)
    given["block_table"] = given["block_table"].clone()
    given["block_table"][row, column] = block
    wrong = f"^block_table: row {row} names block {block} in column {column}, but the cache holds 200 blocks"
    with pytest.raises(ValueError, match=wrong):
        steps.build(**given)
    assert steps.last_step == 0
    assert last.host.seq_lens.tolist() == [5, 9, 8]
    given["block_table"][row, column] = 1
    given["block_table"][:, 3:] = -1
    assert steps.build(**given).step == 1
    given["seq_lens"][2], given["query_start_loc"][3], given["block_table"][2] = 8, 2, -1
    assert steps.build(**given).num_tokens == 2


class Lying(torch.Tensor):
    """Says what it likes of itself."""

    shape = (3,)


class LyingArray(np.ndarray):
    def __len__(self):
        return 4

    def __getitem__(self, key):
        return 10**9


WRONG_TENSORS = {  # name, what is given in its place, the error
    "another dtype": ("seq_lens", lambda t: t.long(), r"seq_lens: int64\[3\] on cpu found; give int32\[n\] on cpu"),
    "slots of int32": ("slot_mapping", lambda t: t.int(), r"slot_mapping: int32\[5\] on cpu found; give int64"),
    "another device": ("block_table", lambda t: t.to("meta"), r"block_table: int32\[3, 15\] on meta found"),
    "no tensor": ("query_start_loc", lambda t: t.numpy(), "query_start_loc: ndarray found; give a torch tensor int32"),
    "a subclass": ("seq_lens", lambda t: t.as_subclass(Lying), "seq_lens: Lying found; give a torch tensor"),
    "None": ("seq_lens", lambda t: None, "seq_lens: NoneType found"),
    "two dimensions": ("seq_lens", lambda t: t[None], r"seq_lens: int32\[1, 3\] on cpu found"),
    "one dimension": ("block_table", lambda t: t[0], r"block_table: int32\[15\] on cpu found"),
    "a scalar": ("seq_lens", lambda t: t[0], r"seq_lens: int32\[\] on cpu found"),
    "gaps in a row": ("block_table", lambda t: t[:, ::2], "with strides .* do not lie side by side"),
    "gaps": ("slot_mapping", lambda t: t.repeat(2)[::2], "with strides .* do not lie side by side"),
    "sparse": ("slot_mapping", lambda t: t.to_sparse(), "slot_mapping: int64"),
    "more starts": ("query_start_loc", lambda t: int32(0, 1, 2, 5, 5), "query_start_loc: 5 rows found beside 3"),
    "fewer table rows": ("block_table", lambda t: t[:2], "block_table: 2 rows found beside 3 seq_lens; give 3"),
    "too few slots": ("slot_mapping", lambda t: t[:4], "slot_mapping: 4 slots found for 5 tokens; give one each"),
    "short table": ("block_table", lambda t: t[:, :2], "row 1 has 9, but its table of 2 columns holds 8 tokens"),
    "no table": ("block_table", lambda t: t[:, :0], "host_seq_lens: row 0 has 5, but its table of 0 columns"),
    "falling starts": ("query_start_loc", lambda t: int32(0, 2, 1, 5), "host_query_start_loc: row 1 begins at token"),
    "starts at 1": ("query_start_loc", lambda t: int32(1, 2, 3, 5), "host_query_start_loc: it begins at 1"),
    "negative length": ("seq_lens", lambda t: int32(5, -9, 8), "host_seq_lens: row 1 has -9 keys, fewer"),
    "shorter than its query": ("seq_lens", lambda t: int32(5, 9, 2), "host_seq_lens: row 2 has 2 keys, fewer"),
    "beyond the model": (
        "seq_lens", lambda t: int32(5, 9, MODEL_LEN + 1), f"row 2 has 61, above max_model_len {MODEL_LEN}",
    ),
    "too many tokens": ("query_start_loc", lambda t: int32(0, 1, 2, 17), "17 tokens in this step exceed max_num_tok"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_a_wrong_tensor_is_refused_by_name(steps, what):
    name, change, text = WRONG_TENSORS[what]
    before = steps.build(**tensors())
    arrays = {
        field: np.array(getattr(before.host, field)) for field in ("seq_lens", "query_start_loc", "paged_kv_indptr")
    }
    given = tensors()
    given[name] = change(given[name])
    for _ in range(4):
        with pytest.raises((ValueError, TypeError), match=text):
            steps.build(**given)
    assert steps.last_step == 0
    for field, array in arrays.items():
        np.testing.assert_array_equal(getattr(before.host, field), array)


def test_more_rows_than_there_is_room_for_are_refused(steps):
    given = {
        "query_start_loc": torch.arange(6, dtype=torch.int32), "seq_lens": int32(1, 1, 1, 1, 1),
        "block_table": torch.ones((5, 15), dtype=torch.int32), "slot_mapping": torch.arange(5),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"host_query_start_loc: 5 rows found, 4 are the most \(max_num_reqs\)"):
        steps.build(**given)


@pytest.mark.parametrize("name", ["host_query_start_loc", "host_seq_lens"])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([0, 1, 2, 5], "list found; give int32, a NumPy array or a tensor on the CPU"),
        (np.arange(4), r"int64\[4\] found; give int32\[n\]"),
        (np.zeros((2, 2), np.int32), r"int32\[2, 2\] found"),
        (np.arange(4, dtype=">i4"), ">i4"),
        (np.zeros(17, np.int8)[1:].view(np.int32), r"int32\[4\] that is not aligned found"),
        (torch.arange(4), r"int64\[4\] on cpu found"),
        (torch.zeros(4, dtype=torch.int32, device="meta"), r"int32\[4\] on meta found"),
        (np.zeros(9, np.int32), "9 (elements|lengths) found"),
        (np.zeros(9, np.int32).view(LyingArray), "9 (elements|lengths) found"),
        (torch.zeros(4, dtype=torch.int32).as_subclass(Lying), "Lying found"),
    ],
)
def test_a_wrong_host_array_is_refused_by_name(steps, name, given, text):
    with pytest.raises((ValueError, TypeError), match=f"{name}: {text}"):
        steps.build(**tensors(), **{name: given})
    assert steps.last_step == -1


def test_strided_and_read_only_host_arrays_are_taken(steps):
    starts, lengths = np.repeat(np.array([0, 1, 2, 5], np.int32), 2)[::2], np.array([8, 9, 5], np.int32)[::-1]
    lengths.flags.writeable = False
    metadata = steps.build(**tensors(), host_query_start_loc=starts, host_seq_lens=torch.from_numpy(lengths.copy()))
    assert metadata.host.query_start_loc.tolist() == [0, 1, 2, 5]
    assert steps.build(**tensors(), host_query_start_loc=starts, host_seq_lens=lengths).host.seq_lens.tolist() == [
        5,
        9,
        8,
    ]


def test_what_the_backend_reads_of_lengths(steps):
    given = tensors() | {"host_query_start_loc": int32(0, 1, 2, 5)}
    with pytest.raises(ValueError, match="bounded: backend 'reference' needs exact lengths on the host"):
        steps.build(**given, host_seq_lens=int32(5, 9, 8), bounded=True)
    with pytest.raises(TypeError, match="bounded: 'no' is not True or False"):
        steps.build(**given, bounded="no")
    with pytest.raises(TypeError, match="capturing: 1 is not True or False"):
        steps.build(**given, capturing=1)
    as_on_a_device(steps)
    with pytest.raises(ValueError, match="host_seq_lens: not given, but backend 'reference' needs exact lengths"):
        steps.build(**given)
    with pytest.raises(ValueError, match="host_query_start_loc: not given; the device's is not read"):
        steps.build(**tensors())


def test_a_backend_that_reads_what_follows_from_lengths_is_given_them():
    steps = AdoptedSteps(Least(config(BOUNDED)), **LARGEST)
    as_on_a_device(steps)
    given = tensors() | {"host_query_start_loc": int32(0, 1, 2, 5)}
    with pytest.raises(
        ValueError,
        match=r"host_seq_lens: not given, but backend 'least' needs lengths, or upper bounds of them, on the",
    ):
        steps.build(**given)
    metadata = steps.build(**given, host_seq_lens=int32(5, 9, 8))
    with pytest.raises(AttributeError, match="no field 'slot_mapping' in this step"):
        _ = metadata.host.slot_mapping


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"max_num_reqs": 0}, ValueError, "max_num_reqs: 0 is below 1"),
        ({"max_num_tokens": 1.5}, TypeError, "max_num_tokens: 1.5 is not an integer"),
        ({"max_model_len": 2**31 - 1}, ValueError, "max_model_len: 2147483647 exceeds 2147483639"),
        ({"max_num_reqs": 2**20, "max_model_len": 2**20}, ValueError, "max_num_reqs: 1048576 requests of 262144 pages"),
        ({"num_blocks": 0}, ValueError, "num_blocks: 0 is below 1"),
        ({"decode_threshold": 0}, ValueError, "decode_threshold: 0 is below 1"),
        ({"depth": 0}, ValueError, "depth: 0 is below 1"),
        ({"kernels": "c"}, ValueError, "kernels: 'c' is not one of cython, numba"),
    ],
)
def test_wrong_settings_are_refused(backend, changes, error, text):
    with pytest.raises(error, match=text):
        AdoptedSteps(backend, **(LARGEST | changes))


def test_what_is_no_backend_is_refused():
    with pytest.raises(TypeError, match="backend: 'flash' is not a backend"):
        AdoptedSteps("flash", **LARGEST)


def test_neither_steps_nor_metadata_are_copied_deeply(steps):
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="AdoptedSteps: cannot be copied"):
            act(steps)
    metadata = steps.build(**tensors())
    with pytest.raises(TypeError, match="metadata: it cannot be pickled or copied deeply"):
        pickle.dumps(metadata)
    with pytest.raises(AttributeError, match="no field 'slot_maping'; did you mean slot_mapping"):
        _ = metadata.slot_maping


def test_a_table_of_one_column_may_have_any_stride(steps):
    given = tensors() | {
        "block_table": torch.arange(1, 46, dtype=torch.int32).view(3, 15)[:, 4:5],
        "seq_lens": int32(1, 4, 3),
    }
    assert steps.build(**given).paged_kv_indices.tolist() == [5, 20, 35]
    assert BLOCK == 4


CONTRADICTED = {
    "a length": ({"host_seq_lens": int32(5, 1, 8)}, "host_seq_lens: row 1 has 1 key, and 9 in seq_lens; give the"),
    "a bound": ({"host_seq_lens": int32(9, 9, 7), "bounded": True}, "row 2 has 7 keys, and 8 in seq_lens; give upper"),
    "a start": (
        {"host_query_start_loc": int32(0, 1, 3, 5)},
        "host_query_start_loc: 3 found at index 2, where .* 2;",
    ),
}


@pytest.mark.parametrize(("host", "text"), CONTRADICTED.values(), ids=CONTRADICTED)
def test_host_numbers_that_the_tensors_contradict(host, text, kernels):
    steps = AdoptedSteps(Least(config(BOUNDED)), **LARGEST, kernels=kernels)
    with pytest.raises(ValueError, match=text):
        steps.build(**tensors(), **host)
    assert steps.last_step == -1


def test_what_a_row_without_tokens_has_is_not_compared(steps):
    given = tensors() | {"query_start_loc": int32(0, 1, 2, 2), "host_seq_lens": int32(5, 9, 0)}
    assert steps.build(**given).num_reqs == 2
