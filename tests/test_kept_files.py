"""Files kept for the next run: where they are, how they are written, and which are not read."""

import os
import sys

import pytest

from attncore.kept_files import cache_folder, check_folder, read_kept, state_folder, write_kept

FOLDERS = [
    pytest.param(cache_folder, "XDG_CACHE_HOME", (".cache",), id="caches"),
    pytest.param(state_folder, "XDG_STATE_HOME", (".local", "state"), id="records"),
]


@pytest.mark.parametrize(("folder", "variable", "below_home"), FOLDERS)
def test_the_folder_follows_the_environment(tmp_path, monkeypatch, folder, variable, below_home):
    monkeypatch.setenv(variable, str(tmp_path))
    assert folder("verify") == tmp_path / "attncore" / "verify"
    monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    if sys.platform == "linux":  # elsewhere the platform's own
        assert folder("verify") == tmp_path.joinpath(*below_home, "attncore", "verify")


@pytest.mark.parametrize(("folder", "variable", "below_home"), FOLDERS)
def test_there_is_no_folder_under_the_current_one(monkeypatch, folder, variable, below_home):
    """Neither that of a relative variable nor that of a user without a home, where ``~`` stays as it is."""
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(RuntimeError, match="home"):
        folder("verify")
    monkeypatch.undo()
    monkeypatch.setenv(variable, "relative")
    try:
        found = folder("verify")
    except RuntimeError:  # a platformdirs before 4.14 takes the variable as it is
        return
    assert found.is_absolute()


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "deep" / "er" / "file"
    write_kept(file, b"one")
    write_kept(file, b"two")
    assert read_kept(file) == b"two"
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file" / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        write_kept(tmp_path / "file", b"one")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_not_read(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_kept(tmp_path / "file")
    with pytest.raises(OSError, match="is no regular file"):
        read_kept(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is no regular file"):
        read_kept(tmp_path / "pipe")
    write_kept(tmp_path / "file", b"x" * 100)
    with pytest.raises(OSError, match="has more than 99 bytes"):
        read_kept(tmp_path / "file", 99)
    for mode, who in ((0o602, "every user"), (0o622, "every user"), (0o620, "its group")):
        (tmp_path / "file").chmod(mode)
        with pytest.raises(OSError, match=f"may be written to by {who}; chmod go-w"):
            read_kept(tmp_path / "file")


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    check_folder(tmp_path)
    for mode, who in ((0o777, "every user"), (0o1777, "every user"), (0o775, "its group")):
        tmp_path.chmod(mode)
        with pytest.raises(OSError, match=f"may be written to by {who}; chmod go-w"):
            check_folder(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_read(tmp_path):
    write_kept(tmp_path / "file", b"one")
    os.chown(tmp_path / "file", 12345, 12345)
    with pytest.raises(OSError, match=r"belongs to another user \(12345\)"):
        read_kept(tmp_path / "file")
