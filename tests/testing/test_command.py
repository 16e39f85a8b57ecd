"""python -m attncore.testing: the table as Markdown and JSON, and exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from planting import SPEC

from attncore.command import READER_GONE
from attncore.testing.__main__ import main

WORDS = [sys.executable, "-m", "attncore.testing", "reference", "--examples", "1", "-k", "test_decode"]


def test_json_is_the_table_and_nothing_else(capsys):
    assert main(["reference", "--json", "--examples", "3", "-k", "test_decode or sinks or kv_cache_layout"]) == 0
    shown = capsys.readouterr()
    table = json.loads(shown.out)
    assert (table["backend"], table["distribution"], table["failures"]) == ("reference", "attncore", [])
    rows = {row["capability"]: row for row in table["rows"]}
    assert rows["decode"] == {
        "capability": "decode", "state": "supported", "passed": 1, "failed": 0, "expected_failures": 0, "skipped": 0,
        "reason": "",
    }  # fmt: skip
    assert rows["layout HND"]["state"] == "supported"
    assert "passed" in shown.err


def test_the_table_is_printed_as_markdown(capsys):
    assert main(["reference", "--examples", "3", "-k", "test_decode"]) == 0
    shown = capsys.readouterr().out
    assert "attncore conformance: reference" in shown
    assert "| decode | supported | 1 of 1 |  |" in shown


def test_a_failure_exits_1_with_its_sentence(site, capsys):
    site.plugin("wrong")
    assert main(["wrong", "--json", "-k", "test_prefill"]) == 1
    (failure,) = json.loads(capsys.readouterr().out)["failures"]
    assert failure["test"] == "test_prefill"
    assert "wrote nothing" in failure["reason"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-k", "zzz"], "-k: no test's name matches 'zzz'; "),
        (["-k", "a("], "-k: 'a(' is no expression such as 'test_decode and not sinks': "),
        (["-k", "a(b=1)"], "-k: 'a(b=1)' is no expression such as 'test_decode and not sinks': '=' "),
        (["-k", "(" * 3000], "-k: '(((((("),
        (["-k", "not " * 100 + "a"], "-k: 'not not "),
        (["-k", "a or " * 1000 + "a"], "-k: 'a or a "),
        (["-k-x"], "-k: no test's name matches '-x'; "),
        (["--device", "foo"], "--device: 'foo' "),
    ],
)
def test_bad_usage_is_named(capsys, words, said):
    assert main(["reference", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"attncore: error: {said}")
    assert error.count("\n") == 1
    assert len(error) < 500


def test_variables_of_pytest_are_not_this_run_s(monkeypatch, capsys):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only -k nothing")
    monkeypatch.setenv("PYTEST_PLUGINS", "a_module_that_is_not_there")
    assert main(["reference", "--examples", "1", "-k", "test_decode"]) == 0
    assert "| decode | supported | 1 of 1 |" in capsys.readouterr().out
    assert os.environ["PYTEST_ADDOPTS"] == "--collect-only -k nothing"


@pytest.mark.parametrize("nested", [f"{'(' * 50}test_decode{')' * 50}", "not " * 50 + "test_decode"])
def test_an_expression_as_deep_as_may_be_is_read(nested, capsys):
    assert main(["reference", "--examples", "1", "-k", f"test_decode and {nested}"]) in (0, 2)
    assert "INTERNALERROR" not in capsys.readouterr().out


def test_what_is_not_there_exits_3_as_in_every_command(site, capsys):
    assert main(["nobody"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("attncore: error: NAME: no distribution installed here provides 'nobody'")
    assert error.count("\n") == 1


def test_a_plugin_that_does_not_load_fails_once_and_skips_the_rest(site, capsys):
    site.plugin("raises", "raise RuntimeError('no licence file')")
    assert main(["raises", "--json"]) == 1
    table = json.loads(capsys.readouterr().out)
    reasons = {one["test"]: one["reason"] for one in table["failures"]}
    assert set(reasons) == {"test_the_plugin_loads", "test_the_spec_is_read_without_heavy_imports"}
    assert "no licence file" in reasons["test_the_plugin_loads"]


def test_what_cannot_run_here_exits_3(site, capsys):
    site.plugin("elsewhere", extra="requires=('a-library-nobody-has',)")
    assert main(["elsewhere"]) == 3
    assert "a-library-nobody-has is not installed" in capsys.readouterr().err


def test_a_backend_for_other_devices_is_refused_for_that_alone(site, capsys):
    source = SPEC.format(name="far", module="attn_far", extra="")
    source = source.replace("MultipleOf(16)", "{256}").replace('"any"', '"cuda:sm_90"')
    site.plugin("far", source)
    assert main(["far"]) == 3
    told = "attncore: error: far cannot run here:\n  device cpu not supported by attn-far 1.0; supported: cuda:sm_90\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("words", [["--examples", "0"], ["--examples", "9" * 4000], ["-x" * 5000], []])
def test_bad_usage_is_one_line(words, capsys):
    assert main(["reference", *words] if words else []) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert len(err) < 500


def test_what_a_backend_raises_reaches_no_terminal_as_it_is(site, capsys):
    site.plugin("loud", "raise RuntimeError('\\x1b[31m\\x9b2J\\u202e')")
    for options in ([], ["--json"]):
        assert main(["loud", "-k", "test_the_plugin_loads", *options]) == 1
        out, err = capsys.readouterr()
        assert "x1b[31m" in out
        assert not {letter for letter in out + err if not letter.isprintable() and letter != "\n"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_one_line(options):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*WORDS, *options], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("attncore: error: standard output: No space left on device\n")
    assert "Traceback" not in done.stderr


def test_a_pipe_that_is_read_no_more_ends_it_silently():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(WORDS, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (READER_GONE, b"")


def test_closed_streams_and_a_folder_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    words = f"mkdir {gone}; cd {gone}; rmdir {gone}; exec {' '.join(WORDS)}"
    shown = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert (
        shown.stderr
        == "attncore: error: the current folder is gone: torch cannot run there; change to one that exists\n"
    )
    closed = subprocess.run(["sh", "-c", f"{words} <&- >&- 2>&-"], capture_output=True, check=False)
    assert (closed.returncode, closed.stdout, closed.stderr) == (2, b"", b"")  # nowhere to say it


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "attncore: error: interrupted while waits was tested\n"), (signal.SIGTERM, 143, "")],
)
def test_a_signal_ends_it_without_a_traceback(number, code, said, site):
    waits = "import os, signal\nos.kill(os.getpid(), NUMBER)\n".replace("NUMBER", str(int(number)))
    site.plugin("waits", heavy=waits)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [*WORDS[:3], "waits", "-k", "test_decode"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)
    assert "Traceback" not in done.stdout
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" not in done.stdout


BOTH = "[os.kill(process, signal.SIGINT) for process in (os.getppid(), os.getpid())]"
"""In the second process, what a terminal does to both."""


def test_an_interrupt_while_python_starts_is_no_traceback(tmp_path):
    starts = f"import os, signal, sys\nif any(word.endswith('kit_child') for word in sys.orig_argv): {BOTH}\n"
    (tmp_path / "sitecustomize.py").write_text(starts)
    assert ended_with_on_the_path(tmp_path) == (130, "", "")


def test_an_interrupt_waits_for_torch_however_long_it_takes(tmp_path):
    """The first process hands it on after a second; torch's C++ code ends a process by SIGABRT where one is raised."""
    slow = f"import os, signal, time\ntry: {BOTH}; time.sleep(1.5)\nexcept BaseException: os.abort()\n"
    (tmp_path / "torch.py").write_text(slow)
    assert ended_with_on_the_path(tmp_path) == (130, "", "attncore: error: interrupted\n")


def ended_with_on_the_path(folder):
    """Exit code and output of the kit with the modules of ``folder``."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    words = [sys.executable, "-P", *WORDS[1:]]
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_where_torch_compiles_nothing_no_backend_fails_for_it():
    environ = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}
    words = [*WORDS[:-1], "torch_operator"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| torch operator | supported | 1 of 1 |" in done.stdout
