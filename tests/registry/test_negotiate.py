"""Negotiation, as a pure function of (request, host, records)."""

import dataclasses
import random

import pytest
from lookalikes import FLASHINFER, PACKAGES, RECORDS, record

from attncore import AttentionRequest, BackendSpec, Host, MultipleOf, Reason
from attncore.how_to_install import install_distribution
from attncore.registry.choice.choice import choose
from attncore.registry.choice.explain import explain
from attncore.registry.choice.negotiate import negotiate

H90 = Host.assume("sm_90", packages=PACKAGES)


def request(**fields):
    return AttentionRequest(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", **fields})


def spec(name="one", **facts):
    base = {
        "name": name,
        "api": 1,
        "factory": "m:C",
        "devices": {"any": 10},
        "dtypes": {"bfloat16"},
        "head_sizes": {64},
        "block_sizes": {16, 32},
    }
    return BackendSpec(**{**base, **facts})


def negotiated(records, host=H90, **fields):
    asked = request(**fields)
    return negotiate(asked, host, records)


def only(facts, host=H90, **fields):
    """The reasons against one backend."""
    negotiation = negotiated([record(spec(**facts), "attn-one")], host, **fields)
    return {one.name: one for one in (*negotiation.usable, *negotiation.rejected)}["one"].reasons


def test_the_order_of_records_does_not_matter():
    shuffled = list(RECORDS)
    random.Random(7).shuffle(shuffled)
    first, second = negotiated(RECORDS), negotiated(shuffled)
    assert first.chosen == second.chosen
    assert first.usable == second.usable


def order(*specs, **fields):
    return [one.name for one in negotiated([record(one, f"attn-{one.name}") for one in specs], **fields).usable]


def test_priority_on_this_device_then_closeness_then_name():
    specs = [
        spec("c", devices={"any": 50}),
        spec("b", devices={"cuda": 50, "cpu": 99}),
        spec("a", devices={"any": 50}),
        spec("d", devices={"cuda:sm_90": 50}),
        spec("e", devices={"cuda:sm_80+": 50}),
        spec("f", devices={"cuda": 51}),
    ]
    assert order(*specs) == ["f", "d", "e", "b", "a", "c"]


def test_preferences_come_before_priority_and_the_named_one_before_them():
    specs = [spec("a", devices={"any": 90}), spec("b"), spec("c")]
    assert order(*specs, prefer=("c", "b")) == ["c", "b", "a"]
    assert order(*specs, prefer=("c",), backend="b") == ["b", "c", "a"]


def test_strict_and_fallback():
    records = [record(spec("a", dtypes={"float32"}), "attn-a"), record(spec("b"), "attn-b")]
    assert negotiated(records, backend="a").chosen is None
    found = negotiated(records, backend="a", policy="fallback")
    assert found.chosen.name == "b"
    assert "in place of a, which the request names and which cannot be used" in explain(found)


@pytest.mark.parametrize("named", ["b", "c", "unheard-of"])
def test_the_reasons_against_the_one_that_is_named_come_first(named):
    refused = [record(spec(name, dtypes={"float32"}), f"attn-{name}") for name in ("a", "b", "c")]
    for records, fields in (
        (refused, {}),
        ([*refused, record(spec("good"), "attn-good")], {}),
        (refused, {"prefer": ("a",)}),
    ):
        found = negotiated(records, backend=named, **fields)
        assert found.rejected[0].name == named
        assert explain(found).startswith(f"{named} (attn-{named}" if named != "unheard-of" else "unheard-of: no distr")
    found = negotiated([*refused, record(spec("good"), "attn-good")], backend=named, policy="fallback")
    assert [line.split()[0].strip(":") for line in explain(found).splitlines() if line[0] != " "][:2] == ["good", named]


def test_an_excluded_name_that_no_backend_has_is_a_row():
    found = negotiated([record(spec("acme"), "attn-acme")], exclude=("acmee", "flash"))
    assert found.chosen.name == "acme"
    reason = next(one.reasons[0] for one in found.rejected if one.name == "acmee")
    assert (reason.code, "did you mean acme?" in reason.fix) == ("unknown", True)
    assert [one.state for one in found.rejected if one.name == "flash"] == ["not_installed"]  # a known name is none


@pytest.mark.parametrize(
    ("facts", "fields", "code", "asked", "accepted"),
    [
        ({"devices": {"rocm": 1}}, {}, "device", "cuda:sm_90", ["rocm"]),
        ({}, {"dtype": "float16"}, "dtype", "float16", ["bfloat16"]),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "fp8_e4m3", ["auto"]),
        ({}, {"head_size": 80}, "head_size", 80, [64]),
        ({"head_sizes": MultipleOf(8, 64)}, {"head_size": 72}, "head_size", 72, {"multiple_of": 8, "maximum": 64}),
        ({}, {"head_size_v": 32}, "head_size_v", 32, 64),
        ({"head_size_v": {16}}, {"head_size_v": 32}, "head_size_v", 32, [16]),
        ({"max_group_size": 2}, {}, "group_size", 4, 2),
        ({}, {"block_size": 64}, "block_size", 64, [16, 32]),
        ({}, {"manager_block_size": 24}, "block_size", 24, [16, 32]),
        ({}, {"kv_cache_layout": "HND"}, "kv_cache_layout", "HND", ["NHD"]),
        ({"max_model_len": 4096}, {"max_model_len": 4097}, "max_model_len", 4097, 4096),
        ({"max_block_id": 100}, {"num_blocks": 102}, "num_blocks", 102, 101),
        ({}, {"use_mla": True, "num_kv_heads": 1}, "mla", True, False),
        ({"use_mla": True, "mla_only": True}, {}, "mla", False, True),
        ({"unsupported": {"sinks": "no"}}, {"sinks": True}, "unsupported", "sinks", []),
        ({"features": {"alibi_standard"}}, {"alibi": True}, "unsupported", "alibi", ["alibi_standard"]),
        ({}, {"sliding_window": 8}, "undeclared", "sliding_window", []),
        ({}, {"logits_soft_cap": 30.0}, "undeclared", "logits_soft_cap", []),
        ({}, {"features": ["lse"]}, "undeclared", "lse", []),
        ({}, {"strided_kv_cache": True}, "undeclared", "strided_kv_cache", []),
        (
            {"cuda_graph": "uniform_decode"},
            {"cuda_graph": "uniform"},
            "cuda_graph",
            "uniform",
            ["never", "uniform_decode"],
        ),
        ({"compiles_at_run_time": True}, {"allow_compile": False}, "compiler", False, [True]),
        ({"phases": {"decode"}}, {}, "phase", "prefill and decode", ["decode"]),
        ({"requires": ("absent>=2",)}, {}, "requirement", "absent>=2", None),
        ({"requires": ("torch>=3",)}, {}, "requirement", "torch>=3", "2.11.0+cu130"),
        ({}, {"options": {"one": {"x": 1}}}, "option", {"x": 1}, []),
        ({}, {"exclude": ["one"]}, "excluded", "one", None),
    ],
)
def test_each_reason_has_its_code_both_values_a_source_and_a_fix(facts, fields, code, asked, accepted):
    (reason,) = only(facts, **fields)
    assert (reason.code, reason.asked, reason.accepted) == (code, asked, accepted)
    assert reason.source
    assert reason.fix


