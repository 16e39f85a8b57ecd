"""The words of a negotiation: each reason on a line of its own, each variant named once."""

from lookalikes import PACKAGES

import attncore
from attncore import BackendSpec, Host, Variant
from attncore.registry.choice.explain import explain
from attncore.registry.choice.negotiate import negotiate
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason

ASKED = Reason("option", "variant quick: taken only where it is asked for", fix="ask for quick")


def test_several_reasons_against_a_variant_have_a_line_each_and_name_it_once():
    spec = BackendSpec(
        name="one", api=1, factory="one:Backend", devices={"any": 1}, dtypes={"float32"}, head_sizes={64},
        block_sizes={16}, preferred_block_size=16,
        variants=(
            Variant("quick", requires=("absent>=1",), check=lambda request, host: [ASKED]),
            Variant("plain"),
        ),
    )  # fmt: skip
    record = PluginRecord("one", "attn-one", "1.0", "loaded", spec=spec)
    request = attncore.AttentionRequest(num_heads=2, num_kv_heads=2, head_size=64, dtype="float32")
    lines = explain(negotiate(request, Host.assume("sm_90", packages=PACKAGES), [record])).splitlines()
    at = lines.index("  not its variant quick: 2 reasons")
    said = lines[at + 1 : at + 3]
    assert all(line.startswith("    ") and "variant quick" not in line and " | " not in line for line in said)
    assert "    taken only where it is asked for; ask for quick" in said


def test_variants_of_one_library_are_named_where_their_reasons_differ():
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
    assert lines[1:6] == [
        "dtype float32 not supported by acme 1.0; supported: bfloat16; run the model in bfloat16",
        "variant whole: head_size 80 not supported by acme 1.0; supported: 64, 128",
        "variant paged: head_size 80 not supported by acme 1.0; supported: 64",
        "dtype float32 not supported by else 1.0; supported: bfloat16; run the model in bfloat16",
        "head_size 80 not supported by else 1.0; supported: 32",
    ]
