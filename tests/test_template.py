"""What `attncore new-backend` writes works as it stands: found, chosen, verified, and through the kit."""

import json
import sys
from pathlib import Path

import pytest
from clean_venv import borrow, clean_venv, in_venv, sources
from planting import Site, site

from attncore.cli import main
from attncore.cli.new_backend import TEMPLATE
from attncore.testing.harness.run_suite import conformance

__all__ = ["site"]


@pytest.fixture
def rendered(tmp_path_factory, capsys):
    """The repository of the backend acme-x, just written."""
    directory = tmp_path_factory.mktemp("repository") / "acme"
    assert main(["new-backend", "acme-x", str(directory)]) == 0
    capsys.readouterr()
    return directory


def test_its_own_code_is_under_150_lines(rendered):
    lines = [line for file in (rendered / "src").rglob("*.py") for line in file.read_text().splitlines()]
    assert 50 < len(lines) < 150
    assert len((rendered / "tests" / "test_conformance.py").read_text().split("\n\n")) == 2
    assert not [line for line in lines if "attncore.reference" in line or "attncore.reference.causal" in line]


def test_nothing_is_left_to_fill_in(rendered):
    files = [path for path in rendered.rglob("*") if path.is_file()]
    assert len(files) == len(list(TEMPLATE.rglob("*.txt")))
    for file in files:
        assert "{{" not in file.read_text()
        assert "PACKAGE" not in str(file)


def test_it_is_found_chosen_and_passes_the_kit(rendered, site: Site, capsys):
    for source in (rendered / "src" / "attn_acme_x").iterdir():
        target = site.folder / "attn_acme_x" / source.name
        target.parent.mkdir(exist_ok=True)
        target.write_text(source.read_text())
    site.plugin("acme-x", "", module="unused", version="0.1.0")
    info = site.folder / "attn_acme_x-0.1.0.dist-info"
    (info / "entry_points.txt").write_text("[attncore.backends]\nacme-x = attn_acme_x\n")
    site.modules |= {"attn_acme_x", "attn_acme_x.backend"}

    assert main(["explain", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert (chosen["name"], chosen["block_size"]) == ("acme-x", 16)
    code, report = conformance("acme-x", settings="EXAMPLES = 6\n", options=("-p", "no:terminal"))
    assert (code, report.failures) == (0, [])
    states = {row["capability"]: row["state"] for row in report.rows()}
    assert states["sliding_window"] == states["logits_soft_cap"] == states["NaN canary"] == "supported"
    assert states["sinks"] == "unsupported"


@pytest.mark.slow
def test_its_wheel_works_beside_attncores_wheel_in_a_clean_environment(rendered, tmp_path):
    """Builds both wheels, installs them in a new environment, which sees this one's torch and pytest behind them."""
    source = sources(tmp_path / "source")
    wheels = tmp_path / "wheels"
    pip = ("-m", "pip", "--disable-pip-version-check")
    for project in (source, rendered):
        in_venv(
            sys.executable,
            *pip,
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            wheels,
            project,
            cwd=tmp_path,
        )
    assert len(list(wheels.iterdir())) == 2

    python = clean_venv(tmp_path / "venv")
    in_venv(python, *pip, "install", "-q", "--no-deps", "--no-index", *wheels.iterdir(), cwd=tmp_path)
    packages = borrow(python)

    where = in_venv(
        python, "-c", "import attncore, attn_acme_x as x; print(attncore.__file__, x.__file__)", cwd=tmp_path
    )
    assert all(Path(path).is_relative_to(packages) for path in where.split())
    attncore = str(python.with_name("attncore"))
    rows = {row["name"]: row for row in json.loads(in_venv(attncore, "list", "--json", cwd=tmp_path))}
    assert (rows["acme-x"]["state"], rows["acme-x"]["distribution"]) == ("loaded", "attn-acme-x")
    explained = json.loads(in_venv(attncore, "explain", "--assume", "cpu", "--json", cwd=tmp_path))
    assert explained["chosen"]["name"] == "acme-x"
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    (verdict,) = json.loads(in_venv(attncore, "verify", "acme-x", "--json", cwd=tmp_path, **cache))
    assert verdict["state"] == "agrees"
    words = ("bench", "acme-x", "--json", "--passes", "3", "--seconds", "0.001")
    timed = json.loads(in_venv(attncore, *words, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path)))
    assert (timed["backend"], timed["compared_with"], len(timed["rows"])) == ("acme-x", [], 16)
    assert "| NaN canary | supported |" in in_venv(python, "-m", "pytest", cwd=rendered)
    table = json.loads(in_venv(python, "-m", "attncore.testing", "acme-x", "--json", "--examples", "5", cwd=tmp_path))
    assert (table["distribution"], table["failures"]) == ("attn-acme-x", [])
