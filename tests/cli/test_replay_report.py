"""The report of attncore replay: on a terminal, in a pipe, as a page, as JSON."""

import gzip
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from replay_command import ran, reported

import attncore
from attncore.cli import main
from attncore.how_to_install import install_extra
from attncore.replay.results import report
from attncore.replay.results.terminal import print_report

SMALL = ["--num-heads", "2", "--num-kv-heads", "1", "--head-size", "8", "--layers", "1"]
BLOCKS = set("▁▂▃▄▅▆▇█▏▎▍▌▋▊▉")


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
@pytest.mark.parametrize("attention", [False, True])
def test_a_report_fits_its_terminal(capsys, trace, monkeypatch, columns, attention):
    if attention:
        pytest.importorskip("torch")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = ran(capsys, trace, *(SMALL if attention else ["--metadata-only"]))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines[1:])) <= min(columns, 120)
    assert "\x1b" not in out
    assert set(out) & BLOCKS
    verdict = " ".join(out.split()).rpartition(" OK: 3 requests were served in ")[2]
    assert re.search(
        "us with warm caches, .* match dense attention" if attention else "a plain recount gives.$", verdict
    )
    if columns >= 60:
        assert any(line.startswith("build, hot, us  ") for line in lines)
        assert any(line.startswith("build, cold, us  ") for line in lines) == attention
        assert any("cold builds" in line for line in lines) == attention
        assert any(line.startswith("prompt tokens  ") and set(line) & BLOCKS for line in lines)


@pytest.mark.parametrize("columns", range(1, 41))
def test_a_terminal_may_be_narrow(capsys, monkeypatch, timed_report, columns):
    """Nothing is wrapped to fewer than 30 columns; the title is one line anywhere."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for seconds in (3e-4, 1, 4e3):  # a bin
        print_report({**timed_report, "timeline": {**timed_report["timeline"], "bin_s": seconds}})
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines()[1:])) <= max(columns, 30)
        assert f" {240 * seconds:,.1f} s     most\n" in out


@pytest.fixture(scope="module")
def timed_report():
    """The report of a replay of three requests."""
    words = [sys.executable, "-m", "attncore", "replay", "--requests", "3", "--metadata-only", "--json"]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_one_request_of_a_synthetic_workload(capsys):
    assert main(["replay", "--requests", "1", "--metadata-only"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Replay of a synthetic workload\n")
    assert "OK: 1 request was served in " in " ".join(out.split())


def test_what_was_written_is_said_at_the_end(capsys, trace, tmp_path):
    pytest.importorskip("pygal")
    steps, page = str(tmp_path / "steps.jsonl"), str(tmp_path / "page.html")
    code, out, _ = ran(capsys, trace, "--metadata-only", "--save-steps", steps, "--html", page)
    assert code == 0
    assert out.splitlines()[-2:] == [f"steps written to {steps}, for `attncore build`", f"page written to {page}"]


@pytest.mark.parametrize(
    "options",
    [["--groups", "full:16,window:8:32"], ["--speculative", "2"], ["--context-parallel", "2:4", "--block-size", "8"]],
)
def test_what_reads_saved_steps_is_said(capsys, trace, tmp_path, options):
    steps = tmp_path / "steps.jsonl"
    code, out, _ = ran(capsys, trace, "--metadata-only", "--save-steps", str(steps), *options)
    command = out.splitlines()[-1].partition(f"steps written to {steps}, for `attncore ")[2].removesuffix("`")
    assert (code, main([*shlex.split(command), str(steps)])) == (0, 0)


def test_a_short_time_is_not_0(capsys, trace):
    _, out, _ = ran(capsys, trace, "--metadata-only")
    assert re.search(r"s of virtual time, ([1-9][0-9]* ms|[0-9.]+[1-9] s) here", " ".join(out.split()))


def test_the_timeline_says_what_its_numbers_are_of(capsys, trace):
    _, out, _ = ran(capsys, trace, "--metadata-only")
    legend = (
        r"a column is ([0-9.e-]+) s; most: requests of one step, tokens of one column "
        r"\(a longer step's are shared among its columns\)"
    )
    seconds = float(re.search(legend, " ".join(out.split()))[1])
    letters = next(line for line in out.splitlines() if line.startswith("requests  ") and set(line) & BLOCKS)
    virtual = float(re.search(r"0 virtual time +([0-9.]+) s", out)[1])
    assert seconds * len(letters.split()[1]) == pytest.approx(virtual, abs=0.06)


def test_a_trace_is_read_from_standard_input(trace):
    words = [sys.executable, "-m", "attncore", "replay", "-", "--metadata-only", "--json"]
    for data in (Path(trace).read_bytes(), gzip.compress(Path(trace).read_bytes())):
        told = subprocess.run(words, capture_output=True, check=True, timeout=120, input=data)
        assert json.loads(told.stdout)["trace"] == {"source": "standard input", "format": "mooncake"}


def test_every_term_of_the_table_is_explained(capsys, trace):
    pytest.importorskip("torch")
    _, out, _ = ran(capsys, trace, *SMALL)
    for term in ("build", "cold", "hot", "attention", "p50, p90, p99"):
        assert re.search(f"^{term}  +[a-z0-9]", out, re.MULTILINE)
    assert not re.search("^(plan|model) ", out, re.MULTILINE)


def test_an_encoding_without_blocks_gets_ascii(trace):
    words = [sys.executable, "-m", "attncore", "replay", trace, "--metadata-only"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    told = subprocess.run(words, capture_output=True, check=True, timeout=120, env=ascii_only)
    assert told.stderr == b""
    assert re.search(r"^ +[0-9.]+ +[0-9]+ #+$", told.stdout.decode("ascii"), re.MULTILINE)


def test_json_says_on_what(capsys, trace):
    pytest.importorskip("torch")
    found = reported(capsys, trace, *SMALL)
    assert found["versions"]["attncore"] == attncore.__version__
    assert {"python", "numpy", "torch"} <= set(found["versions"])
    assert set(found["host"]) == {"cpu", "cores", "platform"}
    assert found["device"].startswith(("cpu", "cuda"))
    assert sum(found["build_histogram"]["cold"]) == sum(found["build_histogram"]["hot"]) == found["steps"]
    assert sum(found["timeline"]["decode_tokens"]) == pytest.approx(found["decode_tokens"])
    only = reported(capsys, trace, "--metadata-only")
    assert (only["build_us"]["cold"], only["build_histogram"]["cold"], only["device"]) == (None, [], "cpu")


def test_hot_is_said_to_be_the_same_steps_only_beside_cold(capsys, trace):
    _, out, _ = ran(capsys, trace, "--metadata-only")
    assert "hot with only the scheduler between two builds, as in a loop of builds" in " ".join(out.split())


def test_a_page_holds_all_that_it_shows(capsys, trace, tmp_path):
    pytest.importorskip("torch")
    if not (importlib.util.find_spec("pygal") and importlib.util.find_spec("pygaljs")):
        pytest.skip("pygal draws the page; attncore[html] has it")
    odd = tmp_path / "a<b>.jsonl"
    odd.write_bytes(Path(trace).read_bytes())
    path = tmp_path / "report.html"
    code, out, err = ran(capsys, str(odd), *SMALL, "--html", str(path))
    assert (code, err) == (0, "")
    assert "OK: 3 requests" in out
    page = path.read_text()
    drawn = [ElementTree.fromstring(svg) for svg in re.findall("<svg.*?</svg>", page, re.DOTALL)]
    assert len(drawn) == 3
    assert "nan" not in "".join(
        path.get("d", "") for svg in drawn for path in svg.iter("{http://www.w3.org/2000/svg}path")
    )
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\((?!#)""", page)
    assert "a&lt;b&gt;.jsonl" in page
    assert "<b>" not in page
    for text in (
        "build, cold, us",
        "build, hot, us",
        f"attncore {attncore.__version__}",
        "3 requests",
    ):
        assert text in page
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a<b>.jsonl", "report.html", "trace.jsonl"]
    assert all(hasattr(finder, "find_spec") for finder in sys.meta_path)


