"""Variants of a spec: which one is used, what is said of the others, and under which name."""

import pytest
from lookalikes import PACKAGES, record

import attncore
from attncore import AttentionRequest, BackendSpec, Host, Variant
from attncore.registry.choice.choice import choose
from attncore.registry.choice.explain import explain
from attncore.registry.choice.negotiate import negotiate
from attncore.registry.choice.runs_here import reasons_by_variant, reasons_here
from attncore.registry.plugins.plugin_record import PluginRecord

H90 = Host.assume("sm_90", packages=PACKAGES)


def spec(**facts):
    base = {"name": "one", "api": 1, "factory": "m:C", "devices": {"any": 10}, "dtypes": {"bfloat16"}}
    return BackendSpec(**{**base, "head_sizes": {64}, "block_sizes": {16, 32}, **facts})


def negotiated(records, host=H90, **fields):
    asked = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", **fields}
    return negotiate(AttentionRequest(**asked), host, records)


def reasons(variants, host=H90, **fields):
    """What is said of a spec of these variants, none of which fits."""
    return [
        str(one)
        for one in negotiated([record(spec(variants=variants), "attn-one")], host, **fields).rejected[0].reasons
    ]


def variants():
    return spec(
        variants=(
            Variant("new", requires=("absent>=4",), head_sizes={64, 128}),
            Variant("old", requires=("torch>=2",), block_sizes={256}),
        )
    )


def test_the_first_variant_that_fits_is_used_and_named():
    chosen = choose(negotiated([record(variants(), "attn-one")]))
    assert (chosen.variant, chosen.block_size) == ("old", 256)
    assert "variant old (torch 2.11.0+cu130)" in chosen.explain()
    host = Host.assume("sm_90", packages={**PACKAGES, "absent": "4.1"})
    assert choose(negotiated([record(variants(), "attn-one")], host)).variant == "new"


def test_variants_before_the_one_that_fits_tell_why_not():
    chosen = choose(negotiated([record(variants(), "attn-one")]))
    ((name, reasons),) = chosen.candidate.passed_over
    assert name == "new"
    assert reasons
    assert f"\n  not its variant new: {reasons[0]}\n" in f"{chosen.explain()}\n"
    (told,) = chosen.candidate.as_json()["passed_over"]
    assert told["reasons"][0]["message"] == reasons[0].message
    assert chosen.candidate.reasons == ()


def test_a_variant_that_only_has_to_be_installed_is_the_fix():
    (reason,) = negotiated([record(variants(), "attn-one")], block_size=16).rejected[0].reasons
    assert (
        str(reason) == "block_size 16 not supported by variant old (torch 2.11.0+cu130); supported: 256; install absent"
    )
    older = Host.assume("sm_90", packages={**PACKAGES, "absent": "3"})
    (reason,) = negotiated([record(variants(), "attn-one")], older, block_size=16).rejected[0].reasons
    assert reason.fix == "install absent>=4"


def test_no_variant_installed_tells_what_each_needs():
    bare = Host.assume("sm_90", packages={})
    reasons = negotiated([record(variants(), "attn-one")], bare).rejected[0].reasons
    assert [reason.asked for reason in reasons] == ["absent>=4", "torch>=2"]
    assert all(reason.fix.startswith("pip install '") for reason in reasons)


def test_a_reason_that_all_variants_give_names_the_plugin_and_others_their_variant():
    wants = ("acme>=1",)
    facts = {"name": "one", "api": 1, "factory": "one:Backend", "devices": {"any": 1}, "dtypes": {"bfloat16"}}
    variants = (
        Variant("whole", requires=wants, head_sizes={64, 128}), Variant("paged", requires=wants, head_sizes={64}),
        Variant("other", requires=("else>=1",), head_sizes={32}),
    )  # fmt: skip
    spec = BackendSpec(**facts, head_sizes={64}, block_sizes={16}, variants=variants)
    record = PluginRecord("one", "attn-one", "1.0", "loaded", spec=spec)
    request = attncore.AttentionRequest(num_heads=2, num_kv_heads=2, head_size=80, dtype="float32")
    host = Host.assume("sm_90", packages={"acme": "1.0", "else": "1.0"})
    lines = [line.strip() for line in explain(negotiate(request, host, [record])).splitlines()]
    assert lines[1:5] == [
        "dtype float32 not supported by attn-one 1.0; supported: bfloat16; run the model in bfloat16",
        "head_size 80 not supported by variant whole (acme 1.0); supported: 64, 128",
        "head_size 80 not supported by variant paged (acme 1.0); supported: 64",
        "head_size 80 not supported by variant other (else 1.0); supported: 32",
    ]


def test_a_reason_of_several_variants_is_said_once_and_names_them():
    pair = ("acme>=1",)
    variants = (Variant("a", requires=pair), Variant("b", requires=pair), Variant("c", head_sizes={80}, check=_warm))
    host = Host.assume("sm_90", packages={"acme": "1.0"})
    assert reasons(variants, host, head_size=80) == [
        "head_size 80 not supported by variants a (acme 1.0), b (acme 1.0); supported: 64",
        "variant c: too warm",
    ]
    absent = Host.assume("sm_90", packages={})
    missing = "variants a, b: acme is not installed; attn-one 0.1.0 needs acme>=1; pip install 'acme>=1'"
    assert missing in reasons(variants, absent, block_size=8)


def _warm(request, host):
    return "variant c: too warm"  # as a plugin may say by itself; it is named once


