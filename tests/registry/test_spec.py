"""Specs: normalised, immutable, refused with every problem at once."""

import copy
import dataclasses

import pytest

from attncore import BackendSpec, MultipleOf, Option, Variant
from attncore.registry.spec.backend_spec import ContractVersionError
from attncore.registry.spec.fitting_fields import fitting_fields
from attncore.step_arrays import OF_LENGTHS

FACTS = {
    "name": "acme",
    "api": 1,
    "factory": "acme_attn.backend:AcmeBackend",
    "devices": {"cuda:sm_90": 60, "cuda:sm_80+": 40},
    "dtypes": {"float16", "bfloat16"},
    "head_sizes": {64, 128},
    "block_sizes": MultipleOf(16),
}


def spec(**facts):
    return BackendSpec(**{**FACTS, **facts})


def test_the_smallest_spec_fails_closed():
    one = spec()
    assert one.features == frozenset()
    assert one.kv_cache_dtypes == {"auto"}
    assert (one.cuda_graph, one.use_mla, one.head_size_v) == ("never", False, None)


def test_collections_are_kept_immutable():
    devices = {"cpu": 1}
    one = spec(devices=devices, features=["sinks"], dtypes=["float32"])
    devices["any"] = 2
    assert dict(one.devices) == {"cpu": 1}
    assert isinstance(one.features, frozenset)
    with pytest.raises(TypeError):
        one.devices["any"] = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "other"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("name", "Acme", "name: 'Acme' is not a name"),
        ("factory", "acme.backend", "factory: 'acme.backend' is not of the form"),
        ("devices", {"tpu": 1}, "devices: 'tpu' is no device"),
        ("devices", {"cuda:sm_90a": 1}, "devices: 'cuda:sm_90a' is no device"),
        ("devices", {"cuda": 101}, "devices: the priority of 'cuda' is 101"),
        ("devices", {"cuda": True}, "devices: the priority of 'cuda' is True"),
        ("devices", {}, "devices: {} is not a mapping"),
        ("dtypes", {"int8"}, "dtypes: 'int8' is not one of float16, bfloat16, float32"),
        ("dtypes", "float16", "dtypes: 'float16' is not a collection"),
        ("dtypes", (), "dtypes: nothing is declared"),
        ("kv_cache_dtypes", {"fp8"}, "kv_cache_dtypes: 'fp8' is not one of"),
        ("head_sizes", {64, -1}, "head_sizes: -1 is not a positive integer"),
        ("head_sizes", {True}, "head_sizes: True is not a positive integer"),
        ("head_sizes", 128, "head_sizes: 128 is neither a MultipleOf nor a set"),
        ("block_sizes", (), "block_sizes: no size is declared"),
        ("preferred_block_size", 24, "preferred_block_size: 24 is not among block_sizes"),
        ("kv_cache_layouts", {"NHD", "HND"}, "kv_cache_layouts: a set has no order"),
        ("kv_cache_layouts", ("DHN",), "kv_cache_layouts: 'DHN' is not one of"),
        ("features", {"telepathy"}, "features: 'telepathy' is not one of"),
        ("unsupported", {"alibi": ""}, "unsupported: the reason for 'alibi' is ''"),
        ("unsupported", {"wings": "none"}, "unsupported: 'wings' is not one of"),
        ("cuda_graph", "sometimes", "cuda_graph: 'sometimes' is not one of never"),
        ("host_needs", {"luck"}, "host_needs: 'luck' is no field of metadata"),
        ("device_needs", {"slot_maping"}, "device_needs: 'slot_maping' is no field of metadata; did you mean slot_m"),
        ("device_needs", "block_table", "device_needs: 'block_table' is not a collection"),
        ("requires", ("acme kernels 2",), "requires: 'acme kernels 2' is not a requirement"),
        ("requires", "acme", "requires: 'acme' is not a collection"),
        ("phases", (), "phases: nothing is declared"),
        ("max_block_id", 0, "max_block_id: 0 is not a positive integer"),
        ("use_mla", 1, "use_mla: 1 is neither True nor False"),
        ("mla_only", None, "mla_only: None is neither True nor False"),
        ("mla_only", True, "mla_only: True, but use_mla is False"),
        ("pad_seq_len", 2, "pad_seq_len: 2 is neither 0 nor 1"),
        ("variables", ("ATTNCORE_ACME_X",), "variables: ('ATTNCORE_ACME_X',) is not a mapping"),
        ("variables", {"ACME_X": "x"}, "variables: 'ACME_X' is not the name of a plugin's variable"),
        (
            "variables",
            {"ATTNCORE_PLUGINS": "x"},
            "variables: 'ATTNCORE_PLUGINS' is not the name of a plugin's variable",
        ),
        ("variables", {"ATTNCORE_OTHER_X": "x"}, "variables: 'ATTNCORE_OTHER_X' does not begin with ATTNCORE_ACME_"),
        ("variables", {"ATTNCORE_ACME_X": 1}, "variables: 1 is not a sentence that says what ATTNCORE_ACME_X does"),
        ("notes", "a note", "notes: 'a note' is not a collection of sentences"),
        ("notes", ["two\nlines"], "notes: 'two\\nlines' is not a sentence on one line"),
        ("options", {"x": 1}, "options: 'x' is 1, not an Option"),
        ("check", 3, "check: 3 cannot be called"),
        ("variants", (1,), "variants: 1 is not a Variant"),
        ("variants", (Variant("a"), Variant("a")), "variants: two variants have the same name"),
        ("variants", (Variant("a", head_sizes={0}),), "variants: 'a': head_sizes: 0 is not a positive integer"),
    ],
)
def test_nonsense_is_refused_by_the_name_of_its_field(field, value, text):
    with pytest.raises(ValueError) as caught:
        spec(**{field: value})
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("facts", [{}, {"use_mla": True, "mla_only": True, "head_size_v": {512}}])
def test_some_head_size_can_be_asked_for(facts):
    with pytest.raises(ValueError, match=r"^head_sizes: 1099511627776 is the smallest, and sizes .* fit int32"):
        spec(head_sizes={2**40} | ({64} if facts else set()), **facts)


