"""Where no temporary folder can be made, a command that needs one says so in a line."""

import contextlib
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from attncore.cli import main
from attncore.registry.doctor import diagnose_plugin
from attncore.temporary_folder import temporary_folder
from attncore.testing import verify
from attncore.testing.__main__ import main as kit
from attncore.testing.bench import run


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (main, ["verify", "reference", "--fresh"]),
        (main, ["bench", "reference", "--passes", "3", "--no-save"]),
        (kit, ["reference", "-k", "test_decode"]),
    ],
    ids=["verify", "bench", "kit"],
)
def test_a_command_says_so_in_a_line(command, words, monkeypatch, tmp_path, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert command(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("attncore: error: no temporary folder can be made: [Errno 2] No such file or directory: ")
    assert err.endswith("; set TMPDIR to a folder that exists, may be written to and has room\n")
    assert err.count("\n") == 1


def test_a_full_disk_is_not_that_of_standard_output(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(OSError, match="no temporary folder can be made") as caught:
        temporary_folder("verify")
    assert caught.value.errno is None


@contextlib.contextmanager
def limited(most):
    """Files of this process have at most so many bytes."""
    found = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, found[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, found)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (verify, ["verify", "reference"]),
        (run, ["bench", "reference", "--passes", "3", "--no-save"]),
        (diagnose_plugin, ["doctor"]),
    ],
    ids=["verify", "bench", "doctor"],
)
def test_a_process_whose_answer_has_no_room_is_no_verdict_on_a_backend(module, words, monkeypatch, tmp_path, capsys):
    """It would be kept, and shown again when there is room."""
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with contextlib.ExitStack() as stack:

        def without_room(arguments, timeout):
            answer = next(Path(one) for one in arguments if Path(one).name.startswith("answer"))
            answer.write_bytes(b"x" * 4096)
            stack.enter_context(limited(4096))
            return "the process ended with code 1 (OSError: [Errno 28] No space left on device)"

        monkeypatch.setattr(module, "run_in_child", without_room)
        assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("attncore: error: no room for ")
    assert err.endswith("; set TMPDIR to a folder that exists, may be written to and has room\n")
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("most", [64, 1024], ids=["before its first test", "between two tests"])
def test_a_run_of_the_kit_that_has_no_room_for_its_journal_ends_with_a_line(most, tmp_path):
    pytest.importorskip("torch")
    words = [sys.executable, "-P", "-m", "attncore.testing", "reference", "--json", "-k", "declared"]
    limit = (most, most)
    ended = subprocess.run(
        words,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    *dots, line = ended.stderr.splitlines()
    assert line.startswith("attncore: error: no room for ")
    assert not [one for one in dots if "Traceback" in one or "INTERNALERROR" in one]
