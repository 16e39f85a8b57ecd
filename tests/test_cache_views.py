"""Keys and values of a cache as views, of every form; blocks of a pair; the base class's ``write_cache``."""

import types

import pytest

from attncore import AttentionBackend, AttentionImpl, BackendConfig
from attncore.reference import ReferenceBackend

torch = pytest.importorskip("torch")

BLOCKS, SIZE, HEADS, HEAD, HEAD_V = 5, 4, 2, 8, 6


class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
        return query


class Backend(AttentionBackend):
    impl_class = Impl
    shape = staticmethod(lambda n, size, heads, head: (2, n, size, heads, head))

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return self.shape(num_blocks, block_size, num_kv_heads, head_size)


def backend(shape=None, **fields):
    base = {"num_heads": 4, "num_kv_heads": HEADS, "head_size": HEAD, "dtype": "float32", "block_size": SIZE}
    made = Backend(BackendConfig(**{**base, **fields}))
    if shape is not None:
        made.shape = shape
    return made


def numbered(shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(dtype)


@pytest.mark.parametrize(
    ("shape", "fields", "keys", "values"),
    [
        (lambda n, s, h, d: (2, n, s, h, d), {}, lambda c: c[0], lambda c: c[1]),
        (lambda n, s, h, d: (n, 2, s, h, d), {}, lambda c: c[:, 0], lambda c: c[:, 1]),
        (lambda n, s, h, d: (2, n, h, s, d), {"kv_cache_layout": "HND"}, lambda c: c[0].transpose(1, 2),
         lambda c: c[1].transpose(1, 2)),
        (lambda n, s, h, d: (n, h, s, 2 * d), {"kv_cache_layout": "HND"}, lambda c: c.transpose(1, 2)[..., :HEAD],
         lambda c: c.transpose(1, 2)[..., HEAD:]),
        (lambda n, s, h, d: (n, s, h, d + HEAD_V), {"head_size_v": HEAD_V}, lambda c: c[..., :HEAD],
         lambda c: c[..., HEAD:]),
        (lambda n, s, h, d: (n, s, d), {"use_mla": True, "num_kv_heads": 1, "head_size_v": HEAD_V},
         lambda c: c[:, :, None], lambda c: c[:, :, None, :HEAD_V]),
    ],
    ids=["stacked", "blocks first", "heads first", "one row a head", "values of a size of their own", "latent"],
)  # fmt: skip
def test_views_of_whole_caches(shape, fields, keys, values):
    made = backend(shape, **fields)
    for num_blocks in (BLOCKS, 2):  # 2 blocks are not taken for keys and values
        cache = made.allocate_kv_cache(num_blocks).copy_(numbered(made._shape(num_blocks)))
        for found, wanted in zip(made.kv_cache_views(cache), (keys(cache), values(cache)), strict=True):
            assert torch.equal(found, wanted)
            assert (found.data_ptr(), found.stride()) == (wanted.data_ptr(), wanted.stride())


def test_a_pair_is_taken_as_it_comes_in_every_layout():
    rows = numbered((BLOCKS, HEADS, SIZE, 2 * HEAD)).transpose(1, 2)
    for layout in ("NHD", "HND", "own"):
        pair = rows[..., :HEAD], rows[..., HEAD:]
        assert backend(kv_cache_layout=layout).kv_cache_views(pair) == pair
        assert backend(kv_cache_layout=layout).kv_cache_views(list(pair))[1] is pair[1]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_bytes_are_floats_where_the_cache_is_fp8(dtype):
    made = backend(kv_cache_dtype=dtype)
    cache = made.allocate_kv_cache(BLOCKS)
    as_bytes = cache.view(torch.uint8)
    wide = torch.zeros(BLOCKS, SIZE, HEADS, 2 * HEAD, dtype=torch.uint8)
    for given in (cache, as_bytes, tuple(as_bytes), (wide[..., :HEAD], wide[..., HEAD:])):
        for view in made.kv_cache_views(given):
            assert view.dtype == made.kv_cache_torch_dtype()
    assert made.kv_cache_views(as_bytes)[1].data_ptr() == cache[1].data_ptr()
    with pytest.raises(ValueError, match=r"^kv_cache: torch.uint8 found; the backend was made for torch.float32"):
        backend().kv_cache_views(as_bytes)


def half(*shape, **kind):
    return torch.zeros(shape, **kind)


@pytest.mark.parametrize(
    "cache",
    [
        half(BLOCKS, SIZE, HEADS, HEAD),
        half(3, BLOCKS, SIZE, HEADS, HEAD),
        half(2, BLOCKS, HEADS, SIZE, HEAD),
        (half(BLOCKS, SIZE, HEADS, HEAD),),
        (half(BLOCKS, SIZE, HEADS, HEAD), half(BLOCKS + 1, SIZE, HEADS, HEAD)),
        (half(BLOCKS, SIZE, HEADS, HEAD), half(BLOCKS, SIZE, HEADS, HEAD_V)),
        (half(BLOCKS, SIZE, HEAD, HEADS).transpose(2, 3),) * 2,
        (half(BLOCKS, SIZE, HEADS, HEAD, dtype=torch.float16),) * 2,
        (None, None),
    ],
    ids=["no stack", "three", "heads first", "one", "other blocks", "other size", "head size apart", "dtype", "none"],
)
def test_what_is_no_cache_is_refused(cache):
    with pytest.raises(ValueError, match=r"^kv_cache: "):
        backend().kv_cache_views(cache)


def test_a_layout_of_its_own_asks_for_an_override():
    with pytest.raises(
        ValueError, match=r"^kv_cache: shape .* a class with a layout of its own overrides kv_cache_views"
    ):
        backend(kv_cache_layout="own").kv_cache_views(half(2, BLOCKS, SIZE, HEADS, HEAD))


def test_blocks_are_copied_and_swapped_between_pairs_and_whole_caches():
    made = backend(kv_cache_dtype="fp8_e4m3")
    rows = numbered((BLOCKS, HEADS, SIZE, 2 * HEAD)).remainder(16).to(made.kv_cache_torch_dtype()).transpose(1, 2)
    pair, whole = (rows[..., :HEAD], rows[..., HEAD:]), made.allocate_kv_cache(3)
    before = [part.float().clone() for part in pair]
    made.swap_blocks(pair, whole, [(4, 1), (0, 2)])
    for part, old in zip(whole, before, strict=True):
        assert torch.equal(part.float()[1:], old[[4, 0]])
        assert not part[0].float().any()
    made.swap_blocks(whole, tuple(part.view(torch.uint8) for part in pair), [(2, 3)])
    made.copy_blocks([pair], [(1, 2), (2, 1)])
    for part, old in zip(pair, before, strict=True):
        assert torch.equal(part.float(), old[[0, 2, 1, 0, 4]])


class WithScales(Backend):
    """A cache of one tensor that holds a number for each token beside its keys and values."""

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (num_blocks, block_size, num_kv_heads, 2 * head_size + 1)

    def kv_cache_views(self, kv_cache):
        if isinstance(kv_cache, torch.Tensor):
            return kv_cache[..., :HEAD], kv_cache[..., HEAD : 2 * HEAD]
        return super().kv_cache_views(kv_cache[:2])


class Swaps(WithScales):
    def swap_blocks(self, src_kv_cache, dst_kv_cache, src_to_dst):
        super().swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst)


