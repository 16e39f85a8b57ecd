"""The base classes of a backend: what comes complete, and what is refused."""

import numpy as np
import pytest

from attncore import (
    AttentionBackend,
    AttentionImpl,
    AttentionState,
    AttentionType,
    BackendConfig,
    BackendSpec,
    MultipleOf,
    Option,
    PlanKey,
    Variant,
    select,
)

torch = pytest.importorskip("torch")


class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None):
        return query


class Backend(AttentionBackend):
    impl_class = Impl

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class BlocksFirst(Backend):
    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (num_blocks, 2, num_kv_heads, block_size, head_size)


def spec(**facts):
    return BackendSpec(
        name="acme",
        api=1,
        factory="m:C",
        devices={"any": 1},
        dtypes={"float32"},
        head_sizes={8},
        **{"block_sizes": MultipleOf(1), **facts},
    )


def config(**fields):
    base = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "block_size": 4}
    return BackendConfig(**{**base, **fields})


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("num_heads", 0, ValueError),
        ("num_kv_heads", 3, ValueError),
        ("head_size", 8.0, TypeError),
        ("block_size", True, TypeError),
    ],
)
def test_configurations_are_checked(field, value, error):
    with pytest.raises(error) as caught:
        config(**{field: value})
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("changes", "facts", "says"),
    [
        ({"head_size": 16}, {}, "head_size: 16 found; acme accepts 8"),
        ({"head_size_v": 4}, {}, "head_size_v: 4 found; acme accepts the same as head_size, 8"),
        ({"head_size_v": 4}, {"head_size_v": {2, 6}}, "head_size_v: 4 found; acme accepts 2, 6"),
        ({"block_size": 24}, {"block_sizes": MultipleOf(16)}, "block_size: 24 found; acme accepts multiples of 16"),
        ({"dtype": "bfloat16"}, {}, "dtype: bfloat16 found; acme accepts float32"),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, "kv_cache_dtype: fp8_e4m3 found; acme accepts auto"),
        ({"kv_cache_layout": "HND"}, {}, "kv_cache_layout: HND found; acme accepts NHD"),
        ({"use_mla": True, "num_kv_heads": 1}, {}, "use_mla: True found; acme reads no latent cache"),
        ({}, {"use_mla": True, "mla_only": True}, "use_mla: False found; acme reads latent caches only"),
        ({"num_heads": 8}, {"max_group_size": 2}, "num_heads: 8 over num_kv_heads 2 found, 4 query heads"),
        ({"max_model_len": 65}, {"max_model_len": 64}, "max_model_len: 65 found; acme accepts 64 at most"),
        ({"options": {"fast": True}}, {}, "options: 'fast' is not declared by acme; declared: none"),
        ({"options": {"fast": 1}}, {"options": {"fast": Option(bool, "go")}}, "options: 'fast': 1 is not a bool"),
        ({"variant": "c"}, {"variants": (Variant("a"), Variant("b"))}, "variant: 'c' found; acme has a and b"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_configuration_is_compared_with_the_spec(changes, facts, says):
    with pytest.raises(ValueError) as caught:
        Backend(config(spec=spec(**facts), **changes))
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("given", [5, "x", {}, None])
def test_what_is_no_configuration_is_named(given):
    for make in (
        Backend,
        select(num_heads=4, num_kv_heads=2, head_size=8, dtype="float32", backend="reference").create_for,
    ):
        with pytest.raises(TypeError, match=f"^config: {type(given).__name__} found; give a BackendConfig"):
            make(given)


def test_a_configuration_that_the_spec_accepts():
    same_dtype = {"kv_cache_dtype": "float32", "head_size_v": 8, "options": {"fast": None}}
    Backend(config(spec=spec(options={"fast": Option(bool, "go")}), **same_dtype))
    Backend(config(head_size=16, dtype="bfloat16"))  # made by hand, with nothing to be compared with


def test_a_spec_with_variants_is_narrowed_to_the_one_that_the_configuration_names():
    facts = {"variants": (Variant("a", head_sizes={16}), Variant("b"))}
    backend = Backend(config(spec=spec(**facts), variant="a", head_size=16))
    assert backend.spec.head_sizes == backend.config.spec.head_sizes == {16}
    with pytest.raises(ValueError, match="head_size: 8 found; acme's variant a accepts 16"):
        Backend(config(spec=spec(**facts), variant="a"))


def test_a_vendor_must_write_both_methods():
    class NoForward(AttentionImpl):
        pass

    class NoShape(AttentionBackend):
        impl_class = NoForward

    with pytest.raises(TypeError, match="kv_cache_shape"):
        NoShape(config())
    with pytest.raises(TypeError, match="forward"):
        NoForward(Backend(config()), "x", scale=1.0)


def test_the_name_is_the_specs():
    assert Backend(config()).name == "Backend"
    backend = Backend(config(spec=spec()))
    assert (backend.name, backend.get_name(), backend.spec.name) == ("acme", "acme", "acme")


def test_impl_hands_everything_on():
    backend = Backend(config(kv_cache_dtype="fp8_e4m3"))
    impl = backend.impl(
        "layers.0",
        scale=0.5,
        sliding_window=7,
        logits_soft_cap=30.0,
        alibi_slopes=[1, 2, 3, 4],
        sinks=[0, 0, 0, 1],
        k_scale=2.0,
        v_scale=3.0,
    )
    assert isinstance(impl, Impl)
    found = (impl.backend, impl.layer_name, impl.scale, impl.sliding_window, impl.logits_soft_cap)
    assert found == (backend, "layers.0", 0.5, 7, 30.0)
    assert (impl.alibi_slopes, impl.sinks.tolist(), impl.k_scale, impl.v_scale) == ([1, 2, 3, 4], [0, 0, 0, 1], 2, 3)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sliding_window": 0}, "sliding_window: 0 is below 1"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap: -1.0 is not a positive number"),
        ({"logits_soft_cap": float("inf")}, "logits_soft_cap: inf is not a positive number"),
        ({"scale": float("nan")}, "scale: nan is not a positive number"),
        ({"scale": -float("inf")}, "scale: -inf is not a positive number"),
        ({"scale": "x"}, "scale: 'x' is not a positive number"),
        ({"scale": -0.2}, "scale: -0.2 is not a positive number"),
        ({"scale": 0.0}, "scale: 0.0 is not a positive number"),
        ({"scale": None}, "scale: None is not a positive number"),
        ({"scale": True}, "scale: True is not a positive number"),
        ({"scale": 10**400}, "scale: an integer of 1329 bits is not a positive number"),
        ({"alibi_slopes": [1.0]}, "alibi_slopes: 1 given; the backend has 4 query heads"),
        ({"sinks": [1.0] * 5}, "sinks: 5 given"),
        ({"sinks": 3}, "sinks: 3 has no length; give a number for each query head"),
        ({"alibi_slopes": 3}, "alibi_slopes: 3 has no length"),
        ({"alibi_slopes": torch.tensor(3.0)}, "alibi_slopes: "),
        ({"alibi_slopes": torch.ones(4, 1)}, "alibi_slopes: shape (4, 1) given"),
        ({"sinks": ["a", "b", "c", "d"]}, "sinks[0]: 'a' is not a finite number"),
        ({"sinks": "1234"}, "sinks[0]: '1' is not a finite number"),
        ({"sinks": [0, 1, None, 2]}, "sinks[2]: None is not a finite number"),
        ({"sinks": [[0], [1], [2], [3]]}, "sinks[0]: [0] is not a finite number"),
        ({"alibi_slopes": [0, float("nan"), 1, 2]}, "alibi_slopes[1]: nan is not a finite number of float32"),
        ({"alibi_slopes": [0, 1, -float("inf"), 2]}, "alibi_slopes[2]: -inf is not a finite number"),
        ({"sinks": np.array([0, 1, 2, np.inf])}, "sinks[3]: inf is not a finite number"),
        ({"sinks": [0, 1e39, 1, 2]}, "sinks[1]: 1e+39 is not a finite number of float32"),
        ({"sinks": [0, 1, True, 2]}, "sinks[2]: True is not a finite number"),
        ({"sinks": [0, 1, torch.tensor(True), 2]}, "sinks[2]: tensor(True) is not a finite number"),
        ({"sinks": torch.ones(4, dtype=torch.complex64)}, "sinks: torch.complex64 given, which are no real numbers"),
        ({"sinks": np.arange(4).astype("m8[s]")}, "sinks: timedelta64[s] given, which are no real numbers"),
        ({"sinks": torch.ones(4, device="meta")}, "sinks: on meta"),
        ({"sinks": b"abcd"}, "sinks: bytes found, which hold text; give a list or an array of numbers"),
        ({"sinks": {0: 1, 2: 3, 4: 5, 6: 7}}, "sinks: dict found"),
        ({"sinks": torch.ones(4).to_sparse()}, "sinks: of layout torch.sparse_coo"),
        ({"scale": np.True_}, "scale: np.True_ is not a positive number"),
        ({"scale": torch.tensor(True)}, "scale: tensor(True) is not a positive number"),
        ({"scale": np.timedelta64(3, "s")}, "scale: np.timedelta64(3,'s') is not a positive number"),
        ({"scale": np.complex64(1j)}, "scale: "),
        ({"layer_name": 3}, "layer_name: 3 is not a string"),
    ],
)
def test_layers_out_of_range(fields, text):
    with pytest.raises(ValueError) as caught:
        Backend(config()).impl(**{"layer_name": "x", "scale": 1.0, **fields})
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"kv_cache_layout": "NHDX"}, ValueError, "kv_cache_layout: 'NHDX' is not one of NHD, HND"),
        ({"kv_cache_layout": None}, ValueError, "kv_cache_layout: None is not one of"),
        ({"device": "the gpu"}, ValueError, "device: 'the gpu' is not a device as torch writes it"),
        ({"device": 0}, ValueError, "device: 0 is not a device"),
        ({"logits_soft_cap": float("inf")}, ValueError, "logits_soft_cap: inf is not a positive number"),
        ({"logits_soft_cap": "30"}, ValueError, "logits_soft_cap: '30' is not a positive number"),
        ({"use_mla": 1}, TypeError, "use_mla: 1 is not True or False"),
        ({"options": 3}, TypeError, "options: 3 cannot be read as a mapping"),
        ({"dtype": 10**5000}, TypeError, "dtype: an integer of 16610 bits found; give a name as text"),
        ({"dtype": ["float32"]}, TypeError, "dtype: ['float32'] found; give a name as text"),
        ({"kv_cache_dtype": None}, TypeError, "kv_cache_dtype: None found; give a name as text, such as 'auto'"),
        ({"spec": "flash"}, TypeError, "spec: 'flash' is not a BackendSpec; give that of a choice, or None"),
        ({"spec": object}, TypeError, "spec: <class 'object'> is not a BackendSpec"),
        ({"variant": 10**5000}, TypeError, "variant: an integer of 16610 bits found; give a name as text"),
    ],
)
def test_configurations_that_make_no_sense(fields, error, text):
    with pytest.raises(error) as caught:
        config(**fields)
    assert str(caught.value).startswith(text)


