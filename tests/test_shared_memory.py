"""Keys and values that share memory would overwrite each other: found exactly where both have the same strides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore import BackendConfig, CacheWriter
from attncore.ops.written_tensor import share_memory
from attncore.reference import ReferenceBackend, cache

SHAPE = (3, 4, 2, 8)
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]


def _stacked(*, at, order):
    """Keys and values in one tensor, beside each other in the axis ``at``, its axes stored in ``order``."""
    whole = torch.zeros([(*SHAPE[:at], 2, *SHAPE[at:])[axis] for axis in order]).permute(
        [order.index(axis) for axis in range(5)]
    )
    return whole.select(at, 0), whole.select(at, 1)


APART = {
    "two": lambda: (torch.zeros(SHAPE), torch.zeros(SHAPE)),
    "halves": lambda: _stacked(at=0, order=[0, 1, 2, 3, 4]),
    "pages": lambda: _stacked(at=1, order=[0, 1, 2, 3, 4]),
    "heads first": lambda: _stacked(at=1, order=[0, 1, 3, 2, 4]),
    "one row": lambda: torch.zeros(3, 4, 2, 16).split(8, dim=3),
    "one row, heads first": lambda: torch.zeros(3, 2, 4, 16).transpose(1, 2).split(8, dim=3),
    "uneven": lambda: torch.zeros(3, 4, 2, 12).split([8, 4], dim=3),
    "uneven, in blocks": lambda: [
        part.view(3, 4, 2, -1) for part in torch.zeros(3, 4 * 2 * 12).split([4 * 2 * 8, 4 * 2 * 4], dim=1)
    ],
}
TOGETHER = {
    "one": lambda: (torch.zeros(SHAPE),) * 2,
    "a block on": lambda: (lambda big: (big[:3], big[1:]))(torch.zeros(4, *SHAPE[1:])),
    "a token on": lambda: (lambda big: (big[:, :4], big[:, 1:]))(torch.zeros(3, 5, 2, 8)),
    "columns": lambda: (lambda big: (big[..., :8], big[..., 7:15]))(torch.zeros(3, 4, 2, 15)),
    "the first columns": lambda: (lambda big: (big, big[..., :4]))(torch.zeros(SHAPE)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*APART, *TOGETHER])
def test_caches_that_share_memory_are_refused_and_interleaved_ones_are_not(kind, device):
    with torch.device(device):
        keys, values = (APART | TOGETHER)[kind]()
        key, value, slots = torch.ones(2, 2, 8), torch.full((2, 2, values.shape[3]), 2.0), torch.tensor([5, 11])
    if kind in APART:
        CacheWriter()(key, value, keys, values, slots)
        assert keys.sum() == key.sum()
        assert values.sum() == value.sum()
        return
    with pytest.raises(ValueError, match=r"^value_cache: it shares memory with key_cache"):
        CacheWriter()(key, value, keys, values, slots)
    if keys.shape == values.shape:
        with pytest.raises(ValueError, match=r"^kv_cache: keys and values share memory"):
            cache.write(key, value, (keys, values), slots)
    assert not keys.any()
    assert not values.any()


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_caches_are_looked_at_in_every_call(device):
    """Formats are compared once: the addresses of later caches are not those of the first."""
    writer, new, slots = CacheWriter(), torch.ones(1, 2, 8, device=device), torch.tensor([5], device=device)
    one, other = torch.zeros(2, *SHAPE, device=device)
    writer(new, new + 1, one, other, slots)
    with pytest.raises(ValueError, match=r"^key: of layout torch.sparse_coo"):
        writer(new.to_sparse(), new, one, other, slots)
    one.zero_()
    with pytest.raises(ValueError, match=r"^value_cache: it shares memory"):
        writer(new, new + 1, one, one, slots)


@pytest.mark.parametrize("device", DEVICES)
def test_values_that_are_columns_of_the_keys_may_be_so_in_the_cache(device):
    rows, key = torch.zeros(3, 4, 1, 12, device=device), torch.arange(12.0, device=device).view(1, 1, 12)
    slots = torch.tensor([6], device=device)
    CacheWriter()(key, key[..., :8], rows, rows[..., :8], slots)
    assert rows[1, 2, 0].tolist() == list(range(12))
    fp8 = rows.to(torch.float8_e4m3fn)
    CacheWriter(2.0, 2.0)(key, key[..., :8], fp8, fp8[..., :8], slots)
    with pytest.raises(ValueError, match=r"^value_cache: it shares memory"):
        CacheWriter(2.0, 1.0)(key, key[..., :8], fp8, fp8[..., :8], slots)


@settings(max_examples=300, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 4)] * 3),
    sizes=st.tuples(*[st.integers(1, 4)] * 2),
    order=st.permutations(range(3)),
    gaps=st.tuples(*[st.integers(0, 5)] * 3),
    offsets=st.tuples(*[st.integers(0, 60)] * 2),
)
def test_what_shares_memory_is_what_a_list_of_all_elements_says(shape, sizes, order, gaps, offsets):
    steps, step = [0] * 3, max(sizes)
    for axis, gap in zip(order, gaps, strict=True):
        steps[axis] = step + gap
        step = steps[axis] * shape[axis]
    memory = torch.arange(2000)
    one, other = (
        memory.as_strided((*shape, size), (*steps, 1), offset) for size, offset in zip(sizes, offsets, strict=True)
    )
    assert share_memory(one, other) == bool({*one.flatten().tolist()} & {*other.flatten().tolist()})


def _layer():
    config = BackendConfig(num_heads=2, num_kv_heads=2, head_size=8, dtype="float32", device="cpu", block_size=4)
    return ReferenceBackend(config).impl("layer", scale=1.0)


class Step:
    slot_mapping, host = torch.tensor([5]), None


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"metadata": None}, TypeError, "metadata: NoneType found"),
        ({"metadata": 3}, TypeError, "metadata: int found"),
        ({"key": torch.ones(1, 2, 8).numpy()}, TypeError, "key: ndarray found; give a torch tensor"),
        ({"value": [[1.0]]}, TypeError, "value: list found; give a torch tensor"),
        ({"key": torch.ones(1, 2, 8).to_sparse()}, ValueError, "key: of layout torch.sparse_coo"),
        ({"key": torch.nested.nested_tensor([torch.ones(2, 8)], layout=torch.jagged)}, ValueError, "key: nested"),
        ({"value": torch._neg_view(torch.ones(1, 2, 8))}, ValueError, "value: a lazy negative"),
    ],
    ids=["none", "a number", "numpy", "a list", "sparse", "nested", "negative"],
)
def test_what_is_no_tensor_or_no_metadata_is_named(change, error, said):
    layer, kv_cache, new = _layer(), torch.zeros(2, 3, 4, 2, 8), torch.ones(1, 2, 8)
    given = {"key": new, "value": new, "kv_cache": kv_cache, "metadata": Step()}
    for known in (False, True):
        with pytest.raises(error, match=f"^{said}"):
            layer.write_cache(**given | change)
        assert not kv_cache.any(), known
        layer.write_cache(**given)  # the formats are known from now on
        assert kv_cache.any()
        kv_cache.zero_()
