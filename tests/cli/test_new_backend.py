"""attncore new-backend: names, refusals, all or nothing. tests/test_template.py runs what it writes."""

import filecmp
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import attncore
from attncore.cli import main, new_backend


def test_it_says_what_it_wrote(tmp_path, capsys):
    assert main(["new-backend", "acme.v2", str(tmp_path / "some" / "where"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["distribution"], found["package"], found["class"]) == ("attn-acme-v2", "attn_acme_v2", "AcmeV2")
    assert "src/attn_acme_v2/backend.py" in found["files"]
    written = [
        str(path.relative_to(found["directory"])) for path in (tmp_path / "some/where").rglob("*") if path.is_file()
    ]
    assert sorted(written) == found["files"]
    project = (tmp_path / "some/where/pyproject.toml").read_text()
    assert '"acme.v2" = "attn_acme_v2"' in project


def test_a_class_is_not_called_as_what_it_inherits_from(tmp_path, capsys):
    assert main(["new-backend", "attention", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class"] == "AttnAttention"
    assert "class AttnAttentionBackend(AttentionBackend):" in (tmp_path / "src/attn_attention/backend.py").read_text()


def test_attncore_in_a_zip_file_writes_the_same(tmp_path, capsys):
    package = Path(attncore.__file__).parent
    with zipfile.ZipFile(tmp_path / "attncore.zip", "w") as archive:
        for file in package.rglob("*"):
            if file.suffix in (".py", ".txt") and "__pycache__" not in file.parts:
                archive.write(file, file.relative_to(package.parent))
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "attncore.zip")}
    words = ["-m", "attncore", "new-backend", "acme", str(tmp_path / "zipped"), "--json"]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True, timeout=100
    )
    assert main(["new-backend", "acme", str(tmp_path / "plain"), "--json"]) == 0
    assert json.loads(done.stdout)["files"] == json.loads(capsys.readouterr().out)["files"] != []
    compared = filecmp.dircmp(tmp_path / "zipped", tmp_path / "plain")
    assert (compared.left_only, compared.right_only, compared.diff_files) == ([], [], [])


def test_a_template_that_is_missing_is_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(new_backend, "TEMPLATE", tmp_path / "template")
    assert main(["new-backend", "acme", str(tmp_path / "x")]) == 2
    assert "the template of a backend is missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_will_do(tmp_path, capsys):
    assert main(["new-backend", "acme", str(tmp_path)]) == 0
    assert "pip install -e '.[test]'" in capsys.readouterr().out
    assert (tmp_path / "README.md").exists()


@pytest.mark.parametrize("where", [".", "link"])
def test_an_empty_directory_by_another_name_will_do(tmp_path, capsys, monkeypatch, where):
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder if where == "." else tmp_path)
    (tmp_path / "link").symlink_to(folder)
    assert main(["new-backend", "acme", where]) == 0
    assert (folder / "README.md").exists()
    assert (tmp_path / "link").is_symlink()


def test_a_directory_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for where, why in (
        (tmp_path / "file" / "x", "Not a directory"),
        (tmp_path / "file" / "x" / "y", "Not a directory"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        ("/proc/x", "No such file or directory"),
    ):
        assert main(["new-backend", "acme", str(where)]) == 2
        assert capsys.readouterr().err == f"attncore: error: DIR: {where} cannot be written: {why}\n"


def test_a_name_of_a_directory_sends_a_terminal_nothing(tmp_path, capsys):
    assert main(["new-backend", "acme", str(tmp_path / "a\x1b[31m\nb")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\n  cd $'" in out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "name", ["a b", "a\nb", "\x1b[31m'\"$x`", "-x", "-P", "--", "\u00e4\u202e", os.fsdecode(b"\xff7"), "a\\b\n", "~"]
)
def test_the_line_that_goes_there_goes_there(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "attncore", "new-backend", "acme", "--", name], capture_output=True, check=True
    )
    line = next(one for one in done.stdout.splitlines() if one.startswith(b"  cd "))
    there = subprocess.run(["bash", "-c", line + b'; printf %s "$PWD"'], capture_output=True, check=True)
    assert there.stdout == os.fsencode(tmp_path / name)


