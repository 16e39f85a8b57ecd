"""Errors of megabytes: the kit says how they begin, and neither prints nor has pytest render the rest."""

import json

import pytest
from testing import faulty_backend
from testing.faulty_backend import forward

from attncore.testing.__main__ import main
from attncore.testing.harness.errors import ConformanceError, text_of

LONG = "'begins ' + 'long ' * (1 << 20)"
RAISED = {
    "an_error": f"raise RuntimeError({LONG})",
    "a_cause": f"raise ValueError('begins') from RuntimeError({LONG})",
    "a_context": f"try:\n    raise KeyError({LONG})\nfinally:\n    raise ValueError('begins')",
    "a_group": f"raise ExceptionGroup('begins', [RuntimeError({LONG})] * 3)",
    "a_skip": f"import pytest\npytest.skip({LONG})",
}


@pytest.fixture
def rendered(monkeypatch):
    """The errors of which pytest has made a text."""
    found, whole = [], pytest.ExceptionInfo.getrepr

    def getrepr(self, *given, **named):
        found.append(self.value)
        return whole(self, *given, **named)

    monkeypatch.setattr(pytest.ExceptionInfo, "getrepr", getrepr)
    return found


@pytest.mark.parametrize("kind", RAISED)
def test_it_is_cut_before_it_is_rendered(site, capsys, rendered, kind):
    site.plugin(
        kind,
        faulty_backend.LIGHT.format(name=kind, facts="dict()"),
        heavy=faulty_backend.HEAVY + forward(RAISED[kind]),
    )
    assert main([kind, "--json", "--examples", "2", "-k", "test_decode"]) == 1
    out, err = capsys.readouterr()
    (failure,) = json.loads(out)["failures"]
    assert "begins" in failure["reason"]
    assert "begins" in err
    assert len(out) + len(err) < 50_000
    ((told,),) = [error.args for error in rendered]
    assert len(told) < 10_000
    assert all(error.__cause__ is error.__context__ is None for error in rendered)


def test_a_text_says_how_much_is_left_out():
    assert text_of(ConformanceError("a\n" * 10)) == "a\n" * 10
    text = text_of(ConformanceError("a\n" * 10_000))
    assert (text[:4], text[4000:]) == ("a\na\n", " ... (20000 letters)")
