"""python -m attncore.testing: what it says of a backend that is refused, misspelt, or ends the process."""

import json
import multiprocessing
import os
import subprocess
import sys

import pytest

from attncore.testing.__main__ import main
from attncore.testing.command import _told_if_ended


@pytest.mark.parametrize("code", [0, 2, 3])
@pytest.mark.parametrize("where", ["source", "heavy"])
def test_a_backend_that_ends_the_process_is_a_failure_and_said(site, code, where):
    site.plugin("ends", **{where: f"import os\nos._exit({code})\n"})
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-m", "attncore.testing", "ends", "-k", "test_decode"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    said = f"attncore: error: ends died: a plugin has ended the process with os._exit({code})\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_child_of_a_backend_ends_with_its_own_code():
    with _told_if_ended("forks"):
        child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(7,))
        child.start()
        child.join()
    assert child.exitcode == 7


def test_a_misspelt_backend_is_told_the_one_that_is_meant(capsys):
    assert main(["referense"]) == 2
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