def test_texts_of_a_spec_without_variants_are_as_they_are():
    odd = spec(check=lambda request, host: "the variant of sm_90 is missing")
    (reason,) = negotiated([record(odd, "attn-one")]).rejected[0].reasons
    assert reason.message == "the variant of sm_90 is missing"


def test_a_variant_has_one_name_in_every_text():
    label = "old (torch 2.11.0+cu130)"
    choice = choose(negotiated([record(variants(), "attn-one")]))
    assert choice.as_json()["variant_label"] == choice.candidate.as_json()["variant_label"] == label
    assert f"variant {label}" in repr(choice)
    assert f"variant {label}" in choice.explain()
    (why,) = reasons_by_variant(record(variants(), "attn-one"), Host.assume("sm_90", packages={"absent": "4.1"}))["old"]
    assert str(why) == "torch is not installed; attn-one 0.1.0 needs torch>=2; pip install 'torch>=2'"


@pytest.mark.parametrize(
    ("requires", "version", "wanted"),
    [
        (("acme>=2",), "", "acme>=2,<4"),
        (("acme[fast]>=2",), "", "acme[fast]<4,>=2"),
        (("acme>=2",), "1", "acme>=2,<4"),
        (("Acme",), "5", "acme<4"),
        (("acme @ https://example.org/acme.whl",), "", None),
    ],
)
def test_a_distribution_that_spec_and_variant_require_is_named_once(requires, version, wanted):
    packages = {**PACKAGES, **({"acme": version} if version else {})}
    one = spec(requires=("acme<4",), variants=(Variant("new", requires=requires),))
    found = negotiated([record(one, "attn-one")], Host.assume("sm_90", packages=packages)).rejected[0].reasons
    if wanted is None:
        assert len(found) == 2
        return
    (reason,) = found
    assert set(reason.asked.removeprefix("acme").split(",")) == set(wanted.removeprefix("acme").split(","))
    assert reason.fix == f"pip install '{reason.asked}'"


def test_where_no_variant_is_for_the_device_one_reason_says_so():
    kinds = (Variant("a", devices={"rocm:gfx942": 9}), Variant("b", devices={"cuda:sm_80+": 9}, head_sizes={80}))
    assert reasons(kinds, Host.assume("gfx1100")) == [
        "device rocm:gfx1100 not supported by attn-one 0.1.0; supported: cuda:sm_80+, rocm:gfx942"
    ]


def test_variants_that_are_for_other_devices_share_a_line():
    others = [Variant(name, devices={"rocm:gfx942": 9}) for name in ("a", "b")]
    found = negotiated([record(spec(variants=(*others, Variant("c"))), "attn-one")])
    assert "  not its variants a, b: they are for other devices" in explain(found)
    assert [name for name, _ in found.chosen.passed_over] == ["a", "b"]
    alone = negotiated([record(spec(variants=(others[0], Variant("c"))), "attn-one")])
    assert "  not its variant a: device cuda:sm_90 not supported by variant a; supported: rocm:gfx942" in explain(alone)


BOTH_KINDS = (
    Variant("plain"),
    Variant("rows", use_mla=True, mla_only=True, head_sizes={576}, head_size_v={512}, features=()),
)


def test_variants_for_the_other_kind_of_cache_say_nothing():
    latent = {"num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "use_mla": True}
    (said,) = reasons(BOTH_KINDS, head_size=80)
    assert said.startswith("head_size 80 not supported by attn-one 0.1.0; supported: 64")
    (said,) = reasons(BOTH_KINDS, **latent, sliding_window=8)
    assert said.startswith("sliding_window not declared by attn-one 0.1.0")
    chosen = negotiated([record(spec(variants=BOTH_KINDS), "attn-one")], **latent).chosen
    assert (chosen.variant, chosen.passed_over) == ("rows", ())
    (said,) = reasons(BOTH_KINDS[:1], **latent)[-1:]
    assert said.startswith("latent attention not supported"), "where there is no other, it says so"


def test_a_plain_request_of_a_latent_variant_is_for_its_rows():
    both = record(spec(variants=BOTH_KINDS), "attn-one")
    assert reasons_by_variant(both, H90) == {"plain": (), "rows": ()}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Variant("rows", use_mla=True, mla_only=True, head_sizes={576}, requires=("absent",)), Variant("plain")),
        (Variant("new", devices={"cpu": 1}, head_sizes={16}), Variant("old", head_sizes={576})),
        (Variant("new", dtypes={"float16"}, requires=("absent",)), Variant("old", dtypes={"float32"})),
    ],
    ids=["another kind of cache", "another size", "another dtype"],
)
def test_a_backend_runs_here_where_any_variant_does(first, then):
    """However little its request has in common with the first one's."""
    assert reasons_here(record(spec(variants=(first, then)), "attn-one"), H90) == ()
    assert reasons_here(record(spec(variants=(first,)), "attn-one"), H90) != ()


def test_what_only_variants_for_other_devices_lack_is_not_said():
    """No advice of theirs would help: without such a device they run nothing."""
    kinds = (
        Variant("new", devices={"cuda:sm_80+": 1}, head_sizes={128}),
        Variant("old", devices={"cuda:sm_75": 1}, dtypes={"float16"}),
    )
    assert reasons(kinds) == [
        "head_size 64 not supported by variant new; supported: 128",
        "device cuda:sm_90 not supported by variant old; supported: cuda:sm_75",
    ]
    # What all variants lack is the plugin's lack, wherever it runs.
    assert len(reasons(kinds, Host.assume("cpu"))) == 1
    assert "block_size 64 not supported by attn-one" in reasons(kinds, Host.assume("cpu"), block_size=64)[1]
