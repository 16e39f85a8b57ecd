"""docs/command-line.md, environment.md and limits.md are what the parsers, variables and constants say."""

import pytest
import reference_pages

from attncore import cli, env
from attncore.registry.plugins.load import registry

FRESH = "run: python tests/reference_pages.py --write"


def test_the_command_line_is_that_of_the_parsers():
    text = (reference_pages.DOCS / "command-line.md").read_text()
    assert text == reference_pages.rendered(text), FRESH
    assert all(f"## attncore {name}\n" in text for name in cli.COMMANDS)


def test_the_variables_are_those_that_are_declared():
    loaded = {record.name for record in registry().records if record.spec is not None}
    if missing := {*reference_pages.PLUGINS} - loaded:
        pytest.skip(f"the page is about plugins that are not installed here: {', '.join(sorted(missing))}")
    text = (reference_pages.DOCS / "environment.md").read_text()
    assert text == reference_pages.rendered(text), FRESH
    assert all(f"| `{name}` |" in text for name in env.VARIABLES)


def test_the_limits_are_those_of_the_code():
    text = (reference_pages.DOCS / "limits.md").read_text()
    assert text == reference_pages.rendered(text), FRESH
    assert all(f"| {what} | " in text for what in reference_pages.LIMITS)


def test_text_of_a_terminal_is_escaped_outside_of_code():
    assert reference_pages.escaped("a|b <c> `d|e <f>` *") == r"a\|b \<c\> `d\|e <f>` \*"
