"""The cache writer: every layout, every dtype of a cache, negative slots; on a GPU one launch of Triton."""

import pytest

torch = pytest.importorskip("torch")

from attncore.ops.cache_writer import CacheWriter  # noqa: E402
from attncore.ops.cache_writer_checks import are_one  # noqa: E402

BLOCKS, SIZE, HEADS, HEAD, HEAD_V = 5, 4, 3, 16, 8
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
FNUZ = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]  # of ROCm: Triton has them on no CUDA device
SLOTS = [7, -1, 0, 19, -1, 12]


def caches(kind, dtype, device):
    """Views (blocks, block_size, heads, size) of a cache: a pair, [pages, 2, ...], heads first, keys beside values."""
    if kind == "pair":
        shapes = [(BLOCKS, SIZE, HEADS, head) for head in (HEAD, HEAD_V)]
        return [torch.zeros(shape, dtype=torch.uint8, device=device).to(dtype) for shape in shapes]
    if kind == "pages":
        cache = torch.zeros(BLOCKS, 2, SIZE, HEADS, HEAD, device=device).to(dtype)
        return cache[:, 0], cache[:, 1, ..., :HEAD_V]
    if kind == "heads first":
        cache = torch.zeros(BLOCKS, 2, HEADS, SIZE, HEAD, device=device).to(dtype)
        return cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)[..., :HEAD_V]
    cache = torch.zeros(BLOCKS, SIZE, HEADS, HEAD + HEAD_V, device=device).to(dtype)
    return cache[..., :HEAD], cache[..., HEAD:]


def new_tokens(count, device, dtype=torch.float32):
    """Key and value sliced out of one fused tensor, as engines pass them."""
    fused = torch.randn(count, HEADS * (HEAD + HEAD_V), device=device, dtype=dtype)
    key, value = fused.split([HEADS * HEAD, HEADS * HEAD_V], dim=1)
    return key.view(count, HEADS, HEAD), value.view(count, HEADS, HEAD_V)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["pair", "pages", "heads first", "one row"])
def test_tokens_are_where_their_slots_say(kind, dtype, device):
    torch.manual_seed(0)
    views = caches(kind, dtype, device)
    key, value = new_tokens(len(SLOTS) + 2, device)  # engines pad: tensors are longer
    scales = (2.0, 0.5) if dtype.itemsize == 1 else (1.0, 1.0)
    CacheWriter(*scales)(key, value, *views, torch.tensor(SLOTS, device=device))
    for view, new, scale in zip(views, (key, value), scales, strict=True):
        expected = torch.zeros((BLOCKS * SIZE, *new.shape[1:]))
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                expected[slot] = (new[token].cpu() / scale).to(dtype).float()
        assert torch.equal(view.cpu().float().reshape(expected.shape), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["pair", "heads first"])
def test_scales_on_the_device_are_read_by_every_call(kind, device):
    key, value = new_tokens(len(SLOTS), device)
    of_heads, of_all = torch.tensor([2.0, 0.5, 8.0], device=device), torch.tensor([4.0], device=device)
    writer, slots = CacheWriter(of_heads, of_all), torch.tensor(SLOTS, device=device)
    for factor in (1.0, 2.0):  # in place: as a layer's own tensors change
        views = caches(kind, torch.float8_e5m2, device)
        writer(key, value, *views, slots)
        scaled = key / of_heads.view(1, -1, 1), value / of_all
        for view, new in zip(views, scaled, strict=True):
            expected = torch.zeros((BLOCKS * SIZE, *new.shape[1:]))
            for token, slot in enumerate(SLOTS):
                if slot >= 0:
                    expected[slot] = new[token].cpu().to(torch.float8_e5m2).float()
            assert torch.equal(view[:BLOCKS].cpu().float().reshape(expected.shape), expected), factor
        of_heads.mul_(2.0)
        of_all.mul_(2.0)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(2), "k_scale: 2 elements found; the cache holds 3 heads"),
        (torch.ones(1, device="meta"), "k_scale: on meta, but slot_mapping is on cpu"),
    ],
    ids=["heads", "device"],
)
def test_scales_that_do_not_fit_are_refused_before_anything_is_written(scale, message):
    key_cache, value_cache = caches("pair", torch.float8_e5m2, "cpu")
    with pytest.raises(ValueError, match=f"^{message}"):
        CacheWriter(scale)(*new_tokens(1, "cpu"), key_cache, value_cache, torch.tensor([1]))
    assert not key_cache.view(torch.uint8).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)], ids=str)
