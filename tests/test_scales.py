"""The scales of a layer's cache: what is taken, what is refused, how they change, how they are calculated."""

import pytest

torch = pytest.importorskip("torch")

from attncore import AttentionBackend, AttentionImpl, BackendConfig, BackendSpec  # noqa: E402

ALL = {"kv_scales", "kv_scales_on_device", "kv_scales_per_head"}


class Impl(AttentionImpl):
    changes = 0

    def forward(self, query, key, value, kv_cache, metadata, output=None):
        return query

    def scales_changed(self):
        self.changes += 1


class Backend(AttentionBackend):
    impl_class = Impl

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (num_blocks, 2, block_size, num_kv_heads, head_size)


def backend(features=ALL, **fields):
    spec = BackendSpec(
        name="acme", api=1, factory="acme:Backend", devices={"any": 1}, dtypes={"float32"}, head_sizes={8},
        block_sizes={4}, kv_cache_dtypes={"auto", "fp8_e4m3", "fp8_e5m2"}, features=features,
    )  # fmt: skip
    given = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "block_size": 4}
    return Backend(BackendConfig(**given, **{"device": "cpu", "kv_cache_dtype": "fp8_e4m3", "spec": spec, **fields}))


def layer(features=ALL, **scales):
    return backend(features).impl("x", scale=1.0, **scales)


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (0.0, "k_scale: 0.0"),
        (float("nan"), "k_scale: nan"),
        ("1", "k_scale: '1'"),
        (1e300, "k_scale: 1e+300 is outside"),
        (
            torch.ones(3),
            "k_scale: torch.float32 of shape (3,) found; give floats, one element or one for each of the 2",
        ),
        (torch.ones(2, 1), "k_scale: torch.float32 of shape (2, 1)"),
        (torch.ones(2, dtype=torch.int64), "k_scale: torch.int64 of shape (2,)"),
        (torch.ones(2, device="meta"), "k_scale: on the device meta"),
        (torch.ones(2).to_sparse(), "k_scale: of layout torch.sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "k_scale: nested"),
    ],
)
def test_what_is_no_scale_is_refused(scale, text):
    made = layer(k_scale=2.0, v_scale=torch.tensor(3.0))
    for refused in (lambda: layer(k_scale=scale), lambda: made.set_scales(scale, 5.0)):
        with pytest.raises(ValueError) as caught:
            refused()
        assert str(caught.value).startswith(text)
    assert (made.k_scale, made.v_scale.tolist(), made.changes) == (2.0, [3.0], 0)


@pytest.mark.parametrize(
    ("features", "scale", "missing"),
    [
        (set(), 2.0, "kv_scales"),
        (set(), torch.tensor(1.0), "kv_scales"),
        ({"kv_scales"}, torch.tensor(1.0), "kv_scales_on_device"),
        ({"kv_scales", "kv_scales_on_device"}, torch.ones(2), "kv_scales_per_head"),
    ],
)
def test_a_kind_that_the_spec_does_not_declare_is_refused(features, scale, missing):
    made = layer(features)
    for refused in (lambda: layer(features, v_scale=scale), lambda: made.set_scales(1.0, scale)):
        with pytest.raises(
            ValueError, match=f"^v_scale: acme does not support {missing}: its spec does not declare it"
        ):
            refused()
    assert (made.k_scale, made.v_scale) == (1.0, 1.0)


def test_a_cache_that_is_not_fp8_has_no_scales():
    plain = backend(kv_cache_dtype="auto")
    for scale, said in ((0.5, "0.5"), (torch.tensor(1.0), "<Tensor>")):
        with pytest.raises(
            ValueError, match=f"^k_scale: {said} given for a cache of auto; only an fp8 cache has scales"
        ):
            plain.impl("x", scale=1.0, k_scale=scale)
    made = plain.impl("x", scale=1.0)
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: auto found; scales are calculated for an fp8 cache"):
        made.calculate_kv_scales(torch.ones(1, 2, 8), torch.ones(1, 2, 8))


def test_a_layer_keeps_tensors_of_its_own():
    given = torch.tensor(2.0, dtype=torch.float16)
    made = layer(k_scale=given, v_scale=given)
    given.fill_(9.0)
    assert (made.k_scale.dtype, made.k_scale.tolist(), made.v_scale.tolist()) == (torch.float32, [2.0], [2.0])
    assert made.k_scale is not made.v_scale
    with torch.inference_mode():
        other = layer(k_scale=torch.tensor(2.0))
    other.set_scales(3.0, 1.0)  # outside of it, too
    assert other.k_scale.tolist() == [3.0]


