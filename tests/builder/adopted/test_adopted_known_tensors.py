"""Tensors that are found again, of the device and of the host, are those that were checked, and no others."""

import pytest
import torch
from builder.adopted.adopted_engine import MODEL_LEN, int32, reference

from attncore import AdoptedSteps
from attncore.builder.adopted.host_given import _MOST_KEPT

LARGEST = {"max_num_reqs": 4, "max_num_tokens": 16, "max_model_len": MODEL_LEN, "num_blocks": 200}
ONE_MORE = {"query_start_loc": 1, "host_query_start_loc": 1}


@pytest.fixture
def steps(kernels):
    return AdoptedSteps(reference(), **LARGEST, kernels=kernels)


def tensors():
    return {
        "query_start_loc": int32(0, 1, 2),
        "seq_lens": int32(5, 9),
        "block_table": torch.arange(1, 31, dtype=torch.int32).view(2, 15),
        "slot_mapping": torch.arange(2),
        "host_query_start_loc": int32(0, 1, 2),
        "host_seq_lens": int32(5, 9),
    }


def views(given):
    return {name: tensor[:] for name, tensor in given.items()}


HOST = ["host_query_start_loc", "host_seq_lens"]
DEVICE = ["query_start_loc", "seq_lens", "block_table", "slot_mapping"]
OTHERS = {
    "another dtype": lambda t: t.view(torch.float32 if t.dtype == torch.int32 else torch.float64),
    "unsigned": lambda t: t.view(torch.uint32 if t.dtype == torch.int32 else torch.uint64),
    "one dimension more": lambda t: t[None],
    "shorter": lambda t: t[:1],
    "another device": lambda t: t.to("meta"),
    "a subclass": lambda t: t.as_subclass(torch.nn.Parameter),
    "no tensor": lambda t: t.tolist(),
    "elements of one place": lambda t: torch.as_strided(t, t.shape, (0,) * t.dim()),
}


GAPS = "elements of one place"
PAIRS = [(name, what) for name in HOST + DEVICE for what in OTHERS if what != GAPS or name in DEVICE]


@pytest.mark.parametrize(("name", "what"), PAIRS)
def test_what_lies_at_the_same_place_but_is_another_is_refused(steps, name, what):
    given = tensors()
    for _ in range(2):
        steps.build(**views(given))
    with pytest.raises((ValueError, TypeError), match=f"^({name}|query_start_loc: 3 rows found beside 1 seq_lens)"):
        steps.build(**(views(given) | {name: OTHERS[what](given[name])}))
    assert steps.last_step == 1
    assert steps.build(**views(given)).host.seq_lens.tolist() == [5, 9]


@pytest.mark.parametrize("kind", ["the tensor", "a view", "a shorter view first", "an array"])
def test_a_host_tensor_is_read_in_each_step(steps, kind):
    starts, lengths = torch.arange(5, dtype=torch.int32), int32(5, 9, 0, 0)
    given = {name: tensor for name, tensor in tensors().items() if name not in HOST}
    if kind == "a shorter view first":
        one = {name: tensor[: 1 + ONE_MORE.get(name, 0)] for name, tensor in given.items()}
        steps.build(**one, host_query_start_loc=starts[:2], host_seq_lens=lengths[:1])
    for length in (11, 12, 13):
        lengths[1] = given["seq_lens"][1] = length
        host = starts[:3], lengths[:2]
        if kind == "the tensor":
            host = starts[:3].clone(), lengths[:2].clone()
        if kind == "an array":
            host = starts[:3].numpy(), lengths[:2].numpy()
        metadata = steps.build(**given, host_query_start_loc=host[0], host_seq_lens=host[1])
        assert metadata.host.seq_lens.tolist() == [5, length]
        assert metadata.max_seq_len == length


