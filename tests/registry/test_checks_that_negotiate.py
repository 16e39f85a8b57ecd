"""A plugin's check that asks for a choice itself: refused as a reason, where it would ask itself without end."""

import pytest
from planting import SPEC

import attncore

REQUEST = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"}
NEGOTIATES = """
import attncore

def check(request, host):
    try:
        attncore.{how}(request, host=host, exclude=({name!r},))
    except attncore.NoBackendError as error:
        yield str(error)[:200]
"""


@pytest.mark.parametrize("how", ["select", "select_joint"])
def test_two_checks_that_negotiate(site, how):
    for name in ("one", "two"):
        spec = SPEC.format(name=name, module=f"attn_{name}", extra=" check=check,")
        site.plugin(name, NEGOTIATES.format(how=how, name=name) + spec)
    assert attncore.select(**REQUEST).name in ("one", "two")


def test_another_choice_is_refused_while_a_check_runs(site):
    source = """
import attncore
seen = []

def check(request, host):
    try:
        attncore.select(request, host=host, backend="two")
    except attncore.NoBackendError as error:
        seen.append(str(error))
"""
    site.plugin("one", source + SPEC.format(name="one", module="attn_one", extra=" check=check,"))
    own = " check=lambda request, host: (),"
    site.plugin("two", SPEC.format(name="two", module="attn_two", extra=own))
    assert attncore.select(**REQUEST, backend="one").name == "one"
    import attn_one

    assert "is not asked while the check of" in attn_one.seen[0]
