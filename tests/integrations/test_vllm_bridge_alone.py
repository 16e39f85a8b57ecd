"""What of the bridge into vLLM works without vLLM: names, settings, refusals, requests, versions."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest

from attncore.integrations.vllm import limits, model_request, names, refusals, registration, settings, versions


def configuration(**over):
    """As much of vLLM's configuration as the bridge reads."""
    parts = {
        "model_config": SimpleNamespace(dtype="float32", max_model_len=128),
        "parallel_config": SimpleNamespace(),
        "scheduler_config": SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=False),
        "cache_config": SimpleNamespace(num_gpu_blocks=10, block_size=32),
        "compilation_config": SimpleNamespace(max_cudagraph_capture_size=96),
        "speculative_config": None,
        "additional_config": {},
    }
    return SimpleNamespace(**parts | over)


def layer(**over):
    """As much of a layer as a request is made of."""
    facts = {
        "num_heads": 4, "num_kv_heads": 2, "head_size": 16, "kv_cache_dtype": "auto", "sliding_window": None,
        "logits_soft_cap": None, "alibi_slopes": None, "sinks": None, "scales": (1.0, 1.0),
    }  # fmt: skip
    return SimpleNamespace(**facts | over)


def test_importing_the_package_loads_no_torch():
    code = (
        "import sys; from attncore.integrations.vllm import names, registration, settings, versions; "
        "print([one for one in ('torch', 'vllm', 'numba', 'pluggy') if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_registering_without_vllm_raises_nothing(caplog):
    if "vllm" in sys.modules:
        pytest.skip("vLLM is here")
    registration.register()
    assert "its backends are not known to vLLM" in caplog.text


@pytest.mark.parametrize(
    ("backend", "name"), [("flashinfer", "ATTNCORE_FLASHINFER"), ("acme-x", "ATTNCORE_ACME_X"), ("a.b", "ATTNCORE_A_B")]
)
def test_the_name_of_a_backend(backend, name):
    assert names.member_name(backend) == name


def test_a_name_is_that_of_an_installed_backend():
    assert names.backend_of("ATTNCORE_REFERENCE") == "reference"
    assert names.backend_of("ATTNCORE_NOWHERE") is None


def test_a_name_that_is_none_takes_none_from_another(site):
    site.plugin("acme")
    site.plugin("ACME", distribution="attn-other")  # no name of a backend, and the same in vLLM
    assert registration._by_name()["ATTNCORE_ACME"] == ["acme"]
    assert names.backend_of("ATTNCORE_ACME") == "acme"
    site.plugin("Lone", distribution="attn-lone")
    assert registration._by_name()["ATTNCORE_LONE"] == ["Lone"]
    assert names.backend_of("ATTNCORE_LONE") == "Lone"


@pytest.mark.parametrize(("version", "fits"), [("0.32.0", True), ("0.33.1", True), ("0.34.0", False), ("0.3.3", False)])
def test_versions(version, fits):
    problem = versions.version_problem(version)
    assert (problem is None) is fits
    if problem:
        assert version in problem
        assert "0.32.x, 0.33.x" in problem


def test_settings_are_fields_of_the_request():
    found = settings.settings_of(configuration(additional_config={"attncore": {"prefer": ["flash"]}, "other": 1}))
    assert found == {"prefer": ["flash"]}
    for nothing in ({}, {"attncore": None}, None, SimpleNamespace()):
        assert settings.settings_of(configuration(additional_config=nothing)) == {}


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"prefers": []}, ValueError, r"'prefers' is not one of options, .*did you mean prefer\?"),
        ({"num_heads": 3}, ValueError, "'num_heads' is not one of options"),
        (["flash"], TypeError, r"\['flash'\] is not a mapping"),
        ({"options": {"refrence": {}}}, ValueError, r"'refrence' is no backend; known: .*did you mean reference\?"),
    ],
)
def test_settings_that_are_none(given, kind, words):
    with pytest.raises(kind, match=rf"additional_config\['attncore'\](\['options'\])?: {words}"):
        settings.settings_of(configuration(additional_config={"attncore": given}))


def test_each_flag_is_refused_by_a_sentence():
    for name in refusals.REFUSED:
        assert list(refusals.refused_flags({name: True})) == [refusals.REFUSED[name]]
        assert not list(refusals.refused_flags({name: False}))
    assert not list(refusals.refused_flags(dict.fromkeys(refusals.PASSED, True)))
    assert list(refusals.refused_flags({"use_tomorrow": True})) == [
        "vLLM asks for use_tomorrow, which this bridge does not know"
    ]