def test_values_of_latent_rows_fit_into_some_row():
    latent = {"use_mla": True, "mla_only": True, "head_size_v": {512}}
    with pytest.raises(ValueError, match=r"^head_size_v: 512, but with mla_only values are the first columns of a row"):
        spec(**latent, head_sizes={64, 128})
    fields = fitting_fields(spec(**latent, head_sizes={64, 128, 576}))
    assert (fields["head_size"], fields["head_size_v"]) == (576, 512)


def test_a_feature_cannot_be_had_and_not_had():
    with pytest.raises(ValueError, match="unsupported: 'sinks' is also among features"):
        spec(features={"sinks"}, unsupported={"sinks": "no"})


@pytest.mark.parametrize("field", sorted(OF_LENGTHS))
def test_what_reads_lengths_on_the_host_says_which_will_do(field):
    """`host_lengths` left at "none" would have steps handed over whose lengths the host does not know."""
    text = f"host_lengths: 'none' says that no length is read on the host, but host_needs names {field}; state 'exact'"
    with pytest.raises(ValueError, match=text):
        spec(host_needs={"query_start_loc", field})
    with pytest.raises(ValueError, match=f"variants: 'old': {text}"):
        spec(variants=(Variant("old", host_needs={field}),))
    for stated in ("exact", "bounded"):
        assert spec(host_needs={field}, host_lengths=stated).host_lengths == stated


def test_every_problem_is_told():
    with pytest.raises(ValueError) as caught:
        spec(head_sizes={0}, devices={}, cuda_graph="x")
    assert str(caught.value).count(";") == 2


def test_another_contract_is_told_before_fields_that_do_not_exist():
    with pytest.raises(ContractVersionError) as caught:
        spec(api=2, hologram=True)
    assert caught.value.api == 2


def test_variants_inherit_and_override():
    one = spec(
        requires=("numpy",),
        variants=(
            Variant("two", requires=("acme-kernels>=2",), head_sizes={256}),
            Variant("one", requires=("acme-kernels<2",)),
        ),
    )
    (first, two), (second, older) = one.by_variant
    assert (first, second) == ("two", "one")
    assert two.head_sizes == {256}
    assert older.head_sizes == {64, 128}
    assert two.requires == ("numpy", "acme-kernels>=2")
    assert one.all_requires == ("numpy", "acme-kernels>=2", "acme-kernels<2")


def test_all_devices_are_those_of_every_variant_with_the_highest_priority():
    one = spec(
        devices={"cuda:sm_90": 10, "cuda:sm_80+": 5},
        variants=(Variant("fast", devices={"cuda:sm_90": 30, "rocm:gfx942": 7}), Variant("plain")),
    )
    assert one.all_devices == {"cuda:sm_90": 30, "rocm:gfx942": 7, "cuda:sm_80+": 5}


def test_a_variant_states_only_facts():
    with pytest.raises(TypeError, match="api: variant 'two' states a fact that no variant may state"):
        Variant("two", api=2)


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        (Option(int, "pages"), 4, None),
        (Option(int, "pages"), True, "is not an int"),
        (Option(int, "pages"), "4", "is not an int"),
        (Option(float, "ratio"), 1, None),
        (Option(float, "ratio"), True, "is not a float"),
        (Option(bool, "fast"), True, None),
        (Option(bool, "fast"), 1, "is not a bool"),
        (Option(str, "kernel", choices=("fa2", "fa3")), "fa3", None),
        (Option(str, "kernel", choices=("fa2", "fa3")), "fa9", "is not one of 'fa2', 'fa3'"),
    ],
)
def test_options_check_their_values(option, value, problem):
    assert option.problem(value) == problem


def test_an_option_checks_its_own_default():
    with pytest.raises(ValueError, match="'x' is not an int"):
        Option(int, "pages", default="x")


@pytest.mark.parametrize("api", [True, 1.0, "1", None, object()])
def test_a_contract_is_an_integer(api):
    with pytest.raises(TypeError, match=r"^api: .* is not an integer; state the contract, api=1$"):
        spec(api=api)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({**FACTS, "head_sise": {64}}, "head_sise: a spec has no such field; did you mean head_sizes?"),
        ({**FACTS, "zzz": 1}, "zzz: a spec has no such field"),
        ({"name": "acme"}, "api: missing; state the contract, api=1"),
        ({name: value for name, value in FACTS.items() if name != "dtypes"}, "dtypes: missing; a spec must state it"),
        ({name: value for name, value in FACTS.items() if name != "name"}, "name: missing; a spec must state it"),
    ],
)
def test_fields_are_missing_or_unknown_by_name(facts, text):
    with pytest.raises(TypeError) as caught:
        BackendSpec(**facts)
    assert str(caught.value) == text


def test_the_name_may_come_first_and_copies_are_equal():
    one = BackendSpec("acme", **{name: value for name, value in FACTS.items() if name != "name"})
    assert one == spec() == copy.deepcopy(one) == copy.copy(one)


def test_problems_of_every_variant_are_told():
    with pytest.raises(ValueError) as caught:
        spec(variants=(Variant("a", head_sizes={0}), Variant("b", cuda_graph="x"), Variant("c")))
    assert "variants: 'a': head_sizes" in str(caught.value)
    assert "variants: 'b': cuda_graph" in str(caught.value)