def test_a_spec_that_does_not_declare_a_feature_refuses_its_layers():
    backend = Backend(config(spec=spec(features={"sliding_window"}, unsupported={"sinks": "there are none"})))
    backend.impl("x", scale=1.0, sliding_window=4)
    with pytest.raises(ValueError, match="sinks: acme does not support sinks: there are none"):
        backend.impl("x", scale=1.0, sinks=[0.0] * 4)
    with pytest.raises(ValueError, match="v_scale: acme does not support kv_scales: its spec does not declare it"):
        backend.impl("x", scale=1.0, v_scale=2.0)
    standard = Backend(config(spec=spec(features={"alibi_standard"})))
    standard.impl("x", scale=1.0, alibi_slopes=[1.0] * 4)


def test_plan_runs_once_for_each_distinct_key():
    class Planned(Backend):
        def __init__(self, config):
            super().__init__(config)
            self.planned = []

        def plan_layers(self, metadata, key):
            self.planned.append((metadata, key))

    backend = Planned(config())
    for window in (None, 8, None, 8):
        backend.impl("x", scale=1.0, sliding_window=window)
    backend.plan("step")
    assert backend.planned == [("step", PlanKey(1.0, None, None)), ("step", PlanKey(1.0, 8, None))]
    assert backend.plan_keys == (PlanKey(1.0, None, None), PlanKey(1.0, 8, None))
    assert backend.plan_keys is backend.plan_keys
    backend.forget_layers()
    assert backend.plan_keys == ()


