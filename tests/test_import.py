"""What `import attncore` costs, and what it offers."""

import logging
import subprocess
import sys
from importlib.util import find_spec

import pytest

import attncore

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

LIGHT = """
import sys
sys.path[:] = {path!r}
import attncore
{code}
heavy = {{"torch", "pluggy", "numba", "rich", "numpy", "triton"}} & sys.modules.keys()
print(",".join(sorted(heavy)))
"""


def heavy_after(code):
    program = LIGHT.format(path=sys.path, code=code)
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_attncore_loads_nothing_heavy():
    assert heavy_after("") == ""


@needs_torch
def test_choosing_a_backend_loads_no_torch_numpy_or_rich():
    code = (
        "attncore.select(num_heads=1, num_kv_heads=1, head_size=1, dtype='float32', host=attncore.Host.assume('cpu'))"
    )
    assert heavy_after(code) == "pluggy"


def test_showing_what_is_installed_loads_no_torch_numba_or_rich(monkeypatch):
    monkeypatch.delenv("ATTNCORE_KERNELS", raising=False)  # the default kernels
    code = (
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n"
        "    attncore.show_versions(); print(attncore.backends())"
    )
    assert heavy_after(code) in ("pluggy", "numpy,pluggy")  # kernels may import NumPy


@needs_torch
def test_a_choice_prints_without_numpy():
    code = (
        "one = attncore.select(num_heads=1, num_kv_heads=1, head_size=1, dtype='float32', "
        "host=attncore.Host.assume('cpu'))\nrepr(one), one._repr_html_(), repr(one.spec), repr(one.host)"
    )
    assert heavy_after(code) == "pluggy"


def test_difflib_is_loaded_where_a_name_is_misspelt():
    loaded = "import sys; assert 'difflib' not in sys.modules"
    assert heavy_after(f"attncore.select; attncore.BackendSpec; {loaded}") == ""


def test_writing_a_spec_loads_no_pluggy():
    assert heavy_after("attncore.BackendSpec, attncore.AttentionBackend, attncore.AttentionRequest") == ""


@needs_torch
def test_every_public_name_is_there():
    for name in attncore.__all__:
        assert getattr(attncore, name) is not None
    assert {name for name in dir(attncore) if not name.startswith("__")} | {"__version__"} == set(attncore.__all__)


def test_a_name_that_is_not_there():
    assert not hasattr(attncore, "telepathy")


def test_what_an_early_interrupt_would_meet_is_not_loaded():
    """logging and typing take longer to load than all else that comes before the command answers Ctrl-C."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\nimport attncore, attncore.interrupts, attncore.search_path\n"
        "print(*({'logging', 'typing', 're'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


def test_the_packages_logger_is_silent_by_default():
    assert attncore.select  # a module that logs
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("attncore").handlers)


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_the_overview_of_the_commands_loads_nothing_that_finds_backends(word):
    code = (
        "import contextlib, io\nfrom attncore.cli import main\nwith contextlib.redirect_stdout(io.StringIO()):\n"
        f"    main([{word!r}])\nassert not {{'attncore.registry', 'difflib'}} & sys.modules.keys()"
    )
    assert heavy_after(code) == ""
