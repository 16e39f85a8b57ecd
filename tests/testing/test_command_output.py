"""python -m attncore.testing: what it says of a backend that is refused, misspelt, or ends the process."""

import json
import multiprocessing
import os
import subprocess
import sys

import pytest
from planting import HEAVY
from testing import faulty_backend
from testing.faulty_backend import forward

from attncore.process_end import exit_refused
from attncore.testing.__main__ import main


@pytest.mark.parametrize("code", [0, 2, 3])
@pytest.mark.parametrize("where", ["source", "heavy"])
def test_a_backend_that_ends_the_process_is_a_failure_and_said(site, code, where, tmp_path):
    site.plugin("ends", **{where: f"import os\nos._exit({code})\n"})
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environ["TMPDIR"] = str(tmp_path)
    words = [sys.executable, "-m", "attncore.testing", "ends", "-k", "test_decode or plugin_loads"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"os._exit({code}) would end the process" in done.stdout
    assert not list(tmp_path.glob("attncore-conformance-*"))


def test_a_child_of_a_backend_ends_with_its_own_code(monkeypatch):
    monkeypatch.setattr(os, "_exit", exit_refused())
    child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(7,))
    child.start()
    child.join()
    assert child.exitcode == 7


def test_a_misspelt_backend_is_told_the_one_that_is_meant(capsys):
    assert main(["referense"]) == 3
    assert capsys.readouterr().err.endswith("; did you mean reference?\n")


def test_a_refusal_is_one_reason_a_line_each_once(site, capsys):
    site.plugin("elsewhere", extra="requires=('a-library-nobody-has', 'another-one')")
    assert main(["elsewhere"]) == 3
    first, *reasons = capsys.readouterr().err.splitlines()
    assert first == "attncore: error: elsewhere cannot run here:"
    assert [reason.split(" is not installed")[0] for reason in reasons] == ["  a-library-nobody-has", "  another-one"]


def test_tests_that_find_nothing_to_refuse_are_no_row(capsys):
    """``decode`` is in the name of a test that asks for encoder_decoder, which reference declares."""
    assert main(["reference", "--json", "--examples", "1", "-k", "test_decode or encoder_decoder-encoder_decoder"]) == 0
    shown = capsys.readouterr()
    assert [row["state"] for row in json.loads(shown.out)["rows"]] == ["supported"] * len(json.loads(shown.out)["rows"])
    assert "skipped" in shown.err
    assert "1 test of reference skipped: what its spec does not declare, or this machine has not; " in shown.err


@pytest.mark.parametrize(
    "skips", ["raise unittest.SkipTest('no')", "pytest.skip('no')", "pytest.xfail('no')", "pytest.exit('no', 0)"]
)
def test_a_backend_that_skips_its_tests_fails(site, capsys, skips):
    heavy = HEAVY.replace("return (num", f"{skips}\n        return (num")
    site.plugin("skips", heavy=f"import unittest, pytest\n{heavy}")
    assert main(["skips", "--json", "--examples", "1", "-k", "test_decode"]) == 1
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert "what would skip the check or end the run" in failures[0]["reason"]


def plant(site, name, code="", facts=""):
    site.plugin(name, faulty_backend.LIGHT.format(name=name, facts=f"dict({facts})"), heavy=faulty_backend.HEAVY + code)


def test_a_failure_prints_its_message_and_the_backends_own_frames(site, capsys):
    plant(site, "raises", forward("raise ZeroDivisionError('no blocks')"))
    assert main(["raises", "--examples", "3", "-k", "test_prefill"]) == 1
    shown = capsys.readouterr().out
    assert "ZeroDivisionError: no blocks (attn_raises_heavy.py:" in shown
    assert "Traceback of the backend:" in shown
    assert "raise ZeroDivisionError(" in shown
    for not_said in ("attncore/testing/", "test case", "Falsifying", "Explanation", "attncore-conformance-"):
        assert not_said not in shown
    assert "\nFAILED prefill: test_prefill\n" in shown


def test_what_was_drawn_is_a_line(site, capsys):
    plant(site, "doubles", forward("return whole(query, key, value, kv_cache, metadata, output).mul_(2)"))
    assert main(["doubles", "--examples", "3", "-k", "test_prefill"]) == 1
    shown = capsys.readouterr().out
    assert "\ndrawn: batch=[(0, " in shown
    assert "the output differs from dense float32 attention" in shown
    assert "Traceback" not in shown


def test_where_the_spec_is_wrong_the_rest_is_not_run(site, capsys):
    plant(site, "typo", facts="features={'sinkz'}")
    assert main(["typo", "--json", "-k", "plugin_loads or test_decode or lengths_around"]) == 1
    rows = {row["capability"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["spec"]["state"] == "failed"
    assert {row["state"] for name, row in rows.items() if name != "spec"} == {"not run"}
    assert all("did you mean sinks" in row["reason"] for row in rows.values())
