"""Allocation, writing through slots, and moving blocks; each against plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore.reference import cache as kv_cache


def filled(num_blocks=5, block_size=4, dtype=torch.float32):
    cache = kv_cache.allocate(num_blocks, block_size, 2, 3, dtype=dtype)
    return cache.copy_(torch.arange(cache.numel()).view(cache.shape))


def test_allocation_is_zeroed():
    cache = kv_cache.allocate(5, 4, 2, 3, dtype=torch.bfloat16)
    assert cache.shape == (2, 5, 4, 2, 3)
    assert cache.dtype == torch.bfloat16
    assert not cache.any()


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "num_kv_heads", "head_size"])
def test_sizes(name):
    sizes = {"num_blocks": 5, "block_size": 4, "num_kv_heads": 2, "head_size": 3}
    with pytest.raises(ValueError, match=f"^{name}: 0"):
        kv_cache.allocate(**(sizes | {name: 0}), dtype=torch.float32)


def test_unknown_names():
    with pytest.raises(ValueError, match=r"^layout: 'own' is not supported here; choose one of NHD, HND"):
        kv_cache.allocate(5, 4, 2, 3, dtype=torch.float32, layout="own")
    with pytest.raises(ValueError, match=r"^layout: 'hnd'"):
        kv_cache.key_value(filled(), layout="hnd")
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: 'fp8'"):
        kv_cache.cache_dtype("fp8", "bfloat16")
    with pytest.raises(ValueError, match=r"^dtype: 'int32'"):
        kv_cache.cache_dtype("auto", "int32")
    assert kv_cache.cache_dtype("auto", "float16") is torch.float16
    assert kv_cache.cache_dtype("bfloat16", "float32") is torch.bfloat16


@pytest.mark.parametrize("layout", ["one tensor", "pair", "strided pair", "heads first"])
def test_write_and_read(layout):
    cache = filled()
    expected = cache.clone()
    if layout == "pair":
        caches = (cache[0].clone(), cache[1].clone())
    elif layout == "strided pair":  # (blocks, 2, ...) as FlashInfer has it
        pages = cache.transpose(0, 1).contiguous()
        caches = (pages[:, 0], pages[:, 1])
    elif layout == "heads first":
        heads = cache.transpose(2, 3).contiguous()
        caches = (heads[0].transpose(1, 2), heads[1].transpose(1, 2))
    else:
        caches = cache
    slots = [17, 0, -1, 6, 19, -1]
    key, value = torch.randn(6, 2, 3), torch.randn(6, 2, 3)
    kv_cache.write(key, value, caches, torch.tensor(slots))
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0, slot // 4, slot % 4] = key[token]
            expected[1, slot // 4, slot % 4] = value[token]
    for found, whole in zip(kv_cache.key_value(caches), expected, strict=True):
        assert torch.equal(found, whole)
        wanted = torch.tensor([[19, 0], [6, 3]])
        assert torch.equal(kv_cache.read(found, wanted), whole.flatten(0, 1)[wanted])


@pytest.mark.parametrize("size_v", [3, 2])
def test_heads_first_is_the_same_cache_with_two_axes_in_turn(size_v):
    given = {"dtype": torch.float32, "head_size_v": size_v}
    plain, other = (kv_cache.allocate(5, 4, 2, 3, layout=layout, **given) for layout in ("NHD", "HND"))
    assert other.shape == ((2, 5, 2, 4, 3) if size_v == 3 else (5, 2, 4, 5))
    key, value, slots = torch.randn(3, 2, 3), torch.randn(3, 2, size_v), torch.tensor([17, -1, 6])
    kv_cache.write(key, value, plain, slots)
    kv_cache.write(key, value, other, slots, layout="HND")
    assert torch.equal(other.transpose(-3, -2), plain)
    uneven = None if size_v == 3 else size_v
    for found, wanted in zip(kv_cache.key_value(other, uneven, "HND"), kv_cache.key_value(plain, uneven), strict=True):
        assert torch.equal(found, wanted)
        assert torch.equal(kv_cache.read(found, slots.clamp(min=0)), kv_cache.read(wanted, slots.clamp(min=0)))
    kv_cache.copy_blocks(other, [(4, 0)], block_dim=1)
    if size_v == 3:
        assert torch.equal(other[:, 0], other[:, 4])
        assert other[:, 0].any()


SCALES = {"number": (0.5, 3.0), "tensor": (torch.tensor([0.5]), torch.tensor([3.0])),
          "of each head": (torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25]))}  # fmt: skip


def in_fp8(number, dtype, scale):
    """One number as an fp8 cache gives it back, by its definition: the nearest of all that the format has."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[every.isfinite()]
    return float(every[(every - number / scale).abs().argmin()]) * scale


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", list(kv_cache.FP8_DTYPES.values()), ids=list(kv_cache.FP8_DTYPES))
@pytest.mark.parametrize("kind", SCALES)
def test_an_fp8_cache_holds_the_nearest_number_of_its_format(kind, dtype, layout):
    scales = SCALES[kind]
    cache = kv_cache.allocate(5, 4, 2, 3, dtype=dtype, layout=layout)
    key, value = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    key[0, 1, 2], value[2, 0, 0] = 1e6, -1e6  # beyond the range of either
    slots = torch.tensor([17, -1, 6])
    kv_cache.write(key, value, cache, slots, layout=layout, k_scale=scales[0], v_scale=scales[1])
    found = kv_cache.key_value(cache, layout=layout)
    for new, held, scale in zip((key, value), found, scales, strict=True):
        answer = kv_cache.restored(kv_cache.read(held, torch.tensor([17, 6])), scale)
        for row, token in enumerate((0, 2)):
            for head in range(2):
                one = scale if isinstance(scale, float) else float(scale[min(head, len(scale) - 1)])
                wanted = [in_fp8(float(number), dtype, one) for number in new[token, head]]
                assert answer[row, head].tolist() == wanted
        assert not kv_cache.read(held, torch.tensor([0, 16, 18])).float().any()
    before = cache.view(torch.uint8).clone()
    kv_cache.copy_blocks(cache, [(4, 0)])
    assert torch.equal(cache.view(torch.uint8)[:, 0], before[:, 4])
    target = torch.zeros_like(cache)
    kv_cache.swap_blocks(cache, target, [(4, 2)])
    assert torch.equal(target.view(torch.uint8)[:, 2], before[:, 4])


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]
MASKED = [[-1, -1, -1], [-1, 19, -1], [19, -1, -9], [-(2**40), 0, 19], []]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", MASKED, ids=str)
def test_a_slot_below_0_writes_nothing(slots, device):
    cache = filled().to(device)
    expected = cache.clone()
    key, value = torch.randn(2, len(slots), 2, 3, device=device)
    kv_cache.write(key, value, cache, torch.tensor(slots, dtype=torch.int64, device=device))
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0, slot // 4, slot % 4], expected[1, slot // 4, slot % 4] = key[token], value[token]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("slots", [slots for slots in MASKED if slots], ids=str)
def test_the_write_of_a_device_that_is_not_asked_for_anything_writes_the_same(slots):
    cache, expected, new = filled()[0], filled()[0], torch.randn(len(slots), 2, 3)
    kv_cache.put_unasked(new, cache, torch.tensor(slots))
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // 4, slot % 4] = new[token]
    assert torch.equal(cache, expected)


