"""``make bench``: what is saved and compared, and that a missed goal is no error unless --strict asks for it."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAVED = ROOT / "benchmarks" / "results" / "Linux-CPython-3.11-64bit" / "0002_two-core-xeon_20261121.json"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """benchmarks/run.py with a history of its own, and a pytest that saves a made-up run; ``told`` has its words."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "run", raising=False)
    monkeypatch.delitem(sys.modules, "reach", raising=False)
    import run

    told = []

    def pytest_run(words, cwd):
        told.append(words)
        value = {word.partition("=")[0]: word.partition("=")[2] for word in words}
        text = json.dumps(run.made)
        if "--benchmark-autosave" in words:
            folder = Path(value["--benchmark-storage"].removeprefix("file://"), run.get_machine_id())
            folder.mkdir(exist_ok=True)
            (folder / f"{len(told):04}_x.json").write_text(text)
        return subprocess.CompletedProcess(words, run.code)

    monkeypatch.setattr(run, "HISTORY", tmp_path / "history")
    monkeypatch.setattr(run, "subprocess", types.SimpleNamespace(run=pytest_run))
    monkeypatch.setattr(run, "made", json.loads(SAVED.read_text()), raising=False)
    monkeypatch.setattr(run, "code", 0, raising=False)
    monkeypatch.setattr(run, "told", told, raising=False)
    yield run
    for name in ("run", "reach"):
        sys.modules.pop(name, None)


def slow(made):
    """The run with a goal missed."""
    for one in made["benchmarks"]:
        if (one["group"], one["extra_info"]["way"]) == ("decode 256", "persistent"):
            one["stats"]["median"] = 9.0


def test_the_first_run_is_saved_and_compared_with_nothing(bench, capsys):
    assert bench.main([]) == 0
    assert "--benchmark-autosave" in bench.told[0]
    assert "--benchmark-compare" not in bench.told[0]
    assert "holds" in capsys.readouterr().out
    assert len(list(bench.HISTORY.rglob("*.json"))) == 1

    assert bench.main([]) == 0
    assert "--benchmark-compare" in bench.told[1]
    assert "compared with " in capsys.readouterr().out


def test_runs_of_another_machine_are_not_compared_with(bench, monkeypatch):
    assert bench.main([]) == 0
    monkeypatch.setattr(bench, "machine_name", lambda facts: "another")
    assert bench.main([]) == 0
    assert "--benchmark-compare" not in bench.told[1]
    assert len(list(bench.HISTORY.iterdir())) == 2


def test_a_missed_goal_is_an_error_with_strict_only(bench, capsys):
    slow(bench.made)
    assert bench.main([]) == 0
    assert capsys.readouterr().out.count("MISSED") >= 1
    assert bench.main(["--strict"]) == 1


def test_a_part_is_neither_saved_nor_judged(bench, capsys):
    slow(bench.made)
    assert bench.main(["--strict", "--", "-k", "TestDecode"]) == 0
    assert bench.told[0][-2:] == ["-k", "TestDecode"]
    assert not list(bench.HISTORY.rglob("*.json"))
    assert "goal" not in capsys.readouterr().out


def test_what_changed_on_the_machine_is_one_line(bench, capsys):
    bench.main([])
    bench.made["machine_info"].update(numpy="9.9", hz="other")
    capsys.readouterr()
    bench.main([])
    assert "the last saved run differs: numpy 2.4.6 then, 9.9 now\n" in capsys.readouterr().out


def test_a_history_that_cannot_be_written_is_a_line(bench, capsys):
    bench.HISTORY.write_text("a file where a folder should be")
    assert bench.main([]) == 0
    assert capsys.readouterr().err.startswith("bench: the run is not saved: ")
    assert bench.HISTORY.is_file()


@pytest.mark.parametrize(("code", "ours"), [(1, 1), (2, 2), (5, 2)])
def test_a_benchmark_that_fails_is_an_error(bench, monkeypatch, code, ours):
    monkeypatch.setattr(bench, "code", code)
    assert bench.main([]) == ours


def test_git_ignores_the_history():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {".benchmarks/", "benchmarks/history/"} <= set(ignored)