def test_an_empty_directory_keeps_its_mode(tmp_path, capsys):
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(0o700)
    assert main(["new-backend", "acme", str(tmp_path / "x")]) == 0
    assert (tmp_path / "x").stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("name", ["Acme", "9acme", "acme attention", "../acme", "a" * 65])
def test_bad_names_are_refused(tmp_path, capsys, name):
    assert main(["new-backend", name, str(tmp_path / "x")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"attncore: error: NAME: {name!r} is not a backend's name")
    assert "at most 64 lower-case letters" in said
    assert "with a letter first" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["reference", "flash", "flash.", "flash_", "rocm-", "flashinfer.-_", "reference-"])
def test_names_that_are_taken_are_refused(tmp_path, capsys, name):
    """Also those that differ in what a distribution's name does not tell apart."""
    assert main(["new-backend", name, str(tmp_path / "x")]) == 2
    assert f"NAME: {name!r} belongs to att" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "of"), [("acme_", "acme"), ("a..b", "a-b"), ("a.-b", "a-b"), ("a-b.", "a-b")])
def test_names_of_anothers_distribution_are_refused(tmp_path, capsys, name, of):
    assert main(["new-backend", name, str(tmp_path / "x")]) == 2
    said = capsys.readouterr().err
    assert f"NAME: {name!r} has a separator at its end, or two in a row, and attn-{of} is the distribution of" in said
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_something_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("precious")
    assert main(["new-backend", "acme", str(tmp_path)]) == 2
    assert "DIR: " in capsys.readouterr().err
    assert main(["new-backend", "acme", str(tmp_path / "mine")]) == 2
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_nothing_is_half_written(tmp_path, capsys, monkeypatch):
    write, written = new_backend._write, []

    def full_disk(*args):
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(write(*args))
        return written[-1]

    monkeypatch.setattr(new_backend, "_write", full_disk)
    assert main(["new-backend", "acme", str(tmp_path / "deep" / "er")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert len(written) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["a/b/../../c/d", "a/../d", "a/b/../c/../../d/./e/"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_path_that_goes_up_makes_no_other_folder(tmp_path, capsys, monkeypatch, where, fails):
    monkeypatch.chdir(tmp_path)
    if fails:
        monkeypatch.setattr(new_backend, "_write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            new_backend.render(new_backend.names("acme"), Path(where))
        assert list(tmp_path.iterdir()) == []
    else:
        assert main(["new-backend", "acme", where]) == 0
        assert (tmp_path / os.path.normpath(where) / "README.md").exists()
        assert [path.name for path in tmp_path.iterdir()] == [os.path.normpath(where).partition("/")[0]]


@pytest.mark.parametrize("call", ["mkdir", "chmod"])
@pytest.mark.parametrize("before", [1, 2, 3, 4, 5])
def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch, call, before):
    """Each folder that is made is made and then interrupted."""
    made, real = [], getattr(Path, call)

    def interrupted(path, *args, **options):
        real(path, *args, **options)
        made.append(path)
        if len(made) == before:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, call, interrupted)
    try:
        new_backend.render(new_backend.names("acme"), tmp_path / "deep" / "er" / "x")
    except KeyboardInterrupt:
        assert list(tmp_path.iterdir()) == []
    else:
        assert len(made) < before
    assert made


def test_a_folder_that_cannot_be_made_leaves_none_of_those_above_it(tmp_path, capsys):
    assert main(["new-backend", "acme", str(tmp_path / "deep" / ("x" * 300) / "y")]) == 2
    assert "File name too long" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name_of_a_folder_will_do(tmp_path):
    assert main(["new-backend", "acme", str(tmp_path / ("x" * 255))]) == 0
