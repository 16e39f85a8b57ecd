"""Types of attention, log-sum-exp and latent caches in the base classes: what is handed on, and what is refused."""

import pytest

from attncore import AttentionBackend, AttentionImpl, AttentionType, BackendConfig, BackendSpec, MultipleOf, PlanKey


class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None):
        return query


class OldImpl(Impl):
    """Written when every layer was a decoder's."""

    def __init__(
        self, backend, layer_name, *, scale, sliding_window=None, logits_soft_cap=None, alibi_slopes=None, sinks=None,
        k_scale=1.0, v_scale=1.0,
    ):  # fmt: skip
        super().__init__(backend, layer_name, scale=scale)


class Backend(AttentionBackend):
    impl_class = Impl

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class OldBackend(Backend):
    impl_class = OldImpl


def config(**fields):
    base = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "block_size": 4}
    return BackendConfig(**{**base, **fields})


def spec(**facts):
    sizes = {"head_sizes": {8}, "block_sizes": MultipleOf(1)}
    return BackendSpec(name="acme", api=1, factory="m:C", devices={"any": 1}, dtypes={"float32"}, **sizes, **facts)


@pytest.mark.parametrize("given", [*AttentionType, *map(str, AttentionType)])
def test_a_layer_knows_its_type(given):
    impl = Backend(config()).impl("x", scale=1.0, attn_type=given)
    assert impl.attn_type is AttentionType(given)
    assert Backend(config()).impl("x", scale=1.0).attn_type is AttentionType.DECODER


def test_a_class_that_knows_no_types_runs_decoder_layers():
    backend = OldBackend(config())
    assert backend.impl("x", scale=1.0, attn_type="decoder").attn_type is AttentionType.DECODER
    with pytest.raises(TypeError, match="attn_type"):
        backend.impl("x", scale=1.0, attn_type="encoder")


def test_layers_of_different_types_share_no_plan():
    backend = Backend(config())
    for kind in ("decoder", "encoder_decoder", "decoder", "encoder"):
        backend.impl("x", scale=1.0, attn_type=kind)
    types = (AttentionType.DECODER, AttentionType.ENCODER_DECODER, AttentionType.ENCODER)
    assert backend.plan_keys == tuple(PlanKey(1.0, None, None, kind) for kind in types)
    assert PlanKey(1.0, None, None).attn_type is AttentionType.DECODER


@pytest.mark.parametrize(
    ("features", "refused"),
    [
        (set(), {"encoder", "encoder_only", "encoder_decoder"}),
        ({"encoder"}, {"encoder_decoder"}),
        ({"encoder_decoder"}, {"encoder", "encoder_only"}),
    ],
)
def test_a_type_that_the_spec_does_not_declare_is_refused(features, refused):
    backend = Backend(config(spec=spec(features=features)))
    for kind in AttentionType:
        if kind in refused:
            with pytest.raises(
                ValueError, match=r"^attn_type: acme does not support encoder.*: its spec does not declare"
            ):
                backend.impl("x", scale=1.0, attn_type=kind)
        else:
            backend.impl("x", scale=1.0, attn_type=kind)
    assert len(backend.plan_keys) == 4 - len(refused)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"attn_type": "cross"}, "attn_type: 'cross' is not one of decoder, encoder, encoder_only, encoder_decoder"),
        ({"attn_type": None}, "attn_type: None is not one of"),
        ({"attn_type": "encoder_decoder", "sliding_window": 4}, "sliding_window: given for an encoder_decoder layer"),
        ({"attn_type": "encoder_decoder", "alibi_slopes": [1.0] * 4}, "alibi_slopes: given for an encoder_decoder"),
    ],
)
def test_layers_that_make_no_sense(fields, text):
    backend = Backend(config())
    with pytest.raises(ValueError) as caught:
        backend.impl("x", scale=1.0, **fields)
    assert str(caught.value).startswith(text)
    assert not backend.plan_keys


@pytest.mark.parametrize("kind", ["encoder", "encoder_only", "encoder_decoder"])
def test_a_latent_cache_is_for_decoders(kind):
    backend = Backend(config(num_kv_heads=1, use_mla=True))
    with pytest.raises(ValueError, match=f"^attn_type: {kind} found; a latent cache"):
        backend.impl("x", scale=1.0, attn_type=kind)


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"use_mla": True}, ValueError, "num_kv_heads: 2 found; a latent cache"),
        ({"use_mla": True, "num_kv_heads": 1, "head_size_v": 9}, ValueError, "head_size_v: 9 found; with use_mla"),
        ({"head_size_v": 0}, ValueError, "head_size_v: 0 is below 1"),
        ({"head_size_v": 8.0}, TypeError, "head_size_v: 8.0 is not an integer"),
    ],
)
def test_sizes_of_values(fields, error, text):
    with pytest.raises(error) as caught:
        config(**fields)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (None, "its class has no forward_with_lse"),
        ({}, "its spec does not declare lse"),
        ({"unsupported": {"lse": "the kernel keeps it"}}, "the kernel keeps it"),
        ({"features": {"lse"}}, "its class has no forward_with_lse"),
    ],
)
def test_log_sum_exp_is_refused_with_a_sentence(facts, why):
    impl = Backend(config(spec=None if facts is None else spec(**facts))).impl("x", scale=1.0)
    with pytest.raises(ValueError, match=r"^forward_with_lse: .* returns no log-sum-exp: ") as caught:
        impl.forward_with_lse(None, None, None, None, None)
    assert str(caught.value).endswith(why)
