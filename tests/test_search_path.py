"""The current folder is data: neither the command nor its child processes search it for modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import attncore
from attncore.registry.child_process import run_in_child
from attncore.search_path import without_current_folder

LIBRARY = os.path.dirname(os.__file__)
SITE = f"{LIBRARY}/site-packages"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with files of the names of modules that attncore and its children import."""
    for name in ("torch", "json", "numpy", "pluggy", "argparse", "subprocess", "attn_planted"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    info = tmp_path / "attn_planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attn-planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attncore.backends]\nplanted = attn_planted\n")
    return tmp_path


@pytest.mark.parametrize("words", [["list"], ["doctor", "--no-create"]])
def test_the_command_does_not_search_the_current_folder(folder, words):
    environ = {**os.environ, "PYTHONPATH": str(Path(attncore.__file__).parents[1]), "ATTNCORE_PLUGINS": "reference"}
    done = subprocess.run(
        [sys.executable, "-m", "attncore", *words],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "reference" in done.stdout
    assert "planted" not in done.stdout
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(("words", "runs_its"), [(["-m"], True), (["-P", "-m"], False)])
def test_a_folder_of_our_name_is_pythons_to_find(folder, words, runs_its):
    """With ``-m`` alone Python has found it before anything of ours runs."""
    (folder / "attncore").mkdir()
    (folder / "attncore" / "__main__.py").write_text("print('not ours')\n")
    (folder / "attncore" / "__init__.py").touch()
    environ = {**os.environ, "PYTHONPATH": str(Path(attncore.__file__).parents[1]), "PYTHONSAFEPATH": ""}
    command = [sys.executable, *words, "attncore", "--version"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=300)
    assert (done.stdout == "not ours\n") == runs_its


def test_a_child_process_does_not_search_the_current_folder(folder, monkeypatch):
    # as `python -m` in this folder has it
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    assert run_in_child(["-c", "import json, torch"], 120) == ""
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("python_path", "before", "after"),
    [
        ("", ["{here}", LIBRARY, SITE], [LIBRARY, SITE]),
        ("", ["", LIBRARY, SITE], [LIBRARY, SITE]),
        (":/x", ["{here}", "{here}", "/x", LIBRARY], ["/x", LIBRARY]),
        ("{here}", ["{here}", LIBRARY], ["{here}", LIBRARY]),
        ("{here}/", ["{here}", LIBRARY], ["{here}", LIBRARY]),
        ("", ["/scripts", LIBRARY, SITE, "{here}"], ["/scripts", LIBRARY, SITE, "{here}"]),
    ],
    ids=["-m", "-c", "empty element", "named", "named with a slash", "installed for development"],
)
def test_what_is_left_of_the_path(tmp_path, monkeypatch, python_path, before, after):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path.format(here=tmp_path))
    monkeypatch.setattr(sys, "path", [place.format(here=tmp_path) for place in before])
    assert without_current_folder() == [place.format(here=tmp_path) for place in after]


def test_the_folder_that_attncore_is_imported_from_stays(monkeypatch):
    here = str(Path(attncore.__file__).parents[1])
    monkeypatch.chdir(here)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [here, LIBRARY])
    assert without_current_folder() == [here, LIBRARY]


def test_objects_on_the_path_that_are_no_text_are_left_out(monkeypatch):
    monkeypatch.setattr(sys, "path", [Path("/x"), "/y", LIBRARY, 3])
    assert without_current_folder() == ["/y", LIBRARY]


@pytest.mark.parametrize("variable", ["", "tests"])
def test_a_current_folder_that_is_gone(tmp_path, monkeypatch, variable):
    monkeypatch.setenv("PYTHONPATH", variable)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", LIBRARY])
    assert without_current_folder() == [LIBRARY]
