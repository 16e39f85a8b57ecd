"""make api-check: what is taken out of the public names, or asked for by them, fails it; the rest does not."""

import shutil
import subprocess
from pathlib import Path

import pytest

griffe = pytest.importorskip("griffe", reason="griffelib is not installed")
from api_check import check  # noqa: E402

ROOT = Path(__file__).parents[1]
INIT = """
TYPE_CHECKING = False
if TYPE_CHECKING:
    from attncore._version import __version__
    from attncore.inner import Batch, select
__all__ = ["Batch", "__version__", "select"]
"""
INNER = """
class Held:
    def release(self, num_rollback=0): ...
    def _grow(self, by): ...
class Batch(Held):
    size: int
    def add(self, name, blocks, computed=0): ...
def select(request, host=None, limit=_ALL): ...
def helper(one): ...
"""


def commit(repository, *tags):
    words = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    for command in (
        ["add", "-A"],
        [*words, "commit", "-q", "--allow-empty", "-m", "m"],
        *(["tag", tag] for tag in tags),
    ):
        subprocess.run(["git", "-C", str(repository), *command], check=True)


@pytest.fixture
def repository(tmp_path):
    """A repository of a small attncore; its last release is tagged."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    package = tmp_path / "attncore"
    package.mkdir()
    (tmp_path / "tests").mkdir()
    for name, text in {"__init__": INIT, "inner": INNER, "_version": '__version__ = "0.1.0"\n'}.items():
        (package / f"{name}.py").write_text(text)
    commit(tmp_path, "v0.1.0")
    return tmp_path


def change(repository, old, new, name="inner"):
    file = repository / "attncore" / f"{name}.py"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


BREAKS = {
    "a method of a base": ("def release(self, num_rollback=0): ...", "pass", "inner.Batch.release: Public object was"),
    "a method": ("def add(self, name, blocks, computed=0): ...", "pass", "inner.Batch.add: Public object was removed"),
    "an attribute": ("size: int", "pass", "inner.Batch.size: Public object was removed"),
    "a parameter": ("name, blocks, computed=0", "name, blocks", "inner.Batch.add(computed): Parameter was removed"),
    "an order": ("name, blocks, ", "blocks, name, ", "inner.Batch.add(blocks): Positional parameter was moved"),
    "a new one": ("request, host=None", "request, layer, host=None", "inner.select(layer): Parameter was added as"),
    "a default": ("computed=0", "computed=1", "inner.Batch.add(computed): Parameter default was changed: 0 -> 1"),
    "a kind": (
        "def select(request, host=None, limit=_ALL): ...",
        "select = 3",
        "inner.select: Public object points to a different",
    ),
}


@pytest.mark.parametrize(("old", "new", "says"), BREAKS.values(), ids=BREAKS)
def test_a_break_is_told(repository, capsys, old, new, says):
    change(repository, old, new)
    assert check(repository) == 1
    *told, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"api-check: breaks v0.1.0: attncore.{says}") for line in told)
    assert last == f"api-check: {len(told)} breaks since v0.1.0, and 0 that are meant"


def test_a_name_that_is_not_exported_any_more(repository, capsys):
    change(repository, ', "select"]', "]", "__init__")
    assert check(repository) == 1
    assert "attncore.select: it is no public name any more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def helper(one): ...", ""),
        ("def _grow(self, by): ...", "def new(self): ..."),
        ("limit=_ALL", "limit=_ALL, layer=None"),
        ("limit=_ALL", "limit=_EVERYTHING"),
    ],
)
def test_what_breaks_nobody(repository, capsys, old, new):
    change(repository, old, new)
    change(repository, "0.1.0", "0.2.0", "_version")
    assert check(repository) == 0, capsys.readouterr().out


def test_a_break_that_is_meant_and_one_that_is_none(repository, capsys):
    change(repository, "size: int", "pass")
    meant = repository / "tests" / "api_breaks.txt"
    meant.write_text("# why\nattncore.inner.Batch.size: Public object was removed\n")
    assert check(repository) == 0
    assert "0 breaks since v0.1.0, and 1 that are meant" in capsys.readouterr().out
    change(repository, "    pass\n", "    size: int\n")
    change(repository, "0.1.0", "0.2.0", "_version")
    assert check(repository) == 1
    assert "take the line out: attncore.inner.Batch.size" in capsys.readouterr().out


def test_without_a_tag_it_says_so(repository, capsys):
    subprocess.run(["git", "-C", str(repository), "tag", "-d", "v0.1.0"], check=True, capture_output=True)
    assert check(repository) == 0
    assert "nothing to compare with" in capsys.readouterr().out


def test_the_tag_of_this_commit_is_not_compared_with_itself(repository, capsys):
    change(repository, "size: int", "pass")
    commit(repository, "v0.2.0", "nightly")
    assert check(repository) == 1
    assert "breaks v0.1.0: attncore.inner.Batch.size" in capsys.readouterr().out


def test_a_revision_that_is_not_there(repository):
    with pytest.raises(SystemExit, match=r"^api-check: v9: "):
        check(repository, "v9")


def test_a_method_of_this_package_cannot_go_silently(tmp_path, capsys):
    shutil.copytree(
        ROOT / "attncore", tmp_path / "attncore", ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__")
    )
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    commit(tmp_path, "v0.1.0")
    file = tmp_path / "attncore" / "builder" / "persistent" / "run_ahead.py"
    text = file.read_text()
    assert text.count("def run_ahead(") == 1
    file.write_text(text.replace("def run_ahead(", "def _run_ahead("))
    assert check(tmp_path) == 1
    assert "run_ahead.MetadataBuilder.run_ahead: Public object was removed" in capsys.readouterr().out