def test_without_the_library_a_page_is_refused_before_the_run(capsys, trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygal", None)
    path = tmp_path / "report.html"
    code, out, err = ran(capsys, trace, "--metadata-only", "--html", str(path))
    assert (code, out) == (2, "")
    assert err.startswith("attncore: error: --html: ")
    assert err.endswith(f"{install_extra('html')}\n")
    assert err.count("\n") == 1
    assert not path.exists()


def test_a_page_that_cannot_be_written_is_one_line(capsys, trace, tmp_path):
    if not (importlib.util.find_spec("pygal") and importlib.util.find_spec("pygaljs")):
        pytest.skip("pygal draws the page; attncore[html] has it")
    code, out, err = ran(capsys, trace, "--metadata-only", "--html", str(tmp_path / "absent" / "x.html"))
    assert (code, out) == (2, "")
    assert "absent/x.html cannot be written: No such file" in err
    assert err.count("\n") == 1


def test_a_named_backend_gets_a_head_size_that_it_has(capsys, trace, site):
    pytest.importorskip("torch")
    site.plugin("picky", heavy="from attncore.reference import ReferenceBackend as Backend")
    few = ["--num-heads", "2", "--num-kv-heads", "1", "--layers", "1", "--backend", "picky"]
    found = reported(capsys, trace, *few)
    assert (found["backend"], found["options"]["head_size"]) == ("picky", 64)
    assert found["versions"]["attn-picky"] == "1.0"
    code, out, err = ran(capsys, trace, *few, "--head-size", "32")
    assert (code, out) == (2, "")
    assert err == (
        "attncore: error: --head-size: backend 'picky' has no heads of 32, it has 64, 128; give one of these\n"
    )
    assert reported(capsys, trace, *SMALL[:4], "--layers", "1")["options"]["head_size"] == 32


def test_ranges_without_builds_are_left_out(capsys, trace, monkeypatch):
    found = {"from_us": [0.5, 1, 2, 5, 10], "cold": [3, 0, 0, 0, 1], "hot": [2, 2, 0, 0, 0]}
    monkeypatch.setattr(report, "histogram", lambda cold, hot: found)
    _, out, _ = ran(capsys, trace, "--metadata-only")
    lines = ["".join(letter for letter in line if letter not in BLOCKS).split() for line in out.splitlines()]
    first = lines.index(["from", "us", "cold", "builds", "hot", "builds"])
    assert lines[first + 1 : first + 6] == [["0.5", "3", "2"], ["1", "0", "2"], ["..."], ["10", "1", "0"], []]
