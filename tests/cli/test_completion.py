"""attncore --print-completion: scripts by which a shell completes commands, options and files."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from attncore.cli import COMMANDS, main
from attncore.cli.completion import OLDEST
from attncore.cli.shells import SHELLS
from attncore.how_to_install import install_extra

COMPLETED = """
{script}
COMP_WORDS=({words} "")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
COMP_WORDS[COMP_CWORD]="{begun}"
_shtab_attncore
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(capsys):
    """The script for bash."""
    pytest.importorskip("shtab", reason="shtab (the extra completion) is not installed")
    assert main(["--print-completion", "bash"]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "begun", "found"),
    [
        (["attncore"], "", set(COMMANDS)),
        (["attncore"], "ex", {"explain"}),
        (["attncore", "explain"], "--ass", {"--assume"}),
        (["attncore", "build", "--kernels"], "", {"cython", "numba"}),
        (["attncore", "build"], "batch", {"batches.jsonl"}),
        (["attncore", "new-backend", "acme"], "f", {"folder"}),
        (["attncore", "show"], "", {"reference"}),
        (["attncore", "verify"], "ref", {"reference"}),
        (["attncore", "bench"], "", {"reference"}),
        (["attncore", "explain", "--backend"], "", {"reference"}),
        (["attncore", "replay", "--backend"], "r", {"reference"}),
    ],
)
def test_bash_completes(script, tmp_path, words, begun, found):
    (tmp_path / "batches.jsonl").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    program = COMPLETED.format(script=script, words=" ".join(words), begun=begun)
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) >= found
    assert all(one.startswith(begun) for one in done.stdout.split())
    assert "file" not in done.stdout.split()


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_command_and_its_shell_can_read_it(shell, capsys, tmp_path):
    assert main(["--print-completion", shell]) == 0
    text, err = capsys.readouterr()
    assert err == ""
    assert all(command in text for command in COMMANDS)
    assert {"metadata-only", "assume-package"} <= {*re.findall(r"[a-z]+-[a-z]+", text)}  # options of two commands
    if shutil.which(shell) and shell != "tcsh":  # which has no such option
        (tmp_path / "script").write_text(text)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)


def test_the_page_says_how_to_install_each():
    text = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
    assert all(f"attncore --print-completion {shell}" in text for shell in SHELLS)


@pytest.mark.usefixtures("script")
def test_a_shell_that_is_unknown_is_refused(capsys):
    for words, said in (
        ([], "none given; give one of bash, zsh, fish, tcsh\n"),
        (["dos"], "'dos' is not one of bash, zsh, fish, tcsh\n"),
    ):
        assert main(["--print-completion", *words]) == 2
        assert capsys.readouterr() == ("", f"attncore: error: --print-completion: {said}")


def test_without_shtab_the_command_that_installs_it_is_said(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert install_extra("completion") in capsys.readouterr().err


def test_a_shtab_before_the_bound_is_refused(capsys, monkeypatch):
    """1.7 to 1.9 know no fish, or raise KeyError at zsh's script."""
    shtab = pytest.importorskip("shtab", reason="shtab (the extra completion) is not installed")
    for version in ("1.7.0", "1.9.2"):
        monkeypatch.setattr(shtab, "__version__", version)
        for shell in SHELLS:
            assert main(["--print-completion", shell]) == 2
            said = f"--print-completion: shtab {version} is too old: {install_extra('completion')}\n"
            assert capsys.readouterr() == ("", f"attncore: error: {said}")
    monkeypatch.setattr(shtab, "__version__", "unknown")  # as of a checkout
    assert main(["--print-completion", "zsh"]) == 0


def test_the_bound_is_that_of_the_extra():
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert extras["completion"] == [f"shtab>={OLDEST}"]
