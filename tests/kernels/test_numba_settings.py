"""numba's own file of settings, `.numba_config.yaml` in the current folder, is data: it says nothing to the kernels."""

import hashlib
import os
import pickle
import subprocess
import sys

import pytest
from numba_call import ASK

SETTINGS = "cache_dir: .c\ncache_locator_classes: no.Locator\n"
FOLDER = "import attncore.kernels.numba.jit as jit; print(jit._folder())"


def ask(folder, program, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"} | variables
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)
    return done.stdout, done.stderr


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def plant(folder):
    """The files of every function's cache below ``folder``, as an archive may hold them: with a right digest."""
    data = pickle.dumps(Runs())
    for file in folder.rglob("*.nbi"):
        file.write_bytes(hashlib.sha256(data).digest() + data)


def test_a_cache_that_a_file_of_the_current_folder_names_is_not_read(tmp_path):
    """Also where the program has imported numba before, whose settings then have that folder."""
    pytest.importorskip("yaml", reason="without PyYAML numba reads no such file")
    (tmp_path / ".numba_config.yaml").write_text("cache_dir: .c\n")
    for first in ("", "import numba\nassert numba.config.CACHE_DIR == '.c'"):
        for _ in range(2):
            assert ask(tmp_path, first + ASK) == ("21\n", "")
            plant(tmp_path / ".c")
        assert not (tmp_path / "ran").exists()
        assert not (tmp_path / ".c").exists()


@pytest.mark.parametrize("text", [SETTINGS, "opt: [", "disable_jit: 1\nopt: nine\n", "- 1\n"])
def test_settings_of_the_current_folder_are_not_read(tmp_path, text):
    (tmp_path / ".numba_config.yaml").write_text(text)
    again = "\nimport numba; numba.core.config.reload_config(); print(numba.config.DISABLE_JIT, numba.config.CACHE_DIR)"
    assert ask(tmp_path, ASK + again) == ("21\n0 \n", "")


def test_a_file_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".numba_config.yaml")
    assert ask(tmp_path, ASK) == ("21\n", "")


def test_numba_is_found_as_before_afterwards():
    program = "import sys; found = [*sys.meta_path]; import attncore.kernels.numba; print(sys.meta_path == found)"
    assert ask(".", program) == ("True\n", "")


def test_a_relative_folder_is_refused(tmp_path):
    out, err = ask(tmp_path, ASK, NUMBA_CACHE_DIR=".c")
    assert out == "21\n"
    assert "NUMBA_CACHE_DIR: '.c' is relative to the current folder; give its whole path" in err
    assert not (tmp_path / ".c").exists()


def test_the_folder_is_the_environment_s_or_beside_the_kernels(tmp_path):
    place = str(tmp_path / "named")
    assert ask(tmp_path, FOLDER, NUMBA_CACHE_DIR=place)[0].startswith(f"{place}/numba_")
    assert ask(tmp_path, FOLDER)[0].endswith("/attncore/kernels/numba/__pycache__\n")


def test_an_installation_that_is_not_ours_to_write_has_the_user_s(tmp_path):
    home = str(tmp_path / "home")
    full = FOLDER.replace("; print", "; jit._folder.cache_clear(); jit.IN_TREE = jit.Path('/dev/null/x'); print")
    assert ask(tmp_path, full, XDG_CACHE_HOME=home)[0].startswith(f"{home}/attncore/kernels/numba_")