def test_numbers_beyond_an_fp8_cache_are_cut_off(dtype, largest, device):
    views = caches("pair", dtype, device)
    key, value = new_tokens(1, device)
    CacheWriter()(key * 0 + 1e6, value * 0 - 1e6, *views, torch.tensor([5], device=device))
    assert views[0][1, 1].float().unique().tolist() == [largest]
    assert views[1][1, 1].float().unique().tolist() == [-largest]


@NO_CUDA
@pytest.mark.gpu
def test_a_capture_and_no_synchronisation():
    views = caches("pages", torch.bfloat16, "cuda")
    key, value = new_tokens(3, "cuda", torch.bfloat16)
    slots = torch.tensor([1, 2, -1], device="cuda")
    writer = CacheWriter()
    writer(key, value, *views, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        writer(key, value, *views, slots)
    slots.copy_(torch.tensor([9, -1, 10], device="cuda"))
    graph.replay()
    found = views[0].reshape(-1, HEADS, HEAD)
    assert torch.equal(found[9], key[0])
    assert torch.equal(found[10], key[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [1]}, ""),
        ({"slots": [1, 2, 3]}, "key: 2 tokens found for 3 slots"),
        ({"slots": torch.tensor([1], dtype=torch.int32)}, "slot_mapping: torch.int32"),
        ({"heads": 2}, r"key: shape \(2, 2, 16\) found; the cache holds heads and sizes \(3, 16\)"),
        ({"flat": True}, "key_cache: shape .* expected"),
        ({"dtype": torch.float16}, r"value_cache: torch.float16 .* beside keys of torch.float32"),
    ],
)
def test_tensors_that_disagree_are_named(change, message):
    key, value = new_tokens(2, "cpu")
    key_cache, value_cache = caches("pair", torch.float32, "cpu")
    key = key[:, : change.get("heads", HEADS)]
    key_cache = key_cache.flatten(0, 1) if change.get("flat") else key_cache
    value_cache = value_cache.to(change.get("dtype", torch.float32))
    slots = torch.as_tensor(change.get("slots", [1, 2]))
    if not message:
        CacheWriter()(key, value, key_cache, value_cache, slots)
        return
    with pytest.raises(ValueError, match=message):
        CacheWriter()(key, value, key_cache, value_cache, slots)
    assert not key_cache.any()
    assert not value_cache.any()


def test_no_negative_slot_is_written():
    key_cache, value_cache = caches("pair", torch.float32, "cpu")
    CacheWriter()(*new_tokens(3, "cpu"), key_cache, value_cache, torch.tensor([-9, -1, -(2**40)]))
    assert not key_cache.any()
    assert not value_cache.any()


def test_on_a_cpu_a_slot_past_the_end_writes_nothing():
    key_cache, value_cache = caches("pair", torch.float32, "cpu")
    with pytest.raises(
        IndexError, match=r"^slot_mapping: slot 20 is past the end of a cache of 5 blocks of 4 tokens; "
    ):
        CacheWriter()(*new_tokens(2, "cpu"), key_cache, value_cache, torch.tensor([1, BLOCKS * SIZE]))
    assert not key_cache.any()
    assert not value_cache.any()