@pytest.mark.parametrize(
    ("part", "field", "value", "words"),
    [
        ("parallel_config", "decode_context_parallel_size", 2, "decode context parallelism"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill context parallelism"),
        ("parallel_config", "use_ubatching", True, "dual batch overlap"),
        ("cache_config", "calculate_kv_scales", True, "calculate_kv_scales"),
        ("cache_config", "kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
    ],
)
def test_engines_that_are_refused(part, field, value, words):
    config = configuration()
    assert not list(refusals.refused_engine(config))
    setattr(getattr(config, part), field, value)
    (why,) = refusals.refused_engine(config)
    assert why.startswith(words)


def test_a_request_has_what_any_layer_of_the_group_needs():
    layers = [layer(sliding_window=7), layer(logits_soft_cap=30.0), layer(sinks=[0.0] * 4), layer()]
    request = model_request.request_for_layers("reference", configuration(), 16, layers)
    assert (request.sliding_window, request.logits_soft_cap, request.sinks, request.alibi) == (7, 30.0, True, False)
    assert (request.block_size, request.max_model_len, request.strided_kv_cache) == (16, 128, True)
    assert not model_request.sentences(model_request.negotiated(request))


def test_layers_of_one_builder_have_the_same_heads():
    """A model that drafts may have caches like those of the other, and more queries, which no plan counts then."""
    layers = [layer(), layer(num_heads=8)]
    with pytest.raises(ValueError, match="different heads, 4 over 2 of 16 and 8 over 2 of 16, "):
        model_request.request_for_layers("reference", configuration(), 16, layers)
    assert model_request.request_for_layers("reference", configuration(), 16, layers[1:]).num_heads == 8
    asked = model_request.request_for_layers("reference", configuration(), 16, layers, of_kernel=False)
    assert asked.num_heads == 4


def test_blocks_of_the_allocator_are_cut_into_the_kernels():
    request = model_request.request_for_layers("reference", configuration(), 528, [layer()], of_kernel=False)
    assert (request.block_size, request.manager_block_size) == (None, 528)
    assert not model_request.sentences(model_request.negotiated(request))


def test_scales_and_fp8_are_asked_for():
    layers = [layer(kv_cache_dtype="fp8", scales=(0.5, 1.0))]
    request = model_request.request_for_layers("reference", configuration(), 16, layers)
    assert (request.kv_cache_dtype, set(request.features)) == ("fp8_e4m3", {"kv_scales"})
    assert not model_request.sentences(model_request.negotiated(request))
    refused = dataclasses.replace(request, cuda_graph="always")
    reasons = model_request.sentences(model_request.negotiated(refused))
    assert reasons
    assert all(one.startswith("attncore: reference: ") for one in reasons)


def test_attncores_choice_has_the_reasons_of_all():
    layers = [layer(kv_cache_dtype="fp8_e5m2")]
    request = model_request.request_for_layers(None, configuration(), 16, layers)
    request = dataclasses.replace(request, cuda_graph="always")
    assert any(
        one.startswith("attncore: reference: ") for one in model_request.sentences(model_request.negotiated(request))
    )


def test_limits_count_padding_and_drafts():
    spec = SimpleNamespace(block_size=16)
    assert limits.limits_of(configuration(), spec) == (8, 96, 128)
    drafts = configuration(speculative_config=SimpleNamespace(num_speculative_tokens=3))
    assert limits.limits_of(drafts, spec) == (8, 96 + 8 * 6, 134)
    chunks = SimpleNamespace(block_size=16, attention_chunk_size=32)
    assert limits.limits_of(configuration(), chunks).max_num_reqs == 2 * 8 + 96 // 32


def test_blocks_of_the_cache_are_asked_for_where_they_are_known():
    request = model_request.request_for_layers("reference", configuration(), 16, [layer()])
    assert request.num_blocks == 20
    unknown = configuration(cache_config=SimpleNamespace(num_gpu_blocks=None, block_size=32))
    assert model_request.request_for_layers("reference", unknown, 16, [layer()]).num_blocks is None


def test_a_mistaken_option_is_an_error_beside_a_backend_that_could_be_used(site):
    site.plugin("narrow")
    mistaken = configuration(additional_config={"attncore": {"options": {"narrow": {"mood": "good"}}}})
    request = model_request.request_for_layers(None, mistaken, 16, [layer()])
    negotiation = model_request.negotiated(request)
    assert negotiation.chosen.name == "reference"
    (why,) = model_request.sentences(negotiation)
    assert why.startswith("attncore: narrow: option 'mood' is not declared by narrow")
