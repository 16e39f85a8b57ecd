"""Installations as newcomers make them: without a compiler, and editable in a folder of the package's own name."""

import sys
import zipfile

import pytest
from clean_venv import borrow, clean_venv, in_venv, sources

pytestmark = pytest.mark.slow
BUILT = "from setuptools import build_meta; print('built', build_meta.build_{kind}({folder!r}))"
"""What pip calls: the name of the wheel is the last word of the output."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A clone in the folder ``attncore``, beside which nothing stands."""
    return sources(tmp_path_factory.mktemp("parent") / "attncore")


def build(kind, checkout, folder, **environ):
    """The wheel, built as by pip without isolation; AssertionError with all that was said where that fails."""
    program = BUILT.format(kind=kind, folder=str(folder))
    return folder / in_venv(sys.executable, "-c", program, cwd=checkout, **environ).split()[-1]


@pytest.fixture(scope="module")
def editable(checkout, tmp_path_factory):
    """The Python of an environment with the checkout, without the extension, installed as by ``pip install -e``."""
    folder = tmp_path_factory.mktemp("editable")
    wheel = build("editable", checkout, folder, ATTNCORE_NO_EXT="1")
    python = clean_venv(folder / "venv")
    pip = ("-m", "pip", "--disable-pip-version-check")
    in_venv(python, *pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    borrow(python)
    return python


@pytest.mark.parametrize("compiler", ["/bin/false", "/nowhere/gcc"])
def test_without_a_compiler_there_is_no_wheel_and_a_sentence_says_what_to_do(checkout, tmp_path, compiler):
    with pytest.raises(AssertionError) as caught:
        build("wheel", checkout, tmp_path, CC=compiler)
    said = str(caught.value)
    assert "attncore: its extension was not compiled (" in said
    assert "Install a C compiler" in said
    assert not list(tmp_path.iterdir())


def test_a_wheel_without_the_extension_does_not_look_compiled(checkout, tmp_path):
    wheel = build("wheel", checkout, tmp_path, ATTNCORE_NO_EXT="1")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "attncore/_slots.pyi" in names
    assert not [name for name in names if name.endswith((".so", ".pyd", ".c"))]


def test_it_works_where_python_starts_beside_the_clone(checkout, editable):
    """The clone's folder is no package: it must not hide the package in it."""
    program = "import attncore; print(attncore.__file__); attncore.InputBatch"
    found = in_venv(editable, "-c", program, cwd=checkout.parent)
    assert found.strip() == str(checkout / "attncore" / "__init__.py")


def test_type_checkers_find_it(checkout, editable, tmp_path):
    program = "import attncore; reveal_type(attncore.__version__); attncore.nothing"
    words = ("-m", "mypy", "--python-executable", editable, "--cache-dir", tmp_path, "--follow-imports", "silent")
    for folder in (checkout.parent, tmp_path):
        with pytest.raises(AssertionError) as caught:
            in_venv(sys.executable, *words, "-c", program, cwd=folder)
        assert 'Revealed type is "str"' in str(caught.value).replace("builtins.", "")
        assert 'Module has no attribute "nothing"' in str(caught.value)


def test_with_neither_kernels_the_error_says_how_to_get_them(checkout, editable):
    program = "import sys; sys.modules['numba'] = None; import attncore.slots; attncore.slots.why_kernels()"
    with pytest.raises(AssertionError) as caught:
        in_venv(editable, "-c", program, cwd=checkout.parent)
    assert f"this attncore is the source tree {checkout}, in which the extension is not compiled" in str(caught.value)
    assert "; or pip install 'numba>=0.60'" in str(caught.value)
    program = "import attncore.slots; print(attncore.slots.why_kernels())"
    found = in_venv(editable, "-c", program, cwd=checkout.parent)
    assert found.startswith("numba: the compiled extension is not installed")
