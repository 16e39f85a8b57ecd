"""A plugin that is rough to the process in which it is loaded spoils no verdict, pass or table of another backend."""

import json
import os
import subprocess
import sys

import pytest
from planting import SPEC

from attncore.cli import main

pytest.importorskip("torch")

from attncore.testing.bench.run import Question, measure

CHILDREN = ("verify_child.py", "one_pass.py", "child_main.py", "kit_child.py")
ROUGH = {
    "closes the descriptors": "os.closerange(3, 64)",
    "starts a thread": "threading.Thread(target=time.sleep, args=(3600,)).start()",
    "fails at the exit": "atexit.register(os._exit, 7)",
}


@pytest.fixture(params=ROUGH)
def neighbour(site, request, tmp_path, monkeypatch):
    """A plugin that is rough to attncore's other processes: the one that prints waits for such a thread."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    begins = f"import atexit, os, sys, threading, time\nif os.path.basename(sys.argv[0]) in {CHILDREN}:"
    source = f"{begins} {ROUGH[request.param]}\n" + SPEC.format(name="rough", module="attn_rough", extra="")
    site.plugin("rough", source)
    return request.param


@pytest.mark.usefixtures("neighbour")
def test_a_verdict(capsys):
    words = ["--num-heads", "2", "--num-kv-heads", "1", "--head-size", "64", "--dtype", "float32", "--timeout", "40"]
    code = main(["verify", "reference", *words, "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert (code, found["state"], found["message"]) == (0, "agrees", "")
    assert found["seconds"] < 40


@pytest.mark.usefixtures("neighbour")
def test_a_pass():
    assert measure(Question("reference", "attncore", seconds=0.001, timeout=60), 1).rows


def test_a_table(neighbour):
    if neighbour == "starts a thread":
        pytest.skip("the kit is a command, and waits for it, as SECURITY.md says")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-m", "attncore.testing", "reference", "--examples", "1", "-k", "test_decode"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| decode | supported | 1 of 1 |" in done.stdout


def test_a_file_of_steps(site, tmp_path):
    site.plugin("rough", "import os; os.closerange(3, 64)\n" + SPEC.format(name="rough", module="attn_rough", extra=""))
    words = [sys.executable, "-m", "attncore", "replay", "--backend", "reference", "--requests", "2", "--layers", "1"]
    words += ["--num-heads", "2", "--num-kv-heads", "1", "--head-size", "16", "--save-steps", str(tmp_path / "steps")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    written = set()
    for _ in range(2):  # a new one, and one that is there
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=100)
        assert (done.returncode, done.stderr) == (0, "")
        written.add((tmp_path / "steps").read_text())
    assert [text.startswith('{"block_size":') for text in written] == [True]


@pytest.mark.usefixtures("neighbour")
def test_its_own_row(capsys, monkeypatch, neighbour):
    monkeypatch.setenv("ATTNCORE_DISABLE_PLUGINS", "reference")
    main(["doctor", "--no-create", "--json", "--timeout", "40"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    assert (rows["rough"]["state"], rows["rough"]["reasons"]) == ("loaded", [])
