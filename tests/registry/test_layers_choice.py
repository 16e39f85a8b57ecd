"""A backend for each kind of layers of one model: they share a batch, its lengths and, where they can, a block size."""

import logging

import pytest
from lookalikes import record

import attncore
from attncore import AttentionRequest, BackendSpec, Host, KVCacheGroup, MultipleOf
from attncore.registry.choice import negotiate_installed
from attncore.registry.plugins import load

FIELDS = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}


def spec(name, **facts):
    base = {
        "devices": {"cuda": 10},
        "dtypes": {"bfloat16"},
        "head_sizes": {64, 128},
        "block_sizes": MultipleOf(16),
        "features": {"sliding_window"},
    }
    return BackendSpec(name=name, api=1, factory="m:C", **{**base, **facts})


def kinds(**each):
    return {name: AttentionRequest(**{**FIELDS, **fields}) for name, fields in each.items()}


FULL_AND_WINDOW = {"full": {}, "window": {"sliding_window": 128}}


@pytest.fixture
def layers(monkeypatch):
    def ask(requests, *specs, **fields):
        plugins = load.Registry(tuple(record(one, f"attn-{one.name}") for one in specs), {})
        monkeypatch.setattr(negotiate_installed, "registry", lambda: plugins)
        return attncore.select_for_layers(requests, host=Host.assume("sm_90"), **fields)

    return ask


def names(found):
    return {kind: choice.name for kind, choice in found.items()}


def test_one_backend_for_all_comes_before_a_better_place_for_some(layers):
    some = spec("some", devices={"cuda": 90}, features=set())
    found = layers(kinds(**FULL_AND_WINDOW), some, spec("all"))
    assert names(found) == {"full": "all", "window": "all"}
    assert "some (attn-some 0.1.0): usable, not chosen" in found.explain()


def test_a_backend_for_any_device_serves_only_what_no_other_does(layers):
    everywhere = spec("everywhere", devices={"any": 99}, features={"sliding_window", "sinks"})
    found = layers(kinds(**FULL_AND_WINDOW, sinks={"sinks": True}), everywhere, spec("fast"))
    assert names(found) == {"full": "fast", "window": "fast", "sinks": "everywhere"}


def test_what_a_request_says_comes_first(layers):
    some, both = spec("some", devices={"cuda": 90}, features=set()), spec("all")
    asked = kinds(full={"prefer": ("some",)}, window={"sliding_window": 128})
    assert names(layers(asked, some, both)) == {"full": "some", "window": "all"}
    asked = kinds(full={"backend": "some"}, window={"sliding_window": 128})
    assert names(layers(asked, some, both)) == {"full": "some", "window": "all"}


def test_fields_replace_those_of_every_request(layers):
    found = layers(kinds(**FULL_AND_WINDOW), spec("a"), head_size=128, manager_block_size=64)
    assert {choice.request.head_size for choice in found.values()} == {128}
    assert found["window"].request.sliding_window == 128
    assert found["full"].blocks_per_manager_block == 64 // found["full"].block_size


def test_backends_that_pad_alike_are_chosen(layers):
    one = {"pad_seq_len": 1}
    found = layers(
        kinds(**FULL_AND_WINDOW),
        spec("best", devices={"cuda": 90}, features=set(), **one),
        spec("second", devices={"cuda": 80}, features=set()),
        spec("windows", devices={"cuda": 20}),
        exclude=(),
    )
    assert names(found) == {"full": "windows", "window": "windows"}
    found = layers(
        kinds(full={}, sinks={"sinks": True}),
        spec("best", devices={"cuda": 90}, **one),
        spec("second", devices={"cuda": 80}),
        spec("sinks", features={"sinks"}, head_sizes={64}),
        prefer=("sinks",),
    )
    assert names(found) == {"full": "sinks", "sinks": "sinks"}


def test_none_pads_as_another_is_refused_by_name_of_both_kinds(layers):
    with pytest.raises(attncore.NoBackendError) as caught:
        layers(
            kinds(full={"backend": "a"}, window={"sliding_window": 128, "backend": "b"}),
            spec("a", pad_seq_len=1),
            spec("b", pad_seq_len=0),
        )
    words = str(caught.value)
    assert "layers 'full': backend: 'a', named by the request, cannot be used on cuda:sm_90" in words
    assert "its padded rows have seq_lens 1" in words
    assert "the others' backends: layers 'window': 0" in words


def test_a_kind_that_nobody_serves_is_named_with_all_reasons(layers):
    with pytest.raises(attncore.NoBackendError) as caught:
        layers(kinds(full={}, sinks={"sinks": True}), spec("a"), spec("b", unsupported={"sinks": "no place for them"}))
    words = str(caught.value)
    assert words.startswith("layers 'sinks': no backend can be used on cuda:sm_90\n")
    assert "b (attn-b 0.1.0): sinks not supported by attn-b 0.1.0: no place for them" in words
    assert "'full'" not in words