def test_tensors_are_written_in_place_and_numbers_replaced():
    made = layer(k_scale=torch.ones(2), v_scale=2.0)
    held = made.k_scale
    made.set_scales(torch.tensor([3.0, 4.0]), 5.0)
    assert made.k_scale is held
    assert (held.tolist(), made.v_scale, made.changes) == ([3.0, 4.0], 5.0, 1)
    made.set_scales(torch.tensor(6.0), torch.tensor(7.0))  # one for all heads
    assert made.k_scale is held
    assert (held.tolist(), made.v_scale.tolist()) == ([6.0, 6.0], [7.0])
    made.set_scales(8.0, 9.0)
    assert (held.tolist(), made.v_scale.tolist()) == ([8.0, 8.0], [9.0])
    made.set_scales(1.0, torch.tensor([1.0, 2.0]))  # more than there is room for
    assert made.v_scale.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("dtype", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
@pytest.mark.parametrize("before", [1.0, torch.ones(1), torch.ones(2)], ids=["number", "tensor", "per head"])
def test_scales_are_calculated_from_a_first_batch(before, dtype, largest):
    made = backend(kv_cache_dtype=dtype).impl("x", scale=1.0, k_scale=before, v_scale=before)
    key, value = torch.zeros(3, 2, 8), torch.zeros(3, 2, 8)
    key[1, 0, 3], key[2, 1, 0], value[0, 1, 7] = -8.0, 2.0, 1e-3
    made.calculate_kv_scales(key, value)
    per_head = getattr(before, "shape", ()) == (2,)
    wanted = ([8.0, 2.0], [None, 1e-3]) if per_head else ([8.0], [1e-3])
    for found, most in zip((made.k_scale, made.v_scale), wanted, strict=True):
        expected = [1.0 if number is None else number * 2 / largest for number in most]  # a head of zeros has 1
        torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 1, 8), (3, 16)])
def test_a_batch_without_tokens_or_of_other_heads_is_refused(shape):
    made = layer(k_scale=torch.ones(1))
    with pytest.raises(ValueError, match=r"^key: shape .* found; give \(tokens, 2, head size\)"):
        made.calculate_kv_scales(torch.ones(shape), torch.ones(3, 2, 8))
    assert made.k_scale.tolist() == [1.0]


@pytest.mark.parametrize("wrong", [float("inf"), -float("inf"), float("nan")])
def test_a_number_that_is_not_finite_is_not_counted(wrong):
    made = layer(k_scale=torch.ones(1), v_scale=torch.ones(2))
    key, value = torch.full((3, 2, 8), 4.0), torch.full((3, 2, 8), wrong)
    key[1, 1, 3] = wrong
    value[:, 1] = 2.0
    made.calculate_kv_scales(key, value)
    torch.testing.assert_close(made.k_scale, torch.tensor([4.0 * 2 / 448]))
    torch.testing.assert_close(made.v_scale, torch.tensor([1.0, 2.0 * 2 / 448]))  # of none that counts, 1
    made.calculate_kv_scales(torch.full((1, 2, 8), 1e300, dtype=torch.float64), value)
    assert made.k_scale.isfinite().all()


def test_a_latent_cache_has_its_values_among_the_keys():
    spec = BackendSpec(
        name="acme", api=1, factory="acme:Backend", devices={"any": 1}, dtypes={"float32"}, head_sizes={8},
        head_size_v={4}, use_mla=True, block_sizes={4}, kv_cache_dtypes={"fp8_e4m3"}, features=ALL,
    )  # fmt: skip
    latent = Backend(
        BackendConfig(
            num_heads=4, num_kv_heads=1, head_size=8, head_size_v=4, use_mla=True, dtype="float32", block_size=4,
            device="cpu", kv_cache_dtype="fp8_e4m3", spec=spec,
        )
    )  # fmt: skip
    made = latent.impl("x", scale=1.0)
    key = torch.ones(1, 1, 8)
    key[..., 4:] = 3.0
    made.calculate_kv_scales(key, None)
    assert made.k_scale.item() == pytest.approx(6 / 448)
    assert made.v_scale.item() == pytest.approx(6 / 448)  # values are read from what was written by k_scale


def test_features_of_scales_build_on_one_another():
    with pytest.raises(ValueError, match="features: 'kv_scales_per_head' is declared without 'kv_scales_on_device'"):
        backend({"kv_scales", "kv_scales_per_head"})


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: torch.ones(3, 2, 8).to_sparse(), ValueError, "of layout torch.sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.ones(2, 8)], layout=torch.jagged), ValueError, "nested"),
        (lambda: torch.ones(3, 2, 8, device="meta"), ValueError, "on the device meta"),
        (lambda: torch.ones(3, 2, 8, dtype=torch.bool), ValueError, "torch.bool found; give floats"),
        (lambda: torch.ones(3, 2, 8, dtype=torch.int64), ValueError, "torch.int64 found; give floats"),
        (lambda: torch.ones(3, 2, 8).to(torch.float8_e4m3fn), ValueError, "torch.float8_e4m3fn found; give floats"),
        (lambda: torch.ones(3, 2, 8).numpy(), TypeError, "ndarray found; give a torch tensor"),
        (lambda: [[[1.0] * 8] * 2], TypeError, "list found; give a torch tensor"),
    ],
    ids=["sparse", "nested", "meta", "bool", "int64", "fp8", "numpy", "a list"],
)
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_batch_that_has_no_largest_number_is_refused(name, make, error, said):
    made = layer(k_scale=2.0, v_scale=3.0)
    given = {"key": torch.ones(3, 2, 8), "value": torch.ones(3, 2, 8)} | {name: make()}
    with pytest.raises(error, match=f"^{name}: {said}"):
        made.calculate_kv_scales(**given)
    assert (made.k_scale, made.v_scale, made.changes) == (2.0, 3.0, 0)
