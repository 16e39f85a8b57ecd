"""attncore bench, the command: what it prints, saves and answers. tests/testing/test_bench.py has what it stands on."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attncore.cli import main
from attncore.cli.bench import _percent
from attncore.testing.bench import run as runs
from attncore.testing.bench.run import PassError
from attncore.testing.bench.saved_runs import Row, Run


@pytest.fixture(autouse=True)
def state(tmp_path_factory, monkeypatch):
    """A folder of saved runs of this test's own."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


@pytest.fixture
def measured(monkeypatch):
    """Runs that are made up; appended to the list is the factor of the next one, else it is 1. The questions asked."""
    factors, asked, times = [], [], itertools.count()

    def measure(question, passes, done=None):
        asked.append(question)
        factor = factors.pop(0) if factors else 1.0
        rows = [
            Row(step, part, [4e-6 * f] * passes, [3e-6] * passes, [5e-6] * passes, [0.4 * f] * passes, [0.5] * passes)
            for step, part, f in (("decode of 1", "build", 1.0), ("chunk of 128 beside 16 decodes", "forward", factor))
        ]
        config = {"device": "cpu", "num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"}
        return Run(
            question.backend,
            {"cpu": "c", "family": "", "model": "", "cores": "2"},
            f"2026-11-22T00:00:{next(times):02}.000Z",
            {"python": "3.11.7", "distribution": question.version},
            {**config, "block_size": 16, "kv_cache_dtype": measure.cache},
            "",
            rows,
            {"prefill of 256": "its spec declares no phase prefill"},
        )

    monkeypatch.setattr(runs, "measure", measure)
    measure.factors, measure.asked, measure.cache = factors, asked, "auto"
    return measure


