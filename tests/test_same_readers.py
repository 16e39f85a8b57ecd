"""What takes the place of a file or of a folder is readable by nobody who could not read that."""

import os
import stat
import struct

import pytest

from attncore.cli import main
from attncore.replay.results.whole_file import WholeFile

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
_NOBODY = 0xFFFFFFFF
# The owner reads and writes, user 4242 reads, the group and others may nothing; the mask is what named ones may.
LIST = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *one)
    for one in ((1, 6, _NOBODY), (2, 4, 4242), (4, 0, _NOBODY), (16, 4, _NOBODY), (32, 0, _NOBODY))
)


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def _replace(path):
    with WholeFile(path) as file:
        file.write("after\n")
    assert path.read_text() == "after\n"


@pytest.fixture
def other_group():
    """A group that files may be given, and that is not the one they have by themselves."""
    groups = {*os.getgroups(), *([4242] if os.geteuid() == 0 else [])} - {os.getegid()}
    if not groups:
        pytest.skip("this user is in no second group")
    return max(groups)


@pytest.fixture
def with_list(tmp_path):
    """A file that one more user may read, by a list of access."""
    path = tmp_path / "listed"
    path.touch()
    try:
        os.setxattr(path, ACCESS, LIST)
    except (OSError, AttributeError):
        pytest.skip("no lists of access here")
    return path


def test_a_file_keeps_its_group(tmp_path, other_group):
    path = tmp_path / "steps.jsonl"
    path.touch()
    os.chown(path, -1, other_group)
    path.chmod(0o640)
    _replace(path)
    assert (path.stat().st_gid, _mode(path)) == (other_group, 0o640)


@pytest.mark.parametrize(("before", "after"), [(0o640, 0o600), (0o644, 0o644), (0o664, 0o644)])
def test_a_group_that_cannot_be_given_is_no_other_s(tmp_path, other_group, monkeypatch, before, after):
    path = tmp_path / "steps.jsonl"
    path.touch()
    os.chown(path, -1, other_group)
    path.chmod(before)

    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "chown", refused)
    _replace(path)
    assert (path.stat().st_gid == other_group, _mode(path)) == (False, after)


def test_a_folder_keeps_its_group(tmp_path, other_group, capsys):
    folder = tmp_path / "acme"
    folder.mkdir()
    os.chown(folder, -1, other_group)
    folder.chmod(0o750)
    assert main(["new-backend", "acme", str(folder)]) == 0
    assert (folder.stat().st_gid, _mode(folder)) == (other_group, 0o750)


def test_a_list_of_access_is_kept(with_list):
    _replace(with_list)
    assert os.getxattr(with_list, ACCESS) == LIST


def test_a_list_that_cannot_be_kept_gives_the_group_nothing(with_list, monkeypatch):
    def refused(*_):
        raise OSError

    monkeypatch.setattr(os, "setxattr", refused)
    _replace(with_list)
    assert _mode(with_list) == 0o600


def test_the_list_of_a_folder_adds_no_readers(with_list):
    folder = with_list.parent / "shared"
    folder.mkdir()
    path = folder / "steps.jsonl"
    path.touch()
    path.chmod(0o640)
    os.setxattr(folder, DEFAULT, LIST)
    _replace(path)
    assert ACCESS not in os.listxattr(path)
    assert _mode(path) == 0o640