def test_a_layer_that_its_class_refuses_is_not_planned_for():
    class Refuses(Backend.impl_class):
        def __init__(self, *args, **kwargs):
            raise ValueError("scale: not this one")

    class Refusing(Backend):
        impl_class = Refuses

    backend = Refusing(config())
    with pytest.raises(ValueError, match="scale: not this one"):
        backend.impl("x", scale=1.0)
    assert backend.plan_keys == ()


@pytest.mark.parametrize("kind", [Backend, BlocksFirst])
def test_caches_are_zeroed_and_have_the_blocks_asked_for(kind):
    backend = kind(config())
    cache = backend.allocate_kv_cache(5)
    assert cache.shape == backend.kv_cache_shape(5, 4, 2, 8)
    assert cache.dtype == torch.float32
    assert not cache.any()
    assert cache.shape[backend.kv_cache_block_axis()] == 5


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype"),
    [("auto", "float32"), ("bfloat16", "bfloat16"), ("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")],
)
def test_cache_dtypes(kv_cache_dtype, dtype):
    cache = Backend(config(kv_cache_dtype=kv_cache_dtype)).allocate_kv_cache(1)
    assert cache.dtype == getattr(torch, dtype)


def test_caches_that_no_kernel_could_address():
    backend = Backend(config(spec=spec(max_block_id=7)))
    backend.allocate_kv_cache(8)
    with pytest.raises(ValueError, match="num_blocks: 9 found; acme's largest block id is 7, give 8 at most"):
        backend.allocate_kv_cache(9)
    with pytest.raises(ValueError, match="num_blocks: 0 is below 1"):
        backend.allocate_kv_cache(0)