@NO_CUDA
@pytest.mark.gpu
def test_a_captured_write_asks_the_device_for_nothing_and_masks_what_its_slots_say_then():
    cache = filled().cuda()
    expected = cache.clone()
    key, value = torch.randn(2, 3, 2, 3, device="cuda")
    slots = torch.full((3,), -1, device="cuda")
    kv_cache.write(key, value, cache, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_cache.write(key, value, cache, slots)
    for held in ([-1, -1, -1], [19, -1, 3], [-1, 0, -1]):
        slots.copy_(torch.tensor(held))
        graph.replay()
        for token, slot in enumerate(held):
            if slot >= 0:
                expected[0, slot // 4, slot % 4], expected[1, slot // 4, slot % 4] = key[token], value[token]
        assert torch.equal(cache, expected)


def test_write_converts_to_the_dtype_of_the_cache():
    cache = filled(dtype=torch.float16)
    key = torch.randn(1, 2, 3)
    kv_cache.write(key, key, cache, torch.tensor([7]))
    assert torch.equal(cache[0, 1, 3], key[0].half())


def test_write_refuses_what_does_not_fit():
    key = torch.zeros(3, 2, 3)
    with pytest.raises(ValueError, match=r"^slot_mapping: "):
        kv_cache.write(key, key, filled(), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"^key: "):
        kv_cache.write(torch.zeros(3, 1, 3), key, filled(), torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"^value: "):
        kv_cache.write(key, torch.zeros(3, 2, 4), filled(), torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"^kv_cache: "):
        kv_cache.write(key, key, filled()[0], torch.tensor([1, 2, 3]))


SLOTS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"slot_mapping": torch.tensor([1, 20])}, IndexError, "slot_mapping: slot 20 is past the end of a cache"),
        ({"kv_cache": 3}, ValueError, r"kv_cache: torch.float32 \(3, 4, 2, 3\) found beside keys"),
        ({"kv_cache": torch.zeros(5, 2, 2, 3)}, ValueError, r"kv_cache: torch.float32 \(5, 2, 2, 3\) found"),
        ({"kv_cache": torch.zeros(5, 4, 2, 3).half()}, ValueError, "kv_cache: torch.float16 .* found beside keys"),
        ({"kv_cache": torch.zeros(5, 4, 2, 3).to("meta")}, ValueError, "kv_cache: on meta, but slot_mapping is on cpu"),
        ({"value": torch.ones(2, 2, 3).to("meta")}, ValueError, "value: on meta, but slot_mapping is on cpu"),
        ({"value": torch.ones(2, 2, 3).to_sparse()}, ValueError, "value: of layout torch.sparse_coo"),
        ({"value": torch.ones(())}, ValueError, r"slot_mapping: shape \(2,\) found for 2 keys and 0 values"),
        ({"value": [1.0]}, TypeError, "value: list found; give a torch tensor"),
        ({"slot_mapping": [1, 2]}, TypeError, "slot_mapping: list found; give a torch tensor"),
        ({"slot_mapping": SLOTS.float()}, ValueError, r"slot_mapping: torch.float32 \(2,\) found; give int64"),
        ({"slot_mapping": SLOTS.byte()}, ValueError, "slot_mapping: torch.uint8"),
        ({"slot_mapping": SLOTS.to("meta")}, ValueError, "key: on cpu, but slot_mapping is on meta"),
    ],
)
def test_a_write_that_is_refused_writes_nothing(change, error, said):
    keys, values = filled().zero_()
    given = {"key": torch.ones(2, 2, 3), "value": torch.ones(2, 2, 3), "slot_mapping": SLOTS} | change
    other = given.pop("kv_cache", values)
    values = values[:other] if isinstance(other, int) else other
    with pytest.raises(error, match=f"^{said}"):
        kv_cache.write(**given, kv_cache=(keys, values))
    assert not keys.any()
    assert values.is_meta or not values.any()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_copy_blocks_reads_before_it_writes(data):
    targets = data.draw(st.lists(st.integers(0, 7), unique=True, max_size=8))
    pairs = [(data.draw(st.integers(0, 7)), target) for target in targets]
    layers = [filled(8), filled(8) + 1000]
    before = [cache.clone() for cache in layers]
    kv_cache.copy_blocks(layers, pairs)
    for cache, old in zip(layers, before, strict=True):
        expected = old.clone()
        for source, target in pairs:
            expected[:, target] = old[:, source]
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_copy_blocks_of_each_shape_of_cache(kind):
    expected = filled()
    expected[:, 4] = expected[:, 1]
    one, pages = filled(), filled().transpose(0, 1).contiguous()
    pair = list(filled())
    kv_cache.copy_blocks(one, kind([(1, 4)]))
    kv_cache.copy_blocks([pair], kind([(1, 4)]))
    kv_cache.copy_blocks(pages, kind([(1, 4)]), block_dim=0)
    assert torch.equal(one, expected)
    assert torch.equal(torch.stack(pair), expected)
    assert torch.equal(pages.transpose(0, 1), expected)
    kv_cache.copy_blocks([], kind([(1, 4)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swap_out_and_in(dtype):
    device, host = filled(6, dtype=dtype), kv_cache.allocate(3, 4, 2, 3, dtype=dtype)
    before = device.clone()
    kv_cache.swap_blocks(device, host, [(5, 0), (2, 2)])
    assert torch.equal(host[:, 0], before[:, 5])
    assert torch.equal(host[:, 2], before[:, 2])
    assert not host[:, 1].any()
    assert torch.equal(device, before)
    device[:, [5, 2]] = 0
    kv_cache.swap_blocks(host, device, torch.tensor([(0, 5), (2, 2)]))
    assert torch.equal(device, before)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 5)], "destination block 5 is outside the cache's 5 blocks"),
        ([(5, 0)], "source block 5 is outside"),
        ([(-1, 0)], "source block -1 is outside"),
        ([(0, 1), (2, 1)], "a destination is named twice"),
        ([0, 1], r"shape \(2,\)"),
        ([(0.0, 1.0)], "float64"),
    ],
)
def test_pairs_that_are_wrong(pairs, message):
    cache = filled()
    before = cache.clone()
    with pytest.raises(ValueError, match=f"^block_pairs: .*{message}|^block_pairs: {message}"):
        kv_cache.copy_blocks(cache, pairs)
    with pytest.raises(ValueError, match=r"^block_pairs: "):
        kv_cache.swap_blocks(cache, filled(), pairs)
    assert torch.equal(cache, before)