@pytest.mark.parametrize(("dtype", "largest"), [(FNUZ[0], 240.0), (FNUZ[1], 57344.0)], ids=str)
def test_the_fp8_of_rocm_is_scaled_and_cut_off(dtype, largest):
    key_cache, value_cache = caches("pair", dtype, "cpu")
    key, value = new_tokens(1, "cpu")
    CacheWriter(2.0, 2.0)(key * 0 + 8.0, value * 0 - 1e6, key_cache, value_cache, torch.tensor([5]))
    assert key_cache[1, 1].float().unique().tolist() == [4.0]
    assert value_cache[1, 1].float().unique().tolist() == [-largest]


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
def test_a_call_of_the_same_shapes_and_other_dtypes_is_checked_again(dtype):
    writer, tokens = CacheWriter(), new_tokens(2, "cpu")
    key_cache, value_cache = caches("pair", torch.float32, "cpu")
    writer(*tokens, key_cache, value_cache, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"^slot_mapping: torch\."):
        writer(*tokens, key_cache, value_cache, torch.tensor([1, 0], dtype=dtype))
    with pytest.raises(ValueError, match=r"^value_cache: torch\.float16"):
        writer(*tokens, key_cache, value_cache.half(), torch.tensor([1, 2]))


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="a torch without it")
def test_a_cache_of_floats_that_are_only_scales_is_refused():
    key_cache, value_cache = (cache.view(torch.float8_e8m0fnu) for cache in caches("pair", torch.float8_e5m2, "cpu"))
    with pytest.raises(ValueError, match=r"^key_cache: torch.float8_e8m0fnu found; of the floats of a byte"):
        CacheWriter()(*new_tokens(1, "cpu"), key_cache, value_cache, torch.tensor([1]))


def in_inference_mode(tensor):
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("value", torch.Tensor.to_sparse),
        ("value", lambda tensor: tensor.to("meta")),
        ("value_cache", lambda tensor: tensor[:1].expand(tensor.shape)),
        ("value_cache", lambda tensor: tensor.to("meta")),
        ("value_cache", in_inference_mode),
    ],
)
def test_on_a_cpu_a_refused_value_leaves_the_keys(name, change):
    key_cache, value_cache = caches("pair", torch.float32, "cpu")
    key, value = new_tokens(1, "cpu")
    tensors = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=f"^{name}: "):
        CacheWriter()(**tensors, slot_mapping=torch.tensor([1]))
    assert not key_cache.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2], ids=str)
def test_on_a_cpu_a_cache_that_requires_a_gradient_is_written(dtype):
    key_cache, value_cache = (cache.requires_grad_() for cache in caches("pair", dtype, "cpu"))
    key, value = (tensor.requires_grad_() for tensor in new_tokens(1, "cpu"))
    CacheWriter()(key, value, key_cache, value_cache, torch.tensor([1]))
    assert torch.equal(value_cache[0, 1].float(), value[0].to(dtype).float())
    assert value_cache.is_leaf


@pytest.mark.parametrize(
    "scale",
    [
        0.0, -1.0, "1", 1j, None, True, float("inf"), float("nan"), 1e-50, 1e300, torch.ones(2, 2), torch.ones(0),
        torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.float16), torch.ones(4)[::2],
    ],
)  # fmt: skip
def test_a_scale_that_is_no_positive_number_is_refused(scale):
    for name in ("k_scale", "v_scale"):
        with pytest.raises(ValueError, match=f"^{name}: "):
            CacheWriter(**{name: scale})


@pytest.mark.parametrize(
    "scales", [(0.5, torch.tensor([0.5, 0.25, 1.0])), (torch.tensor(0.5), 0.5)], ids=["heads", "one"]
)
def test_a_number_beside_a_tensor_is_no_one_scale_and_is_not_compared(scales):
    key, value = new_tokens(1, "cpu")
    for kind in ("pair", "one row"):
        views = caches(kind, torch.float8_e5m2, "cpu")
        CacheWriter(*scales)(key, value, *views, torch.tensor([5]))
        for view, new, scale in zip(views, (key, value), scales, strict=True):
            expected = (new / torch.as_tensor(scale).reshape(-1, 1)).to(torch.float8_e5m2)
            assert torch.equal(view[1, 1].float(), expected[0].float())


def test_whether_scales_are_one_reads_no_tensor():
    on_device = torch.ones(1, device="meta")  # as one of a GPU: to read it would fail
    assert not are_one(1.0, on_device, 448.0)
    assert not are_one(on_device, 1.0, 448.0)
    assert not are_one(on_device, torch.ones(1, device="meta"), 448.0)
    assert are_one(on_device, on_device, 448.0)
    assert are_one(1.0, on_device, 0.0)
    assert are_one(0.5, 0.5, 448.0)