@pytest.mark.parametrize("lead", ["data", "set_", "freed"])
@pytest.mark.parametrize("name", HOST)
def test_a_host_tensor_that_is_led_elsewhere_is_read_there(steps, name, lead):
    given = tensors()
    wanted = int32(0, 1, 2) if name == HOST[0] else int32(7, 8)
    steps.build(**given)
    if lead == "data":
        given[name].data = wanted.clone()
    elif lead == "set_":
        given[name].set_(wanted.clone())
    else:
        address = given.pop(name).data_ptr()
        again = [wanted.clone() for _ in range(50)]
        assert all(tensor.data_ptr() != address for tensor in again), "its memory is kept"
        given[name] = again[0]
    given[name.removeprefix("host_")].copy_(wanted)
    metadata = steps.build(**given)
    assert getattr(metadata.host, name.removeprefix("host_")).tolist() == wanted.tolist()


def test_memory_of_few_host_tensors_is_kept(steps):
    given = tensors()
    for length in range(3 * _MOST_KEPT):
        given["seq_lens"][0] = 5 + length
        metadata = steps.build(**(given | {"host_seq_lens": int32(5 + length, 9)}))
        assert metadata.host.seq_lens.tolist() == [5 + length, 9]
        assert 1 <= len(steps._host.lengths._kept) <= _MOST_KEPT


def test_host_arrays_of_one_address_are_told_apart_by_their_strides(steps):
    given, wide = tensors(), torch.tensor([5, 10, 9, 77], dtype=torch.int32)
    for _ in range(2):
        for lengths in (wide[:2], wide[::2], wide[:2].numpy(), wide[::2].numpy()):
            given["seq_lens"].copy_(torch.as_tensor(lengths))
            metadata = steps.build(**(given | {"host_seq_lens": lengths}))
            assert metadata.host.seq_lens.tolist() == lengths.tolist()


def test_tensors_without_elements_are_not_known_by_their_missing_address(steps):
    none = {
        "query_start_loc": int32(0), "seq_lens": int32(), "slot_mapping": torch.zeros(0, dtype=torch.int64),
        "block_table": torch.zeros((0, 15), dtype=torch.int32),
    }  # fmt: skip
    for _ in range(2):
        assert steps.build(**none).num_reqs == 0
    with pytest.raises(ValueError, match=r"^slot_mapping: int64\[0\] on meta found"):
        steps.build(**(none | {"slot_mapping": none["slot_mapping"].to("meta")}))


PADDED = {
    "query_start_loc": int32(0, 1, 2, 2, 2), "seq_lens": int32(5, 9, 7, 7), "slot_mapping": torch.arange(4),
    "block_table": torch.arange(1, 61, dtype=torch.int32).view(4, 15),
}  # fmt: skip


def padded_step(steps, rows, size):
    """An eager step of so many decodes, which the engine pads to ``size`` rows and slots in its own buffers."""
    starts = PADDED["query_start_loc"]
    starts[: size + 1] = torch.arange(size + 1).clamp(max=rows)
    given = {name: tensor[: size + (name == "query_start_loc")] for name, tensor in PADDED.items()}
    metadata = steps.build(**given)
    assert (metadata.num_reqs, metadata.num_tokens) == (rows, rows)
    for name, tensor in given.items():
        assert torch.equal(getattr(metadata, name), tensor[: rows + (name == "query_start_loc")]), name
    assert metadata.host.seq_lens.tolist() == given["seq_lens"][:rows].tolist()
    return metadata


def test_what_is_cut_of_padded_tensors_is_found_again(steps, monkeypatch):
    first = padded_step(steps, 2, 4)
    monkeypatch.setattr(steps._sizes, "_set_given", lambda *arguments: pytest.fail("made again"))
    second = padded_step(steps, 2, 4)
    assert all(getattr(first, name) is getattr(second, name) for name in PADDED)


def test_rows_and_padding_of_padded_tensors_may_change_in_each_step(steps):
    for rows, size in ((2, 4), (3, 4), (2, 2), (2, 3), (4, 4), (2, 4), (0, 4), (0, 4), (1, 2), (2, 2), (3, 3), (3, 4)):
        padded_step(steps, rows, size)


@pytest.mark.parametrize("name", list(PADDED))
@pytest.mark.parametrize("what", [what for what in OTHERS if what != "shorter"])
def test_other_tensors_where_padded_ones_lay_are_refused(steps, name, what):
    padded_step(steps, 2, 4)
    with pytest.raises((ValueError, TypeError), match=f"^({name}|query_start_loc: 5 rows found)"):
        steps.build(**(PADDED | {name: OTHERS[what](PADDED[name])}))
