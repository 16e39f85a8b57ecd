"""setup.py: the extension is compiled, or left out because somebody asked for that; no build lacks it silently."""

import re
import runpy
from pathlib import Path

import pytest
import setuptools
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

from attncore import env

SETUP = Path(__file__).parents[1] / "setup.py"


@pytest.fixture
def given(monkeypatch):
    """What setup.py gives to setuptools, without Cython at work: its arguments, with the extensions as they are."""
    pytest.importorskip("Cython", reason="Cython is not installed")
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    found = {}
    monkeypatch.setattr("Cython.Build.cythonize", lambda extensions, **_: extensions)
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: found.update(arguments))

    def run():
        runpy.run_path(str(SETUP))
        return found

    return run


def test_the_extension_is_not_optional(given):
    (extension,) = given()["ext_modules"]
    assert not extension.optional


@pytest.mark.parametrize("error", [CompileError("command 'gcc' failed"), PlatformError("no MSVC"), OSError("no cc")])
def test_what_cannot_be_compiled_ends_the_build_with_what_to_do(given, monkeypatch, error):
    def fails(self):
        raise error

    monkeypatch.setattr(build_ext, "build_extensions", fails)
    command = given()["cmdclass"]["build_ext"](setuptools.Distribution())
    with pytest.raises(SystemExit) as caught:
        command.build_extensions()
    said = str(caught.value)
    assert said.startswith(f"\nattncore: its extension was not compiled ({error}).")
    assert "Install a C compiler" in said
    assert "ATTNCORE_NO_EXT=1 pip install '.[numba]'" in said


def test_the_extension_is_left_out_where_that_is_asked_for(given, monkeypatch):
    monkeypatch.setenv("ATTNCORE_NO_EXT", "1")
    assert given()["ext_modules"] == []
    monkeypatch.setenv("ATTNCORE_NO_EXT", "yes")
    with pytest.raises(SystemExit, match="ATTNCORE_NO_EXT: 'yes' is neither 0 nor 1"):
        given()


def test_the_doctor_knows_the_variables_of_a_build():
    read = set(re.findall(r"ATTNCORE_\w+", SETUP.read_text()))
    assert "ATTNCORE_NO_EXT" in read
    assert read <= set(env.VARIABLES)