@pytest.mark.parametrize("kind", [Backend, BlocksFirst])
def test_copying_and_swapping_blocks(kind):
    backend = kind(config())
    axis = backend.kv_cache_block_axis()
    one, two = backend.allocate_kv_cache(4), backend.allocate_kv_cache(4)
    for block in range(4):
        one.select(axis, block).fill_(block)
    backend.swap_blocks(one, two, [(1, 3), (2, 0)])
    assert [two.select(axis, block).unique().tolist() for block in range(4)] == [[2], [0], [0], [1]]
    backend.copy_blocks([one, two], torch.tensor([[1, 2], [2, 1]]))
    assert [one.select(axis, block).unique().tolist() for block in range(4)] == [[0], [2], [1], [3]]
    backend.copy_blocks([one], np.empty((0, 2), np.int64))


def test_host_arrays_are_shared_on_a_cpu():
    array = np.arange(3, dtype=np.int32)
    tensor = Backend(config()).from_host(array)
    array[1] = 9
    assert tensor.tolist() == [0, 9, 2]


def test_a_cache_without_an_axis_of_blocks_is_told():
    class Odd(Backend):
        def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
            return (7, block_size)

    with pytest.raises(ValueError, match="kv_cache_shape: of Odd, 0 axes grow with num_blocks, not 1"):
        Odd(config()).kv_cache_block_axis()


def test_the_names_of_the_first_generation():
    from attncore.builder import CommonAttentionMetadata, CommonMetadataBuilder

    backend = Backend(config())
    assert backend.get_impl_cls() is Impl
    assert issubclass(backend.get_metadata_cls(), CommonAttentionMetadata)
    assert issubclass(backend.get_builder_cls(), CommonMetadataBuilder)
    assert backend.get_state_cls() is AttentionState
    assert backend.get_kv_cache_shape(3, 4, 2, 8) == (2, 3, 4, 2, 8)
    state = backend.get_state_cls()(backend)
    with state.graph_capture(4):
        state.begin_forward(None)
    with pytest.raises(ValueError, match="max_batch_size: 0"):
        state.graph_capture(0)
    assert AttentionType("encoder_decoder") is AttentionType.ENCODER_DECODER
