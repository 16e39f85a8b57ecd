"""docs/capabilities.md is what `attncore show --all --markdown` prints."""

import capabilities_page
import pytest

from attncore.registry.plugins.load import registry
from attncore.vocabulary import FEATURES


@pytest.fixture(scope="module")
def page():
    loaded = {record.name for record in registry().records if record.spec is not None}
    if missing := set(capabilities_page.OURS.split(",")) - loaded:
        pytest.skip(f"the page is about plugins that are not installed here: {', '.join(sorted(missing))}")
    return capabilities_page.PAGE.read_text()


def test_the_matrix_is_that_of_the_specs(page):
    assert page == capabilities_page.rendered(page), "run: python tests/capabilities_page.py --write"


def test_it_has_hardware_features_and_reasons(page):
    assert all(f"| `{name}` |" in page for name in FEATURES)
    assert "| cuda:sm_90 |" in page
    rows = [line.split(" | ")[1] for line in page[page.index("## Why not") :].splitlines() if line.startswith("| ")]
    assert {"`kv_scales`", "`tree_mask`"} <= set(rows)
    assert all(line.rstrip("|").rstrip() for line in page.splitlines() if line.startswith("| "))