def test_one_block_size_where_they_have_one_in_common(layers):
    found = layers(
        kinds(full={"backend": "a"}, window={"sliding_window": 128, "backend": "b"}),
        spec("a", block_sizes={16, 64, 256}, preferred_block_size=16),
        spec("b", block_sizes={64, 512}, preferred_block_size=512),
    )
    assert {kind: choice.block_size for kind, choice in found.items()} == {"full": 64, "window": 64}
    found = layers(
        kinds(full={"backend": "a"}, window={"sliding_window": 128, "backend": "b"}, small={"sliding_window": 8}),
        spec("a", block_sizes={16, 64}),
        spec("b", block_sizes={256}),
        prefer=("b",),
    )
    assert {kind: choice.block_size for kind, choice in found.items()} == {"full": 16, "window": 256, "small": 256}


def test_groups_of_the_batch(layers):
    found = layers(
        kinds(
            full={},
            window={"sliding_window": 128},
            capped={"sliding_window": 128, "sinks": True},
            wide={"head_size": 128},
            cross={"features": {"encoder_decoder"}},
        ),
        spec("a", features={"sliding_window", "sinks", "encoder_decoder"}, preferred_block_size=32),
        manager_block_size=64,
        num_blocks=1000,
    )
    assert found.group_of == {"full": "full", "window": "window", "capped": "window", "wide": "wide", "cross": "cross"}
    assert found.kv_cache_groups() == (
        KVCacheGroup("full", 64, 32, None, False, 500),
        KVCacheGroup("window", 64, 32, 128, False, 500),
        KVCacheGroup("wide", 64, 32, None, False, 500),
        KVCacheGroup("cross", 64, 32, None, True, 500),
    )
    assert "group 'window': a, block_size 32, kv_cache_layout NHD, layers 'window', 'capped'" in found.explain()
    assert found.as_json()["capped"]["group"] == "window"
    assert repr(found).startswith("LayersChoice(\n 'full': <Choice a")


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ([1], TypeError, "kinds: [1] is not a mapping of kinds of layers to AttentionRequest"),
        ({}, ValueError, "kinds: none has a decoder's own keys"),
        ({"full": {}}, TypeError, "kinds['full']: {} is not an AttentionRequest"),
        ({3: AttentionRequest(**FIELDS)}, TypeError, "kinds: 3 is not the name of a kind of layers"),
        (kinds(x={"features": {"encoder_decoder"}}), ValueError, "kinds: none has a decoder's own keys"),
        (
            kinds(a={}, x={"features": {"encoder_decoder"}}, y={"features": {"encoder_decoder"}}),
            ValueError,
            "kinds: 'x' and 'y' both ask for encoder_decoder; a batch has one cross group",
        ),
        (kinds(a={}, enc={"features": {"encoder"}}), ValueError, "kinds['enc'].features: encoder; such layers keep no"),
    ],
)
def test_mistakes(layers, asked, error, text):
    with pytest.raises(error) as caught:
        layers(asked, spec("a"))
    assert str(caught.value).startswith(text)


def test_a_mistake_of_a_field_names_it_and_the_kind(layers):
    with pytest.raises(TypeError, match=r"^head_siz: a request has no such field; did you mean head_size\?"):
        layers(kinds(full={}), spec("a"), head_siz=3)
    with pytest.raises(ValueError, match=r"^kinds\['full'\]\.num_kv_heads: 3 does not divide num_heads 8"):
        layers(kinds(full={}), spec("a"), num_kv_heads=3)


def test_each_choice_is_a_line_of_the_log(layers, caplog):
    caplog.set_level(logging.INFO, "attncore")
    layers(kinds(**FULL_AND_WINDOW), spec("some", devices={"cuda": 90}, features=set()), spec("all"))
    told = [one.getMessage() for one in caplog.records]
    assert told == [
        "using all (attn-all 0.1.0) for layers 'full' on cuda:sm_90 because it goes best with the backends that are "
        "chosen with it",
        "using all (attn-all 0.1.0) for layers 'window' on cuda:sm_90 because no other backend can be used",
    ]


def test_the_environment_names_a_backend_for_every_kind(layers, monkeypatch):
    monkeypatch.setenv("ATTNCORE_BACKEND", "a")
    with pytest.raises(
        attncore.NoBackendError, match="layers 'sinks': backend: 'a', named by ATTNCORE_BACKEND, cannot"
    ):
        layers(kinds(full={}, sinks={"sinks": True}), spec("a"), spec("b", features={"sinks"}))
    with pytest.warns(attncore.FallbackWarning, match=r"using b \(attn-b 0.1.0\) for layers 'sinks' on cuda"):
        found = layers(
            kinds(full={}, sinks={"sinks": True}), spec("a"), spec("b", features={"sinks"}), policy="fallback"
        )
    assert names(found) == {"full": "a", "sinks": "b"}


def test_many_kinds_and_backends_end_soon(layers):
    """Five kinds, and twenty backends of which none serves two of them."""
    features = ("alibi", "kv_scales", "logits_soft_cap", "lse", "sinks")
    specs = [spec(f"b{i}", features={features[i % 5]}, head_sizes={64}) for i in range(20)]
    asked = kinds(**{name: {"features": {name}} for name in features})
    found = layers(asked, *specs)
    assert len({choice.name for choice in found.values()}) == 5