BESIDE = "[0-9]+ bytes, of which kv_cache_views shows [0-9]+ as keys and values; blocks of it are not copied"


@pytest.mark.parametrize("kind", [WithScales, Swaps])
def test_a_cache_that_holds_more_than_its_views_is_swapped_with_its_like_alone(kind):
    """Else what stands beside the views would be left behind without a word."""
    made = kind(backend().config)
    whole, pair = made.allocate_kv_cache(3), (half(3, SIZE, HEADS, HEAD), half(3, SIZE, HEADS, HEAD))
    before = [numbered(part.shape).to(part.dtype).remainder(16) for part in (whole, *pair)]
    for part, numbers in zip((whole, *pair), before, strict=True):
        part.copy_(numbers)
    with pytest.raises(ValueError, match=rf"^src_kv_cache: holds {BESIDE}.* swap_blocks in {kind.__name__}"):
        made.swap_blocks(whole, pair, [(0, 1)])
    with pytest.raises(ValueError, match=rf"^dst_kv_cache: holds {BESIDE}"):
        made.swap_blocks(pair, whole, [(0, 1)])
    assert all(map(torch.equal, (whole, *pair), before))
    made.swap_blocks(whole, whole, [(0, 1)])
    assert torch.equal(whole[1], before[0][0])
    made.swap_blocks(pair, pair, [(0, 1)])


def test_three_tensors_are_copied_by_a_class_that_copies_the_third_alone():
    cache = (half(3, SIZE, HEADS, HEAD), half(3, SIZE, HEADS, HEAD), half(3, SIZE))
    with pytest.raises(ValueError, match=rf"^src_kv_cache: holds {BESIDE}"):
        WithScales(backend().config).copy_blocks([cache], [(0, 1)])
    Swaps(backend().config).copy_blocks([cache], [(0, 1)])


def step(slots, name="slot_mapping"):
    return types.SimpleNamespace(**{name: torch.tensor(slots, dtype=torch.int64)})


