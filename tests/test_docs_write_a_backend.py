"""docs/write-a-backend.md: a backend that passes the kit, commands that run. And the tables of conformance.md."""

import json
import re
import shlex
from pathlib import Path

import pytest
from planting import Site, site

import attncore
from attncore.cli import main
from attncore.testing import __main__ as kit
from attncore.testing.engines.tolerances import TOLERANCES
from attncore.testing.harness.fixtures import EXAMPLES
from attncore.testing.harness.run_suite import conformance
from attncore.testing.suite import CHECKS

__all__ = ["site"]
DOCS = Path(__file__).parents[1] / "docs"


def snippets(language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / "write-a-backend.md").read_text(), re.DOTALL)


@pytest.fixture
def acme(site: Site, monkeypatch, tmp_path_factory):
    """The backend of the page, as an installed distribution."""
    spec, backend, *_ = snippets("python")
    (site.folder / "attn_acme").mkdir()
    (site.folder / "attn_acme" / "__init__.py").write_text(spec)
    (site.folder / "attn_acme" / "backend.py").write_text(backend)
    site.plugin("acme", "", module="unused")
    (site.folder / "attn_acme-1.0.dist-info" / "entry_points.txt").write_text("[attncore.backends]\nacme = attn_acme\n")
    site.modules |= {"attn_acme", "attn_acme.backend"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    return site


def test_the_pages_backend_passes_the_kit(acme):
    code, report = conformance("acme", settings="EXAMPLES = 6\n", options=("-p", "no:terminal"))
    assert report.failures == []
    assert code == 0
    states = {row["capability"]: row["state"] for row in report.rows()}
    assert states["logits_soft_cap"] == states["mixed batches"] == states["NaN canary"] == "supported"


def test_every_command_of_the_page_runs(acme, tmp_path_factory, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))  # not the site's folder: modules are not searched here
    expected = {"attncore explain --assume cpu --head-size 80": 0}
    for block in snippets("console"):
        for line in block.splitlines():
            words = shlex.split(line.removeprefix("$ "))
            if words[0] == "attncore":
                quick = ["--passes", "3", "--seconds", "0.001"] if words[1] == "bench" else []
                assert main([*words[1:], *quick]) == expected.get(line.removeprefix("$ "), 0), line
            elif words[:3] == ["python", "-m", "attncore.testing"]:
                assert kit.main([*words[3:], "-k", "test_decode"]) == 0
            else:  # tests/test_template.py installs and runs a repository from its wheel
                assert words[0] in ("cd", "pip", "pytest")
            out = capsys.readouterr().out
            if "--head-size 128" in line:
                assert re.search(r"^acme \(attn-acme 1\.0\): chosen", out, re.MULTILINE)
            if "--head-size 80" in line:
                assert "acme (attn-acme 1.0): head_size 80 not supported" in out
            if "--json" in line:
                assert json.loads(out)["backend"] == "acme"


def test_the_other_snippets_are_what_they_say(acme):
    _, _, suite, expected = snippets("python")
    names = {}
    exec(suite, names)
    assert names["BACKEND"] == "acme"
    assert len([line for line in suite.splitlines() if line]) == 2
    exec(expected, names)
    for test in names["EXPECTED_FAILURES"]:
        assert test.partition("[")[0] in names


def test_the_links_lead_somewhere():
    for page in ("write-a-backend.md", "conformance.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text()):
            assert (DOCS / target).exists(), target


def test_the_page_is_a_page_and_a_half():
    assert len((DOCS / "write-a-backend.md").read_text().split()) < 1300


def test_the_tables_of_conformance_are_those_of_the_code():
    text = (DOCS / "conformance.md").read_text()
    for dtype, number in TOLERANCES.items():
        row = f"| {'an fp8 cache' if dtype == 'fp8' else dtype} | {number:.0e} |".replace("e-0", "e-")
        assert row in text
    assert f"| `EXAMPLES` | {EXAMPLES} |" in text
    words = set(re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE))
    listed = " ".join(words)
    for check in CHECKS:
        for name in check.__all__:
            capability = getattr(check, name).attncore_capability
            first = capability.removeprefix("declared ")
            assert first in listed or "{" in first or first in ("kv_scales", "multi_token_decode", "alibi_standard"), (
                first
            )


def test_the_first_snippet_is_a_spec_that_imports_nothing_heavy():
    names = {}
    exec(snippets("python")[0], names)
    spec = names["attncore_backend"]()
    assert isinstance(spec, attncore.BackendSpec)
    assert "torch" not in names
