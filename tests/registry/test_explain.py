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
