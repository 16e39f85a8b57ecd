"""``make bench-history``: machines apart, runs in the order of their time, pages that need nothing else."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / "benchmarks" / "results").glob("Linux-*/*.json"))


@pytest.fixture
def history():
    spec = importlib.util.spec_from_file_location("benchmarks_history", ROOT / "benchmarks" / "history.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def saved(tmp_path):
    """Writes a run of two ways, made up; the file."""

    def save(name, day, median=1e-6, **cpu):
        info = {
            "cpu": {"brand_raw": "A <processor>", "family": 6, "model": 1, "count": 2, **cpu},
            "python_version": "3.11.7", "python_implementation": "CPython", "numpy": "2.4.6",
        }  # fmt: skip
        benchmarks = [
            {"group": group, "name": "t", "extra_info": {"way": way}, "stats": {"median": value, "iqr": 1e-8}}
            for group, way, value in (
                ("decode 256", "persistent", median),
                ("decode 256", "numpy", 3e-5),
                ("decode 8", "persistent", 2e-7),
            )
        ]
        found = {"machine_info": info, "commit_info": {"id": "0123456789", "dirty": True}, "benchmarks": benchmarks}
        file = tmp_path / name
        file.write_text(json.dumps({**found, "datetime": f"2026-11-{day:02}T12:00:00+00:00"}))
        return file

    return save


def test_machines_are_kept_apart_and_runs_stand_in_the_order_of_their_time(history, saved):
    files = [saved("a.json", 9), saved("b.json", 3), saved("c.json", 5, model=2), saved("d.json", 5, count=4)]
    found = history.machines(files)
    assert sorted(len(runs) for runs in found.values()) == [1, 1, 2]
    (both,) = (runs for runs in found.values() if len(runs) == 2)
    assert [run.time.day for run in both] == [3, 9]
    points = history.series(both)
    assert list(points) == ["decode 8", "decode 256"]
    assert [(time.day, median, commit) for time, median, _, commit in points["decode 256"]["persistent"]] == [
        (3, 1e-6, "0123456+"),
        (9, 1e-6, "0123456+"),
    ]


def test_the_committed_runs_are_those_of_three_machines(history, capsys):
    found = history.machines(COMMITTED)
    assert capsys.readouterr().err == ""
    assert len(found) == len(COMMITTED) == 3
    assert all("decode 256" in history.series(runs) for runs in found.values())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine_info": {}, "commit_info": {}}'])
def test_a_file_that_holds_no_run_is_a_line(history, saved, tmp_path, capsys, text):
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    assert len(history.machines([bad, saved("a.json", 1)])) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"history: {bad} holds no run: ")
    assert error.count("\n") == 1


def test_a_page_has_a_chart_of_every_group_and_loads_nothing(history, saved, tmp_path, monkeypatch, capsys):
    if not (importlib.util.find_spec("pygal") and importlib.util.find_spec("pygaljs")):
        pytest.skip("pygal draws the pages; requirements/history.txt has it")
    for name, day in (("a.json", 3), ("b.json", 9)):
        saved(name, day)
    saved("c.json", 5, count=16)
    monkeypatch.setattr(history, "ROOT", tmp_path)
    monkeypatch.setattr(history, "FOLDERS", ("*.json",))
    into = tmp_path / "pages"
    assert history.main(["--into", str(into)]) == 0
    assert capsys.readouterr().out == f"2 machines, 3 runs: {into / 'index.html'}\n"
    index = (into / "index.html").read_text()
    links = re.findall('href="([^"]+)"', index)
    assert len(links) == 2
    assert "A &lt;processor&gt;, 16 cores, CPython 3.11" in index
    for link, dots in zip(links, (1, 2), strict=True):
        page = (into / link).read_text()
        assert page.count("<svg") == 2
        assert page.count('class="dot reactive') == 3 * dots
        assert "interquartile range 10 ns" in page
        assert not re.search(r'(src|href)="(?!index.html|#)', page)
    assert all(hasattr(finder, "find_spec") for finder in sys.meta_path)  # Python warns of pygal's at each import


def test_without_a_run_or_the_library_it_says_what_to_do(history, saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(history, "ROOT", tmp_path)
    monkeypatch.setattr(history, "FOLDERS", ("*.json",))
    assert history.main([]) == 2
    assert capsys.readouterr().err == "history: no run is saved yet; make bench saves one\n"
    saved("a.json", 3)
    monkeypatch.setitem(sys.modules, "pygal", None)
    assert history.main(["--into", str(tmp_path / "pages")]) == 2
    assert "pip install -r requirements/history.txt" in capsys.readouterr().err
