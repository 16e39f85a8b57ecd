"""Where no temporary folder can be made, a command that needs one says so in a line."""

import tempfile

import pytest

from attncore.cli import main
from attncore.temporary_folder import temporary_folder
from attncore.testing.__main__ import main as kit


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