def test_swap_refuses_other_blocks():
    for other in (filled(block_size=2), filled(dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"^target: "):
            kv_cache.swap_blocks(filled(), other, [(0, 1)])


def test_shapes_of_latent_and_uneven_caches():
    assert kv_cache.cache_shape(5, 4, 1, 9, head_size_v=6, use_mla=True) == (5, 4, 9)
    assert kv_cache.cache_shape(5, 4, 2, 9, head_size_v=6) == (5, 4, 2, 15)
    assert kv_cache.cache_shape(5, 4, 2, 9, head_size_v=9) == (2, 5, 4, 2, 9)
    assert kv_cache.allocate(5, 4, 1, 9, dtype=torch.float16, head_size_v=6, use_mla=True).shape == (5, 4, 9)
    assert not kv_cache.allocate(5, 4, 2, 9, dtype=torch.float16, head_size_v=6).any()


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"use_mla": True}, "num_kv_heads"),
        ({"use_mla": True, "num_kv_heads": 1, "head_size_v": 4}, "head_size_v"),
        ({"head_size_v": 0}, "head_size_v"),
        ({"num_blocks": 0, "head_size_v": 2}, "num_blocks"),
    ],
)
def test_sizes_of_latent_and_uneven_caches(sizes, name):
    given = {"num_blocks": 5, "block_size": 4, "num_kv_heads": 2, "head_size": 3} | sizes
    with pytest.raises(ValueError, match=f"^{name}: "):
        kv_cache.allocate(**given, dtype=torch.float32)


