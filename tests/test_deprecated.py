"""Names that go: they warn for two minor releases, where the caller stands, and are taken out then."""

import ast
import re
import warnings
from pathlib import Path

import pytest
from packaging.version import Version

import attncore
from attncore import deprecated as module
from attncore.deprecated import DEPRECATED, Deprecation, deprecated, warn_deprecated

ROOT = Path(__file__).parents[1]
ROWS = {
    "attncore.choose": Deprecation("0.1", "attncore.select"),
    "attncore.gone": Deprecation("0.1", "a loop"),
    "Batch.free": Deprecation("0.9", "Batch.remove"),
}


@pytest.fixture
def planted(monkeypatch):
    for name, row in ROWS.items():
        monkeypatch.setitem(module.DEPRECATED, name, row)


def faults(rows, version, source, changelog):
    """What is wrong with the table of names that go, in a tree of ``version``."""
    used = {
        call.args[0].value
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) in ("deprecated", "warn_deprecated")
        if call.args and isinstance(call.args[0], ast.Constant)
    }
    for name, row in rows.items():
        if not re.fullmatch(r"\d+\.\d+", row.since):
            yield f"{name}: since {row.since!r} is no X.Y"
        elif Version(version) >= Version(row.removed_in):
            yield f"{name}: was to go in {row.removed_in}, and this is {version}: take it out, and its row"
        elif Version(row.since) > Version(version):
            yield f"{name}: since {row.since}, and this is {version}"
        if name not in used and not (name.startswith("attncore.") and row.instead.startswith("attncore.")):
            yield f"{name}: nothing warns of it"
        if name.removeprefix("attncore.") not in changelog:
            yield f"{name}: CHANGELOG.md does not say so"
    yield from (f"{name}: it warns, and has no row" for name in sorted(used - rows.keys()))


def test_the_names_that_go_here():
    files = [path for path in (ROOT / "attncore").rglob("*.py") if path.name != "deprecated.py"]
    source = "\n".join(path.read_text() for path in files if "deprecated(" in path.read_text())
    assert list(faults(DEPRECATED, attncore.__version__, source, (ROOT / "CHANGELOG.md").read_text())) == []


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("0.3.0", []),
        ("0.4.9", []),
        ("0.5.0.dev1", []),
        ("0.5.0", ["Batch.free: was to go in 0.5, and this is 0.5.0: take it out, and its row"]),
        ("1.0.0", ["Batch.free: was to go in 0.5, and this is 1.0.0: take it out, and its row"]),
        ("0.2.0", ["Batch.free: since 0.3, and this is 0.2.0"]),
    ],
)
def test_a_name_that_is_older_than_two_releases_fails_the_suite(version, found):
    rows = {"Batch.free": Deprecation("0.3", "Batch.remove")}
    assert list(faults(rows, version, "@deprecated('Batch.free')\ndef free(): ...", "`Batch.free` goes")) == found


def test_a_row_has_its_warning_and_the_changelog_has_both():
    rows = {"Batch.free": Deprecation("0.3", "Batch.remove"), "attncore.choose": Deprecation("0.3", "attncore.select")}
    assert list(faults(rows, "0.3.0", "warn_deprecated('Batch.grow')", "choose")) == [
        "Batch.free: nothing warns of it",
        "Batch.free: CHANGELOG.md does not say so",
        "Batch.grow: it warns, and has no row",
    ]
    assert list(faults({"a": Deprecation("3", "b")}, "0.3.0", "deprecated('a')", "a")) == ["a: since '3' is no X.Y"]


@pytest.mark.usefixtures("planted")
def test_a_call_warns_where_the_caller_stands():
    @deprecated("Batch.free")
    def free(count):
        """Its own text."""
        return count + 1

    text = r"^Batch\.free is deprecated since attncore 0\.9 and goes in 0\.11; use Batch\.remove$"
    with pytest.warns(DeprecationWarning, match=text) as caught:
        assert free(count=2) == 3
    assert caught[0].filename == __file__
    assert (free.__name__, free.__doc__) == ("free", "Its own text.")


@pytest.mark.usefixtures("planted")
def test_a_function_that_warns_of_an_argument():
    def free(count=None):
        if count is not None:
            warn_deprecated("Batch.free")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        free()
        free(count=3)
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.usefixtures("planted")
def test_a_name_of_attncore_that_is_another_now():
    for _ in range(2):  # nothing is kept that would silence the second use
        with pytest.warns(DeprecationWarning, match="use attncore.select") as caught:
            assert attncore.choose is attncore.select
        assert caught[0].filename == __file__
    with pytest.raises(AttributeError):
        attncore.gone  # noqa: B018
    assert not hasattr(attncore, "never_there")
    assert "choose" not in dir(attncore)


def test_a_name_without_a_row_is_a_mistake_of_ours():
    with pytest.raises(KeyError):
        warn_deprecated("Batch.nothing")
