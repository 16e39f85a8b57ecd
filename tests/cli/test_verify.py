"""attncore verify: verdicts, their cache, and libraries that crash or hang."""

import json
import os
import re
import sys
import zipfile
from importlib.metadata import version
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest
from packaging.version import Version
from planting import SPEC

from attncore.cli import main
from attncore.testing.verify import _modified, _modified_of

REFERENCE = """
from attncore.reference import ReferenceBackend, ReferenceImpl

class Impl(ReferenceImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None):
        {forward}
        return super().forward(query, key, value, kv_cache, metadata, output)

class Backend(ReferenceBackend):
    impl_class = Impl
"""
SMALL = ["--num-heads", "4", "--num-kv-heads", "2", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache of this test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def verdicts(capsys, *words):
    code = main(["verify", *words, *SMALL, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_right_backend_agrees_and_the_verdict_is_kept(site, capsys, cache):
    site.plugin("right", heavy=REFERENCE.format(forward="pass"), version="1.5")
    code, (found,) = verdicts(capsys, "right")
    assert (code, found["state"], found["message"], found["cached"]) == (0, "agrees", "", False)
    assert (found["name"], found["distribution"], found["version"]) == ("right", "attn-right", "1.5")
    assert found["against"] == "reference and dense float32 attention"
    assert found["steps"] >= 4
    assert 0 <= found["max_abs_error"] < found["tolerance"]
    assert len(list((cache / "attncore" / "verify").iterdir())) == 1

    code, (kept,) = verdicts(capsys, "right")
    assert (code, kept) == (0, {**found, "cached": True})
    # without a name it is what would be chosen: priority 5 against the reference's 0
    code, (chosen,) = verdicts(capsys)
    assert (code, chosen["name"], chosen["cached"]) == (0, "right", True)


def test_a_new_version_a_change_or_fresh_asks_again(site, capsys):
    site.plugin("moving", heavy="raise RuntimeError('first')")
    assert "first" in verdicts(capsys, "moving")[1][0]["message"]
    site.module("attn_moving_heavy", "raise RuntimeError('second, of another length')")
    assert "second" in verdicts(capsys, "moving")[1][0]["message"]
    assert verdicts(capsys, "moving")[1][0]["cached"]
    assert not verdicts(capsys, "moving", "--fresh")[1][0]["cached"]


def test_a_variable_that_the_plugin_declares_asks_again(site, capsys, monkeypatch):
    reads = "import os; key = key * float(os.environ.get('ATTNCORE_TUNED_FACTOR', '1'))"
    extra = 'variables={"ATTNCORE_TUNED_FACTOR": "what keys are multiplied by"},'
    site.plugin("tuned", heavy=REFERENCE.format(forward=reads), extra=extra)
    assert verdicts(capsys, "tuned")[1][0]["state"] == "agrees"
    monkeypatch.setenv("ATTNCORE_OTHER", "1")
    assert verdicts(capsys, "tuned")[1][0]["cached"]
    for value in ("2", ""):
        monkeypatch.setenv("ATTNCORE_TUNED_FACTOR", value)
        found = verdicts(capsys, "tuned")[1][0]
        assert (found["state"] != "agrees", found["cached"]) == (True, False)
    monkeypatch.delenv("ATTNCORE_TUNED_FACTOR")
    found = verdicts(capsys, "tuned")[1][0]
    assert (found["state"], found["cached"]) == ("agrees", True)


@pytest.mark.parametrize(
    ("forward", "state", "message"),
    [
        ("key = key * 1.01", "differs", "differs from dense float32 attention"),
        ("raise RuntimeError('no kernel for this device')", "fails", "RuntimeError: no kernel for this device"),
        ("raise BaseExceptionGroup('many', [KeyboardInterrupt()])", "fails", "BaseExceptionGroup: many"),
        ("import os; os.abort()", "crashes", "the process died of SIGABRT while it ran"),
        (
            "import os, sys; print('no answer', file=sys.stderr); os._exit(3)",
            "crashes",
            "ended with code 3 (no answer)",
        ),
        ("import time; time.sleep(600)", "hangs", "it gave no answer within 8 s"),
    ],
    ids=["differs", "fails", "fails oddly", "crashes", "exits", "hangs"],
)
def test_a_wrong_failing_crashing_or_hanging_library_is_a_row(site, capsys, forward, state, message):
    site.plugin("bad", heavy=REFERENCE.format(forward=forward))
    code, (found,) = verdicts(capsys, "bad", *(["--timeout", "8"] if state == "hangs" else []))
    assert (code, found["state"]) == (1, state)
    assert message in found["message"]


@pytest.mark.parametrize(
    ("forward", "state"),
    [
        ("import os; os.kill(os.getpid(), 9)", "crashes"),  # as the system does where memory is short
        ("import os; os.kill(os.getpid(), 15)", "crashes"),
        ("raise MemoryError", "fails"),
        ("import torch; raise torch.OutOfMemoryError('CUDA out of memory')", "fails"),
        ("raise OSError(28, 'No space left on device')", "fails"),  # as of a folder of compiled kernels
        ("raise OSError(24, 'Too many open files')", "fails"),
    ],
)
def test_what_may_be_no_fault_of_the_backend_is_not_kept(site, capsys, cache, forward, state):
    site.plugin("bad", heavy=REFERENCE.format(forward=forward))
    code, (found,) = verdicts(capsys, "bad")
    assert (code, found["state"], found["cached"]) == (1, state, False)
    assert not list(cache.rglob("*.json"))


def test_a_process_that_cannot_be_started_is_a_verdict_that_is_not_kept(site, capsys, cache, monkeypatch):
    site.plugin("right", heavy=REFERENCE.format(forward="pass"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        code, (found,) = verdicts(capsys, "right")
    assert (code, found["state"]) == (1, "crashes")
    assert found["message"].startswith("no process can be started: ")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", lambda: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        assert verdicts(capsys, "right")[1][0]["message"].startswith("no process can be started: [Errno 24]")
    assert not list(cache.rglob("*.json"))


def test_the_error_shown_is_that_of_the_output_that_differs(site, capsys):
    site.plugin("off", heavy=REFERENCE.format(forward="key = key * 1.01"))
    _, (found,) = verdicts(capsys, "off")
    (said,) = re.findall(r"differs from dense float32 attention by ([0-9.e-]+)", found["message"])
    assert found["max_abs_error"] == pytest.approx(float(said), rel=0.01)
    assert main(["verify", "off", *SMALL]) == 1
    row = capsys.readouterr().out.splitlines()[1].split()
    assert float(row[row.index("differs") + 1]) == pytest.approx(float(said), rel=0.1)


NAN = "return super().forward(query, key, value, kv_cache, metadata, output) * float('nan')"


@pytest.mark.parametrize("forward", ["query.mul_(2)", NAN], ids=["argument", "NaN"])
def test_what_differs_by_no_number_shows_none(site, capsys, forward):
    site.plugin("off", heavy=REFERENCE.format(forward=forward))
    code, (found,) = verdicts(capsys, "off")
    assert (code, found["state"], found["max_abs_error"]) == (1, "differs", None), found["message"]


def test_what_cannot_be_used_here_exits_3_with_its_reasons(site, capsys):
    site.plugin("elsewhere", extra="requires=('a-library-that-is-not-there>=2',)")
    assert main(["verify", "elsewhere"]) == 3
    assert "pip install 'a-library-that-is-not-there>=2'" in capsys.readouterr().err


def test_a_number_of_heads_that_the_usual_key_heads_do_not_divide(cache, capsys):
    """It has as many of these, as ``explain`` takes; an error would name an option that nobody gave."""
    assert main(["verify", "reference", "--num-heads", "3", "--dtype", "float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "agrees"


@pytest.mark.parametrize(
    "facts",
    [
        "use_mla=True, mla_only=True, max_group_size=16, head_size_v={128}",
        "variants=(Variant('new', requires=('absent',), head_sizes={32}, dtypes={'float16'}), Variant('old'))",
    ],
    ids=["small groups of latent heads", "a variant behind one of other sizes"],
)
def test_what_is_asked_is_what_can_be_used_here(site, capsys, facts):
    light = SPEC.replace("MultipleOf, ", "MultipleOf, Variant, ").format(name="some", module="attn_some", extra=facts)
    site.plugin("some", light, heavy=REFERENCE.format(forward="pass"))
    assert main(["verify", "some", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "agrees"


def test_all_is_a_row_each_and_prints_a_table(site, capsys, monkeypatch):
    site.plugin("broken-create", heavy="raise ImportError('libacme.so is missing')", module="broken_create")
    monkeypatch.setenv("ATTNCORE_PLUGINS", "broken-create")
    assert main(["verify", "--all", *SMALL]) == 1
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "VARIANT", "DISTRIBUTION", "DEVICE", "STATE", "ERROR", "SECONDS", "WHAT"]
    assert row.startswith("broken-create")
    assert "libacme.so is missing" in row


def test_all_names_those_that_it_leaves_out(site, capsys, monkeypatch):
    site.plugin("here", heavy="raise ImportError('libacme.so is missing')", module="here")
    site.plugin("elsewhere", extra="requires=('a-library-that-is-not-there>=2',)")
    monkeypatch.setenv("ATTNCORE_PLUGINS", "here,elsewhere")
    assert main(["verify", "--all", *SMALL]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "not verified: elsewhere; attncore explain says why"


@pytest.mark.parametrize(
    ("words", "field"),
    [(["--timeout", "0"], "--timeout"), (["reference", "--all"], "--all"), (["--head-size", "0"], "--head-size")],
)
def test_bad_usage_is_one_line(capsys, words, field):
    assert main(["verify", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"attncore: error: {field}: ")
    assert error.count("\n") == 1


def test_a_cache_that_cannot_be_written_or_read_is_no_cache(site, capsys, cache):
    (cache / "attncore").write_text("a file where a folder should be")
    site.plugin("bad", heavy="raise RuntimeError('no')")
    for _ in range(2):
        code, (found,) = verdicts(capsys, "bad")
        assert (code, found["state"], found["cached"]) == (1, "fails", False)


def edited(**fields):
    """Fields of the kept verdict, replaced by JSON texts."""

    def edit(file):
        kept = json.loads(file.read_text())
        assert fields.keys() <= kept.keys()
        texts = {name: json.dumps(value) for name, value in kept.items()} | fields
        file.write_text("{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}")

    return edit


def replaced(make):
    def replace(file):
        file.unlink()
        make(file)

    return replace


DAMAGE = {
    "fields missing": lambda file: file.write_text('{"state": "agrees"}'),
    "deep": lambda file: file.write_text("[" * 100_000),
    "deep fields": edited(message="[" * 90_000 + "]" * 90_000),
    "no JSON": lambda file: file.write_text("not JSON"),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00"),
    "null": lambda file: file.write_text("null"),
    "wrong type": edited(max_abs_error='"x"'),
    "huge integer": edited(steps="9" * 4000),
    "huger integer": edited(steps="9" * 5000),
    "infinite": edited(seconds="1e999"),
    "NaN": edited(tolerance="NaN"),
    "negative": edited(steps="-1"),
    "too many steps": edited(steps="1000000"),
    "too long": edited(seconds="1e9"),
    "agrees, but": edited(state='"agrees"'),
    "fails, but not why": edited(message='""'),
    "hangs": edited(state='"hangs"'),
    "a long message": edited(message=json.dumps("x" * 1001)),
    "long, what it was compared with": edited(against=json.dumps("x" * 1001)),
    "another library": edited(library='"acme 2.0"'),
    "another driver": edited(driver='"\\u001b[2J"'),
    "a field twice": lambda file: file.write_text(f'{file.read_text()[:-1]}, "state": "fails"}}'),
    "no number of steps": edited(steps="null"),
    "another state": edited(state='["agrees"]'),
    "another text": edited(against="{}"),
    "another device": edited(device='"cuda:sm_90"'),
    "long": lambda file: file.write_text(file.read_text() + " " * (1 << 21)),
    "pipe": replaced(os.mkfifo),
    "folder": replaced(os.mkdir),
    "device": replaced(lambda file: file.symlink_to("/dev/zero")),
    "every user's": lambda file: file.chmod(0o666),
    "another user's": lambda file: os.chown(file, 12345, 12345),
}


def told(arguments, timeout):
    """In the place of ``run_in_child``: a verdict that is there at once."""
    Path(arguments[-1]).write_text('{"state": "fails", "message": "no"}\n')
    return ""


@pytest.fixture
def quick(site, monkeypatch):
    """A plugin whose verdict is there at once."""

    monkeypatch.setattr("attncore.testing.verify.run_in_child", told)
    site.plugin("quick")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_verdict_is_ignored_with_a_reason_and_asked_again(capsys, cache, damage):
    if damage == "another user's" and os.geteuid():
        pytest.skip("only root can give a file away")
    code, (first,) = verdicts(capsys, "quick")
    (file,) = (cache / "attncore" / "verify").iterdir()
    assert verdicts(capsys, "quick") == (code, [{**first, "cached": True}])
    DAMAGE[damage](file)
    code, (found,) = verdicts(capsys, "quick")
    assert (code, found["state"], found["cached"]) == (1, "fails", False)
    assert str(file) in found["ignored"]
    assert [one.name for one in file.parent.iterdir()] == [file.name]
    if damage != "folder":  # which only its owner may delete
        assert verdicts(capsys, "quick")[1][0]["cached"]


@pytest.mark.parametrize("ended", ["the process died of SIGSEGV", "it gave no answer within 300 s"])
def test_a_verdict_counts_however_its_process_ends(site, capsys, monkeypatch, ended):
    monkeypatch.setattr("attncore.testing.verify.run_in_child", lambda *given: told(*given) or ended)
    site.plugin("quick")
    code, (found,) = verdicts(capsys, "quick")
    assert (code, found["state"], found["message"]) == (1, "fails", "no")


def test_a_message_of_any_length_is_kept(site, capsys):
    site.plugin("bad", heavy="raise type('E' * 900, (Exception,), {})('words\\n' * 900)")
    for cached in (False, True):
        code, (found,) = verdicts(capsys, "bad")
        assert (code, found["state"], found["cached"], found["ignored"]) == (1, "fails", cached, "")
        assert 900 < len(found["message"]) <= 1000


@pytest.mark.usefixtures("quick")
def test_why_a_verdict_is_ignored_is_in_the_table(capsys, cache):
    verdicts(capsys, "quick")
    (file,) = (cache / "attncore" / "verify").iterdir()
    file.chmod(0o666)
    assert main(["verify", "quick", *SMALL]) == 1
    assert f"what was kept is ignored: {file} may be written to by every user" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_user_without_a_home_keeps_no_verdict(capsys, monkeypatch):
    def homeless(name):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("attncore.testing.verify.cache_folder", homeless)
    for _ in range(2):
        assert not verdicts(capsys, "quick")[1][0]["cached"]


@pytest.mark.parametrize("ends", ["import os; os._exit(0)", "raise KeyboardInterrupt", "import sys; sys.exit()"])
def test_a_library_that_ends_the_process_is_a_row(site, capsys, ends):
    site.plugin("bad", heavy=REFERENCE.format(forward=ends))
    code, (found,) = verdicts(capsys, "bad")
    assert code == 1
    assert found["state"] in ("crashes", "fails")
    assert found["message"]


def test_a_change_in_a_file_of_the_same_name_elsewhere_is_seen(tmp_path, monkeypatch):
    for name in ("__init__.py", "a/k.py", "b/k.py", "a/__init__.py", "_c.so", "a/k.cu"):
        file = tmp_path / "pack" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    monkeypatch.syspath_prepend(tmp_path)
    before = _modified("pack.a.k")
    os.utime(tmp_path / "pack" / "a" / "k.py", (1, 1))
    assert _modified("pack.a.k") != before
    before = _modified("pack.a.k")
    os.utime(tmp_path / "pack" / "a" / "k.cu", (1, 1))  # compiled when it runs
    assert _modified("pack.a.k") != before


def test_another_zip_file_that_a_plugin_is_imported_from_is_seen(tmp_path, monkeypatch):
    archive = tmp_path / "wheel.zip"
    with zipfile.ZipFile(archive, "w") as written:
        for name in ("zipped/__init__.py", "zipped/kernel.py", "zipped_module.py"):
            written.writestr(name, "")
    os.utime(archive, (1, 1))
    monkeypatch.syspath_prepend(archive)
    assert _modified("zipped.kernel") == _modified("zipped_module") == {"0/wheel.zip": 10**9}


def test_a_change_in_another_module_of_the_distribution_is_seen(tmp_path, monkeypatch):
    (tmp_path / "attn_sib-1.dist-info").mkdir()
    (tmp_path / "attn_sib-1.dist-info" / "METADATA").write_text("Name: attn-sib\nVersion: 1\n")
    (tmp_path / "attn_sib-1.dist-info" / "RECORD").write_text("sib_heavy.py,,\nsib_kernels.py,,\ngone.py,,\n")
    for name in ("sib_heavy.py", "sib_kernels.py"):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (1, 1))
    monkeypatch.syspath_prepend(tmp_path)
    assert _modified_of("attn-sib") == {"sib_heavy.py": 10**9, "sib_kernels.py": 10**9}
    assert _modified_of("attn-absent") == _modified_of(None) == {}


MODULES = {
    "a specification that is none": "sys.modules[__name__].__spec__ = 5",
    "no specification": "del sys.modules[__name__].__spec__",
    "a module that raises": "sys.modules[__name__] = Raises()",
    "a module that ends the process": "sys.modules[__name__] = Ends()",
}
OWN = """
import sys
class Raises:
    def __init__(self): vars(self).update(globals())
    def __getattribute__(self, name):
        if name in ("__spec__", "__path__"): raise RuntimeError("asked for " + name)
        return super().__getattribute__(name)
class Ends(Raises):
    def __getattribute__(self, name):
        if name == "__spec__": open("asked", "w").close(); raise SystemExit(0)
        return object.__getattribute__(self, name)
"""


@pytest.mark.parametrize("how", MODULES)
def test_a_module_that_is_odd_is_not_asked_for_its_files(site, capsys, tmp_path, monkeypatch, how):
    """Of the process that prints the verdicts; those of the others are printed, and files' times count all the same."""
    if "a module" in how and Version(version("pluggy")) < Version("1.6"):
        pytest.skip("this pluggy asks a plugin for each of its attributes, and fails with it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attncore.testing.verify.run_in_child", told)
    site.plugin("good")
    source = OWN + SPEC.format(name="odd", module="attn_odd", extra="").replace("attn_odd_heavy", "attn_odd")
    site.plugin("odd", f"{source}\n{MODULES[how]}\n")
    code, found = verdicts(capsys, "--all")
    assert code == 1
    assert {"good", "odd"} <= {one["name"] for one in found}
    assert _modified("attn_odd.x")
    assert not (tmp_path / "asked").exists()


def test_a_finder_of_an_editable_installation_is_asked_and_may_fail(tmp_path, monkeypatch):
    (tmp_path / "apart.py").write_text("")

    class Finder:
        def find_spec(self, name, path, target=None):
            if name == "apart":
                return spec_from_file_location(name, tmp_path / "apart.py")
            raise SystemExit(0)

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert _modified("apart") == {"0/apart.py": (tmp_path / "apart.py").stat().st_mtime_ns}
    assert _modified("absent_everywhere") == {}


def test_the_files_are_those_that_an_import_finds(tmp_path, monkeypatch):
    """A finder before that of the folders has the package, of which a folder of the path has another copy."""
    for folder in ("path", "own"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twice.py").write_text("")
    os.utime(tmp_path / "own" / "twice.py", (1, 1))

    class Finder:
        def find_spec(self, name, path, target=None):
            return spec_from_file_location(name, tmp_path / "own" / "twice.py") if name == "twice" else None

    monkeypatch.syspath_prepend(tmp_path / "path")
    assert _modified("twice") != {"0/twice.py": 10**9}
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert _modified("twice") == {"0/twice.py": 10**9}


def test_verify_needs_no_library_of_the_kits(site, capsys):
    for name in ("hypothesis", "pytest"):
        site.module(name, f"raise ModuleNotFoundError('No module named {name}')")
    code, (found,) = verdicts(capsys, "reference")
    assert (code, found["state"]) == (0, "agrees"), found["message"]


def test_a_backend_that_is_misspelt_is_one_line(site, capsys):
    site.plugin("acme")
    assert main(["verify", "acmee"]) == 3
    said = "NAME: no backend 'acmee' is installed; installed: acme, reference; did you mean acme?"
    assert capsys.readouterr().err == f"attncore: error: {said}\n"


def test_the_table_says_what_error_is_allowed(site, capsys):
    site.plugin("right", heavy=REFERENCE.format(forward="pass"))
    assert main(["verify", "right", *SMALL]) == 0
    assert "; allowed error: 2e-05 x (1 + abs(number))\n" in capsys.readouterr().out