def test_a_latent_cache_is_written_read_and_moved():
    cache = kv_cache.allocate(5, 4, 1, 9, dtype=torch.float32, head_size_v=6, use_mla=True)
    cache.copy_(torch.arange(cache.numel()).view(cache.shape))
    expected = cache.clone()
    rows, slots = torch.randn(6, 1, 9), [17, 0, -1, 6, 19, -1]
    kv_cache.write(rows, None, cache, torch.tensor(slots))
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            expected[slot // 4, slot % 4] = row[0]
    assert torch.equal(cache, expected)
    key, value = kv_cache.key_value(cache, 6)
    assert (key.shape, value.shape) == ((5, 4, 1, 9), (5, 4, 1, 6))
    wanted = torch.tensor([[19, 0], [6, 3]])
    assert torch.equal(kv_cache.read(key, wanted).squeeze(2), expected.flatten(0, 1)[wanted])
    assert torch.equal(kv_cache.read(value, wanted).squeeze(2), expected.flatten(0, 1)[wanted][..., :6])
    elsewhere = kv_cache.allocate(2, 4, 1, 9, dtype=torch.float32, use_mla=True)
    kv_cache.copy_blocks([cache], [(1, 2), (2, 3)])
    kv_cache.swap_blocks(cache, elsewhere, [(4, 1)])
    assert torch.equal(cache[[2, 3]], expected[[1, 2]])
    assert torch.equal(elsewhere[1], expected[4])
    assert not elsewhere[0].any()


@pytest.mark.parametrize("sizes", [(9, 6), (3, 5)])
def test_keys_and_values_of_two_sizes_share_a_row(sizes):
    cache = kv_cache.allocate(5, 4, 2, sizes[0], dtype=torch.float32, head_size_v=sizes[1])
    key, value = (torch.randn(3, 2, size) for size in sizes)
    kv_cache.write(key, value, cache, torch.tensor([7, -1, 16]))
    kv_cache.copy_blocks(cache, [(1, 3)])
    for part, new in zip(kv_cache.key_value(cache, sizes[1]), (key, value), strict=True):
        assert part.shape == (5, 4, 2, new.shape[2])
        assert torch.equal(kv_cache.read(part, torch.tensor([7, 16, 15])), new[[0, 2, 0]])
        assert part.count_nonzero() == 3 * new[0].numel()


def test_latent_and_uneven_caches_refuse_what_does_not_fit():
    latent = kv_cache.allocate(5, 4, 1, 9, dtype=torch.float32, use_mla=True)
    uneven = kv_cache.allocate(5, 4, 2, 9, dtype=torch.float32, head_size_v=6)
    slots, key = torch.tensor([1, 2]), torch.zeros(2, 2, 9)
    with pytest.raises(ValueError, match=r"^key: .*\(2, 9\) found; the cache holds \(1, 9\)"):
        kv_cache.write(key, None, latent, slots)
    with pytest.raises(ValueError, match=r"^slot_mapping: shape \(2,\) found for 1 key"):
        kv_cache.write(key[:1, :1], None, latent, slots)
    with pytest.raises(ValueError, match=r"^value: None found; only a latent cache"):
        kv_cache.write(key, None, uneven, slots)
    with pytest.raises(ValueError, match=r"^key: .*\(2, 9\) found; the cache holds \(2, 10\)"):
        kv_cache.write(key, key[..., :5], uneven, slots)
    for cache, size in ((latent, 10), (uneven, None), (uneven, 15), (filled(), 2)):
        with pytest.raises(ValueError, match=r"^kv_cache: shape \(.*\) found( for head_size_v \d+)?; expected \(2, "):
            kv_cache.key_value(cache, size)