@pytest.mark.parametrize(
    ("facts", "fields"),
    [
        ({}, {"kv_cache_dtype": "bfloat16"}),
        ({"features": {"alibi"}}, {"alibi": "standard"}),
        ({"max_model_len": 4096}, {"max_model_len": 4096}),
        ({"max_block_id": 100}, {"num_blocks": 101}),
        ({"features": {"strided_kv_cache"}}, {"strided_kv_cache": True}),
        ({"head_size_v": {32}}, {"head_size_v": 32}),
        ({}, {"head_size_v": 64}),
        ({"use_mla": True}, {}),
        ({"use_mla": True}, {"use_mla": True, "num_kv_heads": 1}),
        ({"use_mla": True, "mla_only": True}, {"use_mla": True, "num_kv_heads": 1}),
        ({"phases": {"decode"}}, {"phase": "decode"}),
        ({"max_group_size": 4}, {}),
        ({"requires": ("torch>=2.7", "triton")}, {}),
        ({"cuda_graph": "always"}, {"cuda_graph": "uniform_decode"}),
    ],
)
def test_what_is_just_inside_is_accepted(facts, fields):
    assert only(facts, **fields) == ()


def test_no_reason_hides_another():
    found = only(
        {"devices": {"cpu": 1}, "requires": ("absent",)},
        dtype="float16",
        head_size=80,
        block_size=8,
        sinks=True,
        sliding_window=3,
        cuda_graph="always",
        num_kv_heads=1,
        use_mla=True,
    )
    codes = {reason.code for reason in found}
    assert codes == {"device", "dtype", "head_size", "block_size", "undeclared", "cuda_graph", "mla"}
    assert sum(reason.code == "undeclared" for reason in found) == 2


def test_requirements_are_told_where_the_device_fits_only():
    facts = {"devices": {"cuda": 1}, "requires": ("absent",)}
    assert [reason.code for reason in only(facts)] == ["requirement"]
    assert [reason.code for reason in only(facts, Host.assume("cpu"))] == ["device"]


def test_the_plugins_own_check_is_asked_and_its_failure_is_its_own():
    assert [str(one) for one in only({"check": lambda request, host: ["too warm"]})] == ["too warm"]
    mine = Reason("check", "mine", source="me", fix="none")
    assert only({"check": lambda request, host: [mine]}) == (mine,)
    assert only({"check": lambda request, host: ()}) == ()
    (failed,) = only({"check": lambda request, host: 1 / 0})
    assert (failed.code, "ZeroDivisionError" in failed.message) == ("check", True)
    (failed,) = only({"check": lambda request, host: [3]})
    assert "yields a int" in failed.message