def test_the_first_run_is_saved_and_the_second_is_compared(measured, capsys, state):
    assert main(["bench", "reference"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("reference (attncore ")
    assert out[0].endswith(
        "on cpu: 8 query heads, 2 key/value heads, head size 64, float32, blocks of 16; 5 passes, one thread"
    )
    assert out[1].split() == ["STEP", "PART", "MEDIAN", "IQR", "TO", "REF", "CHANGE"]
    assert out[2].split() == ["decode", "of", "1", "build", "4", "us", "50", "%", "0.50x", "first", "run"]
    assert out[4] == "prefill of 256: unsupported, its spec declares no phase prefill"
    assert [line.partition(":")[0] for line in out[5:9]] == ["PART", "IQR", "TO REF", "CHANGE"]
    assert out[9].startswith("no saved run of this backend, these sizes and this machine")
    assert len(list(state.rglob("*.json"))) == 1

    assert main(["bench", "reference"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split()[-3:] == ["CHANGE", "USUAL", "TREND"]
    assert out[2].endswith("0 %     0 to 0 %  ▄▄")
    assert out[9].startswith("USUAL: ")
    assert out[10] == "1 saved run since 2026-11-22: with 3 or more, rows that got slower are named"
    assert len(list(state.rglob("*.json"))) == 2
    for _ in range(2):
        main(["bench", "reference"])
    assert "0 of 2 rows slower than in 3 saved runs since 2026-11-22" in capsys.readouterr().out


def test_the_heading_says_of_what_a_cache_is_where_it_is_not_of_the_keys_dtype(measured, capsys):
    measured.cache = "fp8_e4m3"
    assert main(["bench", "reference"]) == 0
    assert " head size 64, float32, a cache of fp8_e4m3, blocks of 16; " in capsys.readouterr().out.splitlines()[0]


def test_a_run_that_is_too_short_is_neither_compared_nor_saved(measured, capsys, state):
    for _ in range(3):
        main(["bench", "reference"])
    measured.factors.append(1.45)
    capsys.readouterr()
    assert main(["bench", "reference", "--seconds", "0.01"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[-1] == "--seconds 0.01 is too short to compare runs, and the run is not saved"
    assert out.count("too short") == 3
    assert "slower" not in out.partition("CHANGE: ")[0]
    assert len(list(state.rglob("*.json"))) == 3
    assert main(["bench", "reference", "--seconds", "0.01", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["change"]["verdict"] for row in report["rows"]] == ["too short", "too short"]
    assert (report["compared_with"], report["saved"]) == ([], None)
    measured.factors += [1.45, 1.45]  # measured twice, since it looks slower
    assert main(["bench", "reference", "--seconds", "0.05", "--strict"]) == 1


@pytest.mark.parametrize("device", ["foo", "cuda:99"])
def test_a_device_that_is_none_is_bad_usage(measured, capsys, device):
    assert main(["bench", "reference", "--device", device]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"attncore: error: --device: '{device}' cannot be used here: ")
    assert "hpu" not in error  # of torch's list
    assert error.count("\n") == 1
    assert not measured.asked


def test_a_percentage_of_nothing_has_no_sign():
    assert [_percent(value, "+") for value in (-0.4, 0.4, 1.6, -1.6)] == ["0 %", "0 %", "+2 %", "-2 %"]


def test_a_user_without_a_home_keeps_no_run(measured, capsys, monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert main(["bench", "reference"]) == 0
    out, err = capsys.readouterr()
    assert "first run" in out
    assert err.startswith("attncore bench: the run is not saved: ")
    assert err.count("\n") == 1


def test_a_saved_run_that_cannot_be_used_is_a_note(measured, capsys, state):
    main(["bench", "reference"])
    (file,) = state.rglob("*.json")
    file.write_text("{}")
    capsys.readouterr()
    assert main(["bench", "reference"]) == 0
    said = f"attncore bench: the saved run {file.name!r} is left out: it is damaged or not yours\n"
    assert capsys.readouterr().err == said


def test_what_is_slower_is_measured_again_and_said_but_no_error(measured, capsys):
    for _ in range(3):
        main(["bench", "reference"])
    capsys.readouterr()
    measured.factors += [1.5, 1.5]
    assert main(["bench", "reference", "--no-save"]) == 0
    found = capsys.readouterr()
    assert found.err == "some rows look slower than in the saved runs: all is measured once more\n"
    assert "10 passes" in found.out
    assert next(line for line in found.out.splitlines() if "slower" in line).split()[-8:-5] == ["+50", "%", "slower"]
    assert "1 of 2 rows slower" in found.out
    measured.factors += [1.5, 1.0]
    assert main(["bench", "reference", "--no-save", "--strict"]) == 0
    measured.factors += [1.5, 1.5]
    assert main(["bench", "reference", "--no-save", "--strict"]) == 1
    assert len(measured.asked) == 9


def test_json_has_every_pass_and_the_change(measured, capsys, state):
    main(["bench", "reference"])
    capsys.readouterr()
    assert main(["bench", "reference", "--json", "--passes", "3"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert (found["backend"], found["compared_with"]) == ("reference", ["2026-11-22T00:00:00.000Z"])
    assert [len(row["median"]) for row in found["rows"]] == [3, 3]
    assert found["rows"][1]["change"] == {"verdict": "too few runs", "percent": 0, "usual": [0, 0]}
    assert os.path.dirname(found["saved"]).startswith(str(state))


@pytest.mark.parametrize("columns", [60, 80, 109])
def test_a_narrow_terminal_has_what_fits(measured, capsys, monkeypatch, columns):
    for _ in range(3):
        main(["bench", "reference"])
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    measured.factors += [0.3]
    assert main(["bench", "reference"]) == 0
    lines = re.sub("\x1b\\[[0-9]*m", "", capsys.readouterr().out).splitlines()
    first = next(i for i, line in enumerate(lines) if "MEDIAN" in line) - (columns < 80)
    last = next(i for i, line in enumerate(lines) if line.startswith("prefill of 256: unsupported"))
    table = [line.rstrip() for line in lines[first:last]]
    assert len(table) == (6 if columns < 80 else 3)
    assert ("chunk of 128 beside 16 decodes:" in table) == (columns < 80)
    assert [line.split()[-1] for line in table if "CHANGE" in line] == ["CHANGE"] * (2 if columns < 80 else 1)
    assert table[-1].endswith("0.50x   -70 % faster")
    assert max(len(line) for line in lines if not line.startswith("    /")) <= columns  # where it is saved


def test_a_wide_terminal_has_the_trend(measured, capsys, monkeypatch):
    main(["bench", "reference"])
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["bench", "reference"]) == 0
    assert "TREND" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_a_line_and_no_error(measured, capsys, state):
    (state / "attncore").write_text("a file where a folder should be")
    assert main(["bench", "reference"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("attncore bench: the run is not saved: ")
    assert err.count("\n") == 1
    assert "saved as" not in out


def test_a_backend_that_fails_is_one_line(measured, capsys, monkeypatch):
    def fails(question, passes, done=None):
        raise PassError("NAME: reference cannot be timed: it crashed")

    monkeypatch.setattr(runs, "measure", fails)
    assert main(["bench", "reference"]) == 1
    assert capsys.readouterr().err == "attncore: error: NAME: reference cannot be timed: it crashed\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nosuch"], 3, "NAME: no backend 'nosuch' is installed; installed: elsewhere, reference"),
        (["referense"], 3, "; did you mean reference?"),
        (["elsewhere"], 3, "NAME: 'elsewhere' cannot be used here: "),
        ([], 2, "NAME: none given; it is the backend, as `attncore list` prints it"),
        (["reference", "--passes", "2"], 2, "--passes: 2 is not between 3 and 100"),
        (["reference", "--seconds", "-1"], 2, "--seconds: -1 is not between 0.001 and 60"),
        (["reference", "--steps", "none.jsonl"], 2, "--steps: none.jsonl cannot be read: "),
    ],
    ids=["unknown", "misspelt", "not here", "no name", "passes", "seconds", "steps"],
)
def test_mistakes_are_one_line(site, capsys, words, code, said):
    site.plugin("elsewhere", extra="requires=('a-library-that-is-not-there>=2',)")
    assert main(["bench", *words]) == code
    error = capsys.readouterr().err
    assert error.startswith("attncore: error: ")
    assert said in error
    assert error.count("\n") == 1


def test_steps_that_are_none_are_one_line_before_any_pass(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runs, "_one_pass", None)
    (tmp_path / "steps.jsonl").write_text('{"block_size": 16}')
    assert main(["bench", "reference", "--steps", str(tmp_path / "steps.jsonl")]) == 2
    said = f"attncore: error: --steps: {tmp_path}/steps.jsonl: line 1: groups: missing\n"
    assert capsys.readouterr() == ("", said)


def passes_of(parent):
    """The processes that ``parent`` has started for a pass."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ppid = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            if ppid == parent and b"one_pass" in (folder / "cmdline").read_bytes():
                found.append(folder)
        except OSError:  # it has ended
            continue
    return found


def test_interrupted_it_leaves_nothing_behind(state):
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "attncore", "bench", "reference"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        while process.poll() is None and not (children := passes_of(process.pid)):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "attncore: error: interrupted\n"
        assert process.wait() == 130
    end = time.monotonic() + 30
    while any(child.exists() for child in children) and time.monotonic() < end:
        time.sleep(0.05)  # they are killed, and gone when init has heard of it
    assert not any(child.exists() for child in children)
    assert not list(state.rglob("*.json"))


def test_variables_that_the_plugin_declares_are_asked_with(site, measured, monkeypatch):
    site.plugin("tuned", extra='variables={"ATTNCORE_TUNED_A": "a", "ATTNCORE_TUNED_B": "b"},')
    monkeypatch.setenv("ATTNCORE_TUNED_B", "2")
    monkeypatch.setenv("ATTNCORE_OTHER", "3")
    assert main(["bench", "tuned", "--no-save"]) == 0
    assert measured.asked[0].variables == {"ATTNCORE_TUNED_B": "2"}


def test_the_page_has_the_printed_table_and_a_plot_for_each_part(measured, capsys, tmp_path):
    pytest.importorskip("pygal", reason="pygal draws the page; attncore[html] has it")
    pytest.importorskip("pygaljs", reason="pygal draws the page; attncore[html] has it")
    path = tmp_path / "run.html"
    assert main(["bench", "reference", "--html", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"page written to {path}"
    page = path.read_text()
    assert "<h1>attncore bench reference</h1>" in page
    assert "<td>decode of 1</td><td>build</td><td>4 us</td><td>50 %</td><td>0.50x</td><td>first run</td>" in page
    assert "<p>prefill of 256: unsupported, its spec declares no phase prefill</p>" in page
    assert page.count("<svg") == 2
    assert "build, microseconds" in page
    assert ">reference<" in page
    assert re.search(r"<text[^>]*>chunk of 128 beside 16 decodes</text>", page)
    assert not re.search(r"(src|href)=.http", page)


def test_a_page_behind_a_link_that_leads_to_itself_is_one_line(measured, capsys, tmp_path):
    """``Path.resolve`` raises a RuntimeError for it."""
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for steps in (tmp_path / "steps.jsonl", loop):
        assert main(["bench", "reference", "--steps", str(steps), "--html", str(loop)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not measured.asked


def test_where_the_page_cannot_go_is_said_before_the_run(measured, capsys, tmp_path, monkeypatch):
    steps = tmp_path / "steps.jsonl"
    steps.write_text("")
    assert main(["bench", "reference", "--html", "-"]) == 2
    assert main(["bench", "reference", "--steps", str(steps), "--html", str(steps)]) == 2
    monkeypatch.setitem(sys.modules, "pygal", None)
    assert main(["bench", "reference", "--html", str(tmp_path / "run.html")]) == 2
    said = capsys.readouterr().err
    assert [line.split(": ")[2] for line in said.splitlines()] == ["--html"] * 3
    assert not measured.asked
    assert [file.name for file in tmp_path.iterdir()] == ["steps.jsonl"]