def test_write_cache_writes_by_the_slots_of_the_layer():
    made = backend(kv_cache_dtype="fp8_e4m3")
    key, value = torch.randn(2, 3, HEADS, HEAD)
    cross = made.impl("cross", scale=1.0, attn_type="encoder_decoder")
    for impl, name in ((made.impl("self", scale=1.0, k_scale=2.0), "slot_mapping"), (cross, "cross_slot_mapping")):
        cache = made.allocate_kv_cache(BLOCKS)
        for given in (cache, tuple(cache.view(torch.uint8)), cache):
            cache.zero_()
            impl.write_cache(key, value, given, step([7, -1, 19], name))
            for part, new, scale in zip(cache, (key, value), (impl.k_scale, impl.v_scale), strict=True):
                wanted = torch.zeros(BLOCKS * SIZE, HEADS, HEAD)
                wanted[[7, 19]] = (new[[0, 2]] / scale).to(cache.dtype).float()
                assert torch.equal(part.float().flatten(0, 1), wanted)


def test_write_cache_of_latent_rows():
    fields = {"use_mla": True, "num_kv_heads": 1, "head_size_v": HEAD_V}
    made = backend(lambda n, size, heads, head: (n, size, head), **fields)
    cache, rows = made.allocate_kv_cache(BLOCKS), torch.randn(2, 1, HEAD)
    made.impl("a", scale=1.0).write_cache(rows, None, cache, step([3, -1]))
    assert torch.equal(cache.flatten(0, 1)[3], rows[0, 0])
    assert cache.count_nonzero() == HEAD


def test_write_cache_writes_nothing_where_there_is_nothing_to_write():
    made = backend()
    impl, cache = made.impl("a", scale=1.0), made.allocate_kv_cache(BLOCKS)
    impl.write_cache(None, None, None, step([-1, -1]))  # a profiling run
    impl.write_cache(None, None, cache, step([]))
    for attn_type in ("encoder", "encoder_only"):
        made.impl("b", scale=1.0, attn_type=attn_type).write_cache(*torch.ones(2, 1, HEADS, HEAD), cache, step([3]))
    key = torch.ones(1, HEADS, HEAD)
    for given, name in (((None, key), "key"), ((key, None), "value")):
        with pytest.raises(ValueError, match=rf"^{name}: None found for 1 token to write"):
            impl.write_cache(*given, cache, step([3]))
    with pytest.raises(ValueError, match=r"^key: 1 token found for 2 slots"):
        impl.write_cache(key, key, cache, step([3, 4]))
    assert not cache.any()


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        (torch.Tensor.to_sparse, "of layout torch.sparse_coo"),
        (torch.Tensor._neg_view, "a lazy negative"),
        (lambda cache: cache.untyped_storage().resize_(8) and cache, "shape .* reaches beyond the tensor's memory"),
    ],
    ids=["sparse", "lazy negative", "beyond its memory"],
)
def test_a_cache_that_cannot_be_read_by_address(spoilt, why):
    made = backend()
    for given in (made.allocate_kv_cache(BLOCKS), list(made.allocate_kv_cache(BLOCKS))):
        if isinstance(given, list):
            given[1] = spoilt(given[1].clone())
        else:
            given = spoilt(given)
        with pytest.raises(ValueError, match=rf"^kv_cache: .*{why}"):
            made.kv_cache_views(given)


def test_views_of_bytes_that_are_made_in_inference_mode_can_be_written_to_outside_of_it():
    """A layer keeps them."""
    made = backend(kv_cache_dtype="fp8_e4m3")
    cache = made.allocate_kv_cache(BLOCKS).view(torch.uint8)
    with torch.inference_mode():
        for form in (cache, tuple(cache)):
            assert not any(view.is_inference() for view in made.kv_cache_views(form))


@pytest.mark.parametrize("kind", [Backend, ReferenceBackend])
@pytest.mark.parametrize("pairs", [False, True], ids=["whole", "pairs"])
def test_blocks_go_between_an_fp8_cache_of_floats_and_one_of_bytes(kind, pairs):
    base = {"num_heads": 4, "num_kv_heads": HEADS, "head_size": HEAD, "dtype": "float32", "block_size": SIZE}
    made = kind(BackendConfig(**base, kv_cache_dtype="fp8_e4m3"))
    for one_is_bytes in (False, True):
        caches = [made.allocate_kv_cache(BLOCKS) for _ in range(2)]
        given = [tuple(cache) if pairs else cache for cache in caches]
        given[one_is_bytes] = tuple(caches[one_is_bytes].view(torch.uint8))
        if not pairs:
            given[one_is_bytes] = caches[one_is_bytes].view(torch.uint8)
        caches[0].view(torch.uint8).copy_(numbered(caches[0].shape) % 100)
        made.swap_blocks(*given, [[1, 3]])
        assert torch.equal(*(cache.view(torch.uint8)[:, block] for cache, block in zip(caches, (1, 3), strict=True)))
    with pytest.raises(ValueError, match=r"has .*float8_e4m3fn"):
        made.swap_blocks(caches[0], caches[1].view(torch.float8_e5m2), [[1, 3]])