@pytest.mark.parametrize(
    ("facts", "fields", "block", "per_manager"),
    [
        ({}, {}, 16, 1),
        ({"preferred_block_size": 32}, {}, 32, 1),
        ({"preferred_block_size": 32}, {"block_size": 16}, 16, 1),
        ({}, {"manager_block_size": 64}, 32, 2),
        ({"preferred_block_size": 16}, {"manager_block_size": 64}, 16, 4),
        ({"preferred_block_size": 32}, {"manager_block_size": 48}, 16, 3),
        ({}, {"manager_block_size": 48}, 16, 3),
        ({"block_sizes": MultipleOf(16)}, {"manager_block_size": 64}, 64, 1),
        ({}, {"manager_block_size": 64, "block_size": 16}, 16, 4),
    ],
)
def test_block_size_is_an_output(facts, fields, block, per_manager):
    chosen = choose(negotiated([record(spec(**facts), "attn-one")], **fields))
    assert (chosen.block_size, chosen.blocks_per_manager_block) == (block, per_manager)


def test_notes_are_repeated_whether_chosen_or_not():
    records = [record(spec(name, notes=[f"{name} is slow"]), f"attn-{name}") for name in ("one", "two")]
    said = explain(negotiated(records))
    assert "one is slow" in said
    assert "two is slow" in said


def test_the_layout_is_an_output():
    records = [record(spec(kv_cache_layouts=("HND", "NHD")), "attn-one")]
    assert choose(negotiated(records)).kv_cache_layout == "HND"
    assert choose(negotiated(records, kv_cache_layout="NHD")).kv_cache_layout == "NHD"


def test_known_backends_that_are_not_installed_are_rows():
    lines = explain(negotiated([])).splitlines()
    rocm, flash = install_distribution("attn-rocm"), install_distribution("attn-flash")
    assert f"flash: not installed; {flash}" in lines
    assert f"rocm: not installed; {rocm}" in lines
    cpu = negotiated([], Host.assume("cpu"))
    assert f"flash: not installed; {flash} (needs an NVIDIA GPU; this host has no GPU)" in explain(cpu)
    assert f"rocm: not installed; {rocm} (needs a GPU; this host has no GPU)" in explain(cpu)
    amd = explain(negotiated([], Host.assume("gfx1200"))).splitlines()
    assert f"flash: not installed; {flash} (needs an NVIDIA GPU; this host has gfx1200)" in amd
    assert f"rocm: not installed; {rocm}" in amd


def test_unknown_names_are_rows():
    found = negotiated(RECORDS, backend="flesh", prefer=("flush",))
    assert found.chosen is None
    unknown = [one for one in found.rejected if one.state == "unknown"]
    assert [one.name for one in unknown] == ["flesh", "flush"]
    assert "flash" in unknown[0].reasons[0].accepted


def test_same_question_same_answer():
    first, second = negotiated(RECORDS, sliding_window=100), negotiated(RECORDS, sliding_window=100)
    assert explain(first) == explain(second)
    assert [one.as_json() for one in first.rejected] == [one.as_json() for one in second.rejected]


def test_options_of_a_request_are_checked_against_the_spec():
    good = negotiated([record(FLASHINFER, "attn-flashinfer")], options={"flashinfer": {"tensor_cores": False}})
    assert good.chosen.name == "flashinfer"
    bad = negotiated([record(FLASHINFER, "attn-flashinfer")], options={"flashinfer": {"tensor_cores": 1}})
    (reason,) = next(one for one in bad.rejected if one.name == "flashinfer").reasons
    assert reason.message == "option 'tensor_cores': 1 is not a bool"


def test_reasons_have_a_closed_vocabulary():
    with pytest.raises(ValueError, match="code: 'mood' is not one of device"):
        Reason("mood", "not today")


def test_requests_are_values():
    assert dataclasses.replace(request(), sinks=True) == request(sinks=True)


def test_what_a_check_changes_is_a_copy_of_request_and_host():
    def changes(asked, host):
        object.__setattr__(asked, "head_size", 3)
        object.__setattr__(host, "device", "cuda:sm_10")
        return f"{asked.head_size} on {host.device}"

    host, asked = dataclasses.replace(H90), request()
    found = negotiate(asked, host, [record(spec(check=changes), "attn-one")])
    assert any("3 on cuda:sm_10" in str(reason) for one in found.rejected for reason in one.reasons)
    assert (asked.head_size, host) == (request().head_size, H90)


def _exits(request, host):
    raise SystemExit("no licence")


@pytest.mark.parametrize(
    ("check", "messages"),
    [
        (_exits, ["failed: SystemExit: no licence"]),
        (lambda request, host: "not on Mondays", ["not on Mondays"]),
        (lambda request, host: Reason("check", "not on Mondays"), ["not on Mondays"]),
        (lambda request, host: None, []),
        (lambda request, host: ["first", 3], ["first", "failed: TypeError: it yields a int"]),
    ],
)
def test_what_a_check_answers_is_its_own_reason(check, messages):
    found = [reason.message for reason in only({"check": check})]
    assert len(found) == len(messages)
    assert all(text in one for one, text in zip(found, messages, strict=True))
