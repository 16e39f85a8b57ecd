"""What numba has compiled is compiled again where any of the files that it was made of has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numba_call import ASK, ENTRY

import attncore

INTERRUPTED = """
import sys

def interrupt(frame, event, arg):
    if frame.f_code.co_name == "stream_list" and event == "call":
        sys.settrace(None)
        raise KeyboardInterrupt
    return interrupt

sys.settrace(interrupt)
try:
    import numpy as np
    from attncore.kernels import numba
    slots = np.zeros(1, np.int64)
    numba.fill_slot_mapping(np.array([[5]], np.int32), np.array([1], np.int32), np.array([1], np.int32), 4, slots)
except KeyboardInterrupt:
    print("interrupted")
sys.settrace(None)
"""


def test_an_interrupt_while_it_compiles_leaves_a_process_that_compiles(tmp_path):
    """numba 0.68.1: a generator of its own is finished by it, and every later compilation is a RuntimeError."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED + ASK], env=environment, capture_output=True, text=True, check=False
    )
    assert (process.stdout.split()[-1:], process.stderr) == (["21"], "")


def test_a_change_in_another_file_reaches_a_compiled_function(tmp_path):
    copy = tmp_path / "attncore"
    shutil.copytree(Path(attncore.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["PYTHONPATH"] = str(tmp_path)

    def ask():
        process = subprocess.run(
            [sys.executable, "-c", ASK], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return process.stdout.strip()

    assert ask() == "21"
    # fill_slot_mapping is in field_functions.py; the remainder that it compiles in is in slots.py.
    slots = copy / "kernels" / "numba" / "slots.py"
    slots.write_text(slots.read_text().replace("return token % block_size", "return token % block_size + 100"))
    assert ask() == "121"


def test_a_new_installation_of_the_same_version_has_what_the_one_before_compiled(tmp_path):
    """Installed, the cache is the user's; the files of a new installation have other times."""
    packages, environment = tmp_path / "site-packages", os.environ | {"XDG_CACHE_HOME": str(tmp_path / "home")}
    environment.pop("NUMBA_CACHE_DIR", None)
    environment["PYTHONPATH"] = str(packages)
    found = []
    for _ in range(2):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(
            Path(attncore.__file__).parent, packages / "attncore", ignore=ignored, copy_function=shutil.copy
        )
        words = [sys.executable, "-c", ASK]
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == "21\n"
        found.append({file: file.stat().st_mtime_ns for file in (tmp_path / "home").rglob("*.nb?")})
        shutil.rmtree(packages)
    assert found[0] == found[1] != {}


def test_it_says_that_it_compiles_and_where_it_keeps_that(tmp_path):
    out, err = ask(tmp_path, ENTRY)
    assert out == "1\n"
    assert err.startswith("numba compiles the kernels, which takes half a minute or so; they are kept in ")
    assert str(tmp_path) in err
    assert ask(tmp_path, ENTRY) == ("1\n", "")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder with what numba has compiled of one function, and of those that it calls."""
    folder = tmp_path_factory.mktemp("compiled")
    assert ask(folder) == ("21\n", "")
    return folder


def ask(folder, program=ASK, **variables):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), **variables}
    process = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return process.stdout, process.stderr


def files(folder, kind):
    return [file for file in folder.rglob(f"*.{kind}") if "fill_slot_mapping" in file.name or "column_of" in file.name]


def test_without_a_folder_for_the_cache_it_works_and_says_so_once(tmp_path):
    (tmp_path / "file").touch()
    program = f"{ASK}\nfrom attncore.kernels import why_kernels\nprint(why_kernels('numba'))"
    out, err = ask(tmp_path / "file" / "cache", program)
    slot, why = out.splitlines()
    assert slot == "21"
    assert err.count("numba's cache is not used, and the kernels are compiled anew") == 1
    assert "Traceback" not in err
    assert why.startswith("numba: asked for by the caller; compiled anew in each process, for it has no cache (NotADi")


DAMAGE = {
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "a bit": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
    "a pickle": lambda file: file.write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR."),
    "long": lambda file: os.truncate(file, 1 << 27),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_file_is_compiled_again(compiled, tmp_path, monkeypatch, kind, damage):
    folder = tmp_path / "compiled"
    shutil.copytree(compiled, folder)
    monkeypatch.chdir(tmp_path)
    for file in files(folder, kind):
        DAMAGE[damage](file)
    assert ask(folder)[0] == "21\n"
    assert not (tmp_path / "ran").exists()
    assert ask(folder) == ("21\n", "")


@pytest.mark.parametrize("place", ["pipe", "folder", "every user's", "the group's", "another user's"])
def test_what_is_no_file_of_ours_is_not_read(compiled, tmp_path, place):
    folder = tmp_path / "compiled"
    shutil.copytree(compiled, folder)
    for file in files(folder, "nbi"):
        if place == "every user's":
            file.chmod(0o666)
        elif place == "the group's":
            file.chmod(0o664)
        elif place == "another user's":
            if os.geteuid():
                pytest.skip("only root can give a file away")
            os.chown(file, 12345, 12345)
        else:
            file.unlink()
            os.mkfifo(file) if place == "pipe" else file.mkdir()
    out, err = ask(folder)
    assert out == "21\n"
    assert err.count("numba's cache is not used") == 1
    assert ("no regular file" in err) is (place in ("pipe", "folder"))


@pytest.mark.parametrize("place", ["every user's", "the group's", "another user's"])
def test_what_is_in_a_folder_that_others_may_write_to_is_not_read(compiled, tmp_path, place):
    shutil.copytree(compiled, tmp_path / "compiled")
    (folder,) = {file.parent for file in files(tmp_path / "compiled", "nbi")}
    if place == "another user's":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(folder, 12345, 12345)
    else:
        folder.chmod(0o777 if place == "every user's" else 0o775)
    out, err = ask(tmp_path / "compiled")
    assert out == "21\n"
    assert err.count("numba's cache is not used") == 1


def test_a_umask_that_lets_the_group_write_leaves_a_cache_that_is_read(tmp_path):
    before = os.umask(0o002)
    try:
        assert [ask(tmp_path / "compiled") for _ in range(2)] == [("21\n", "")] * 2
    finally:
        os.umask(before)
    assert not [file for file in (tmp_path / "compiled").rglob("*.nb?") if file.stat().st_mode & 0o022]
