"""``attncore doctor``: each plugin in a child process."""

import json
import re
import sys
import time
from importlib import metadata

import pytest
from planting import SPEC, zoo

from attncore import Host, env
from attncore.cli import main
from attncore.registry.doctor import child_main
from attncore.registry.plugins import discover, load

FACTS = """
@hookimpl
def attncore_doctor(host):
    return {"compiler": "none on " + host.platform}
"""

WRITES = """
import sys

@hookimpl
def attncore_doctor(host):
    with open(sys.argv[3], {mode!r}) as answers:
        print({line!r}, file=answers)
    return {{}}
"""


@pytest.fixture(autouse=True)
def clean(site, monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    # the reference backend imports torch when it is made: a second that most tests have no need of
    monkeypatch.setenv("ATTNCORE_DISABLE_PLUGINS", "reference")


def doctor(capsys, *words):
    code = main(["doctor", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def rows(report):
    return {row["name"]: row for row in report["backends"]}


def test_a_good_plugin_is_loaded_asked_and_made(site, capsys):
    site.plugin("acme", SPEC.format(name="acme", module="attn_acme", extra="") + FACTS)
    code, report = doctor(capsys)
    row = rows(report)["acme"]
    assert (code, row["state"], row["created"], row["reasons"]) == (0, "loaded", "Backend on cpu", [])
    assert row["facts"]["compiler"].startswith("none on ")
    assert rows(report)["reference"]["state"] == "blocked"
    assert report["findings"] == []
    assert report["packages"]["numpy"]


ODD = [
    {"reasons": [{"x": 1}]}, {"reasons": 3}, {"reasons": [5]}, {"reasons": [{"code": "none", "message": "m"}]},
    {"missing": [[]]}, {"facts": 3}, {"facts": {"a": []}}, {"phase": {}}, {"phase": []}, {"state": []},
    {"state": "agrees"}, {"created": 7}, {"requires": [1]}, {"variables": [1]}, {"variables": {"A": None}},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_an_answer_that_cannot_be_meant_is_a_row(site, capsys, odd):
    """The plugin writes to a file that is not its own, such as that of the answers."""
    source = SPEC.format(name="writes", module="attn_writes", extra="") + WRITES.format(line=json.dumps(odd), mode="a")
    site.plugin("writes", source)
    site.plugin("acme")
    code, report = doctor(capsys, "--no-create")
    row = rows(report)["writes"]
    assert (code, row["state"]) == (1, "broken")
    assert row["reasons"][-1]["message"] == (
        "its process gave an answer that cannot be meant while its attncore_doctor ran"
    )
    assert rows(report)["acme"]["state"] == "loaded"


def test_answers_that_are_lost_are_no_success(site, capsys):
    lost = WRITES.format(line="", mode="w")
    site.plugin("lost", SPEC.format(name="lost", module="attn_lost", extra="") + lost)
    code, report = doctor(capsys, "--no-create")
    row = rows(report)["lost"]
    assert (code, row["state"]) == (1, "broken")
    assert "the process ended without an answer at its end" in row["reasons"][0]["message"]


def test_a_plugin_in_a_folder_with_a_colon_is_loaded(site, capsys, tmp_path, monkeypatch):
    site.plugin("acme")
    (tmp_path / "of:acme").mkdir()
    for path in [*tmp_path.glob("attn_acme*")]:
        path.rename(tmp_path / "of:acme" / path.name)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "of:acme"), *sys.path])
    load.forget()
    code, report = doctor(capsys)
    row = rows(report)["acme"]
    assert (code, row["state"], row["created"], row["reasons"]) == (0, "loaded", "Backend on cpu", [])


def test_a_plugin_that_only_a_finder_of_this_process_finds_is_a_row(site, capsys, tmp_path, monkeypatch):
    site.plugin("acme")
    found = [*metadata.distributions(path=[str(tmp_path)])]
    monkeypatch.setattr(sys, "path", sys.path[1:])

    class Finder:
        def find_spec(self, name, path, target=None):
            return None

        def find_distributions(self, context):
            return found

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    load.forget()
    code, report = doctor(capsys, "--no-create")
    (reason,) = rows(report)["acme"]["reasons"]
    assert (code, reason["fix"]) == (1, "install attn-acme with pip")
    assert reason["message"] == "a process of its own does not find it, where Python searches by itself"


def test_a_plugin_that_hangs_on_import_is_a_row(site, capsys):
    site.plugin("hangs", "import time\ntime.sleep(600)")
    site.plugin("acme")
    started = time.monotonic()
    code, report = doctor(capsys, "--timeout", "2")
    assert time.monotonic() - started < 60
    row = rows(report)["hangs"]
    assert (code, row["state"]) == (1, "broken")
    assert "it gave no answer within 2 s while its spec was read" in row["reasons"][0]["message"]
    assert rows(report)["acme"]["state"] == "loaded"


DETACHED = "import subprocess\nsubprocess.Popen(['sleep', '30'], start_new_session=True)\n"


@pytest.mark.parametrize("hangs", [True, False])
def test_a_grandchild_in_a_session_of_its_own_is_not_waited_for(site, capsys, hangs):
    good = SPEC.format(name="acme", module="attn_acme", extra="")
    site.plugin("acme", DETACHED + ("import time\ntime.sleep(600)" if hangs else good))
    started = time.monotonic()
    code, report = doctor(capsys, "--no-create", "--timeout", "2" if hangs else "25")
    assert time.monotonic() - started < 25
    assert (code, rows(report)["acme"]["state"]) == ((1, "broken") if hangs else (0, "loaded"))


def test_modules_in_the_current_folder_are_not_the_librarys(site, capsys, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("current")
    (folder / "json.py").write_text("raise RuntimeError('not the library')")
    monkeypatch.chdir(folder)
    site.plugin("acme")
    code, report = doctor(capsys, "--no-create")
    assert (code, rows(report)["acme"]["state"], rows(report)["acme"]["reasons"]) == (0, "loaded", [])


@pytest.mark.parametrize(
    ("source", "heavy", "message"),
    [
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
            "",
            "the process died of SIGSEGV while its spec was",
        ),
        ("import os\nos._exit(3)", "", "SystemExit: os._exit(3) would end the process"),
        (None, "import os\nos.abort()", "the process died of SIGABRT while the backend was created"),
        (None, "raise SystemExit(4)", "importing attn_bad_heavy:Backend failed: SystemExit: 4"),
        (None, "import a_library_that_is_not_there", "importing attn_bad_heavy:Backend failed: ModuleNotFoundError"),
        (None, "def Backend(config): return 3", "made a int, not an AttentionBackend"),
    ],
)
def test_what_crashes_or_fails_is_a_row(site, capsys, source, heavy, message):
    site.plugin("bad", source, heavy=heavy)
    code, report = doctor(capsys)
    row = rows(report)["bad"]
    assert (code, row["state"], row["created"]) == (1, "broken", "")
    assert message in row["reasons"][0]["message"]
    assert row["reasons"][0]["fix"]
    assert any(message in finding for finding in report["findings"])


def test_a_failing_doctor_hook_is_told(site, capsys):
    site.plugin("bad", SPEC.format(name="bad", module="attn_bad", extra="") + FACTS.replace('"none on "', "1"))
    code, report = doctor(capsys)
    assert code == 1
    assert "attncore_doctor failed: TypeError" in rows(report)["bad"]["reasons"][0]["message"]


def test_the_zoo(site, capsys):
    site.plugin("ahead", "import numba\n" + SPEC.format(name="ahead", module="attn_ahead", extra=""))
    site.module("numba", "")
    code, report = doctor(capsys, "--no-create")
    assert code == 1
    assert [reason["code"] for reason in rows(report)["ahead"]["reasons"]] == ["heavy_import"]


def test_every_animal_is_a_finding_and_the_good_one_is_not(site, capsys):
    expected = zoo(site)
    few = ("good", "raises", "later", "taken")
    for name in [name for name in expected if name not in few]:
        next(site.folder.glob(f"zoo_{name}-*.dist-info")).joinpath("entry_points.txt").unlink()
    code, report = doctor(capsys, "--no-create")
    found = {(row["name"], row["distribution"]): row["state"] for row in report["backends"]}
    assert code == 1
    assert found["good", "zoo-good"] == "loaded"
    assert found["raises", "zoo-raises"] == "broken"
    assert found["later", "zoo-later"] == "incompatible"
    assert found["taken", "zoo-taken-a"] == found["taken", "zoo-taken-b"] == "duplicate"
    assert not any("good" in finding for finding in report["findings"])


def test_a_backend_for_another_device_is_not_tried(site, capsys):
    site.plugin("far", SPEC.format(name="far", module="attn_far", extra="").replace('"any"', '"rocm:gfx906"'))
    site.plugin("near")
    code, report = doctor(capsys)
    assert code == 0
    assert rows(report)["far"]["created"].startswith("cannot run here: device ")
    assert [rows(report)[name]["runs_here"] for name in ("far", "near")] == [False, True]


@pytest.mark.parametrize("words", [[], ["--no-create"]])
def test_what_a_backend_for_this_device_lacks_is_a_finding(site, capsys, words):
    site.plugin("new", extra="requires=('nowhere-to-be-found>=2',)")
    site.plugin("old", extra="requires=('numpy>=99',)")
    site.plugin("good")
    code, report = doctor(capsys, *words)
    new, old = report["findings"]
    assert code == 1
    assert new.startswith("new (attn-new 1.0): cannot run here: nowhere-to-be-found is not installed; ")
    assert new.endswith("; pip install 'nowhere-to-be-found>=2'")
    assert old.startswith("old (attn-old 1.0): cannot run here: numpy ")
    assert old.endswith(" is installed; attn-old 1.0 needs numpy>=99; pip install 'numpy>=99'")
    assert {row["name"] for row in report["backends"] if row["runs_here"]} == {"good"}


def test_without_torch_it_says_that_nothing_can_run(site, capsys, monkeypatch):
    monkeypatch.delenv("ATTNCORE_DISABLE_PLUGINS")
    (info := site.folder / "torch-2.1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1\n")
    code, report = doctor(capsys, "--no-create")
    lacks, none = report["findings"]
    assert code == 1
    assert "torch 2.1 is installed; attncore 0.1.0 needs torch>=2.7; pip install 'torch>=2.7'" in lacks
    assert none.startswith("no backend can run here: ")


@pytest.mark.parametrize("requires", ["torch>=2", "numpy"])
def test_a_torch_that_cannot_be_imported_is_a_finding(site, capsys, requires):
    fails = "raise ImportError('libcudart.so.12: cannot open shared object file')"
    (site.folder / "torch.py").write_text(fails)  # for the child processes
    (info := site.folder / "torch-2.7.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.7\n")
    site.plugin("acme", extra=f"requires=({requires!r},)")
    code, report = doctor(capsys, "--no-create")
    why = "the process ended with code 1 (ImportError: libcudart.so.12: cannot open shared object file)"
    findings = [f"torch: 2.7 is installed and cannot be imported: {why}; reinstall it"] if "torch" in requires else []
    assert (code, report["findings"]) == (len(findings), findings)


def test_without_kernels_it_says_that_no_metadata_can_be_built(site, capsys, monkeypatch):
    def absent():
        raise ImportError("kernels: none can be imported (x)")

    monkeypatch.setattr("attncore.kernels.why_kernels", absent)
    monkeypatch.setenv("ATTNCORE_DISABLE_PLUGINS", "reference")
    _, report = doctor(capsys, "--no-create")
    assert [one for one in report["findings"] if "kernels" in one] == ["kernels: none can be imported (x)"]
    assert any("neither metadata nor attention" in one for one in report["findings"])
    assert report["kernels"] == "none can be imported (x)"


def test_variables_known_and_unknown(site, capsys, monkeypatch):
    monkeypatch.setenv("ATTNCORE_KERNELS", "numba")
    monkeypatch.setenv("ATTNCORE_POISON", "maybe")
    monkeypatch.setenv("ATTNCORE_PLUGIN", "x")
    code, report = doctor(capsys, "--no-create")
    assert code == 1
    assert report["environment"]["ATTNCORE_KERNELS"] == "numba"
    assert any(finding.startswith("ATTNCORE_POISON: 'maybe'") for finding in report["findings"])
    assert any("did you mean ATTNCORE_PLUGINS" in finding for finding in report["findings"])


def test_what_a_variable_breaks_needs_no_update(site, capsys, monkeypatch):
    site.plugin("acme", "from attncore import env\nenv.kernels()\nraise RuntimeError('no licence')\n")
    fixes = []
    for value in ("cyton", "numba"):
        monkeypatch.setenv("ATTNCORE_KERNELS", value)
        _, report = doctor(capsys, "--no-create")
        fixes += [reason["fix"] for row in report["backends"] for reason in row["reasons"] if row["name"] == "acme"]
    assert fixes == ["correct ATTNCORE_KERNELS", "update attn-acme, or report it to its authors"]


def test_a_list_that_cannot_be_read_lets_nothing_load(site, capsys, monkeypatch):
    site.plugin("acme", "import pathlib\npathlib.Path(__file__).with_name('ran').touch()")
    monkeypatch.setenv("ATTNCORE_PLUGINS", "Not A Name")
    code, report = doctor(capsys)
    assert (code, report["backends"]) == (1, [])
    assert not (site.folder / "ran").exists()


def test_names_in_a_list_that_no_plugin_has(site, capsys, monkeypatch):
    monkeypatch.setenv("ATTNCORE_PLUGINS", "reference,flahs")
    monkeypatch.setenv("ATTNCORE_DISABLE_PLUGINS", "refrence")
    monkeypatch.setenv("ATTNCORE_BACKEND", "referense")
    code, report = doctor(capsys)
    assert code == 1
    assert report["findings"][:3] == [
        "ATTNCORE_BACKEND: no plugin is named 'referense'; installed: reference; did you mean reference?",
        "ATTNCORE_PLUGINS: no plugin is named 'flahs'; installed: reference",
        "ATTNCORE_DISABLE_PLUGINS: no plugin is named 'refrence'; installed: reference; did you mean reference?",
    ]


VARIABLES = "variables={'ATTNCORE_MY_ATTN_KERNEL': 'which kernel'}"


@pytest.mark.parametrize(
    ("plugin", "variable", "said"),
    [
        ({"extra": VARIABLES}, "ATTNCORE_MY_ATTN_KERNEL", ""),
        ({"extra": VARIABLES}, "ATTNCORE_MY_ATTN_KERNL", "my-attn reads no such variable; did you mean ATTNCORE_MY_A"),
        ({}, "ATTNCORE_MY_ATTN_KERNEL", "ATTNCORE_MY_ATTN_KERNEL: my-attn reads no such variable"),
        ({"extra": VARIABLES}, "ATTNCORE_OTHER_KERNEL", "ATTNCORE_OTHER_KERNEL: attncore reads no such variable"),
        ({"source": "raise RuntimeError('x')"}, "ATTNCORE_MY_ATTN_KERNEL", ""),  # nobody knows what it declares
    ],
    ids=["declared", "misspelt", "none declared", "another's", "not loaded"],
)
def test_variables_of_plugins(site, capsys, monkeypatch, plugin, variable, said):
    site.plugin("good")
    site.plugin("my-attn", **plugin)
    monkeypatch.setenv(variable, "1")
    _, report = doctor(capsys, "--no-create")
    about = [finding for finding in report["findings"] if finding.startswith("ATTNCORE_")]
    assert len(about) == bool(said)
    assert said in "".join(about)
    assert (variable in report["environment"]) == ("KERNEL" in variable and "extra" in plugin and not said)


def test_text(site, capsys):
    site.plugin("raises", "raise RuntimeError('no licence file')")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "\nraises" in out
    assert "\nfinding: raises (attn-raises 1.0): attn_raises failed: RuntimeError: no licence file" in out


@pytest.mark.parametrize("limit", ["0", "inf", "nan"])
@pytest.mark.parametrize("command", ["doctor", "verify"])
def test_a_time_limit_must_be_one(site, capsys, command, limit):
    assert main([command, "--timeout", limit]) == 2
    assert capsys.readouterr().err == f"attncore: error: --timeout: {limit} is not a positive number of seconds\n"


def test_texts_that_cannot_be_encoded_are_escaped(site, capsys, monkeypatch):
    site.plugin("half", "raise ValueError('\\ud800 \\x1b[31m')")
    site.plugin("odd", SPEC.format(name="odd", module="m", extra="").replace("api=1", "api=object()"))
    monkeypatch.setenv("ATTNCORE_\udcff\x1b[31m", "1")  # as os.environ has a byte that is no UTF-8
    for words in ([], ["--json"]):
        assert main(["doctor", "--no-create", *words]) == 1
        out = capsys.readouterr().out
        assert "ud800" in out
        assert out.isascii()
        assert "\x1b" not in out


DIES = """
import os, sys
if sys.argv[1:2] == ["dies"]:
    with open(sys.argv[3], "a") as answers:
        answers.write('{"facts": {"a": ')
    os.kill(os.getpid(), 9)
"""


def test_a_plugin_that_is_killed_within_a_line_loses_its_own_row_alone(site, capsys):
    site.plugin("dies", DIES + SPEC.format(name="dies", module="attn_dies", extra=""))
    site.plugin("good")
    code, report = doctor(capsys, "--no-create")
    assert code == 1
    assert rows(report)["good"]["state"] == "loaded"
    assert "died of SIGKILL while its spec was read" in rows(report)["dies"]["reasons"][0]["message"]


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ("raise KeyboardInterrupt", "attncore_doctor failed: KeyboardInterrupt"),
        ("return 3", "attncore_doctor failed: TypeError: it returned an object of type int; it must return"),
        ("yield 'ready'", "TypeError: it returned an object of type generator; it must return a mapping"),
        ("return ['ready']", "TypeError: it returned an object of type list; it must return a mapping"),
        ("return {'a': Mute(), Mute(): 'b'}", ""),
        ("return {str(number): 'x' * 10000 for number in range(5000)}", ""),
    ],
    ids=["interrupt", "number", "generator", "list", "mute", "many"],
)
def test_whatever_the_doctor_hook_answers(site, capsys, hook, text):
    source = SPEC.format(name="odd", module="attn_odd", extra="")
    source += "class Mute:\n    def __str__(self): raise SystemExit(3)\n"
    source += f"@hookimpl\ndef attncore_doctor(host):\n    {hook}\n"
    site.plugin("odd", source)
    code, report = doctor(capsys, "--no-create")
    row = rows(report)["odd"]
    assert (code, row["state"]) == ((1, "broken") if text else (0, "loaded"))
    assert text in "".join(reason["message"] for reason in row["reasons"])
    assert len(row["facts"]) <= 64
    assert max(map(len, row["facts"].values()), default=0) <= 200


def test_a_fact_may_have_an_empty_name(site, capsys):
    source = SPEC.format(name="odd", module="attn_odd", extra="")
    site.plugin("odd", f"{source}@hookimpl\ndef attncore_doctor(host):\n    return {{'': 'ready', 'cards': '2'}}\n")
    code = main(["doctor", "--no-create"])
    assert (code, re.findall("^note: odd: .*$", capsys.readouterr().out, re.MULTILINE)) == (
        0, ["note: odd: : ready", "note: odd: cards: 2"],
    )  # fmt: skip


def test_a_gpu_that_torch_cannot_use_is_no_fault_of_the_backend(monkeypatch):
    """Nor does the doctor try the CPU in its place."""
    monkeypatch.delenv("ATTNCORE_DISABLE_PLUGINS")
    record = load.load(next(one for one in discover.find() if one.name == "reference"))
    gpu, cpu = (Host.assume(device, packages={"torch": "2.9"}) for device in ("sm_90", "cpu"))
    with monkeypatch.context() as patch:
        patch.setattr("torch.empty", fails)
        answer = child_main._create(record, record.spec, gpu)
    (reason,) = answer["missing"]
    assert reason["code"] == "requirement"
    assert reason["message"].startswith("'cuda:0' cannot be used here: Torch not compiled with CUDA enabled; ")
    assert child_main._create(record, record.spec, cpu)["created"] == "ReferenceBackend on cpu"


def fails(*sizes, **given):
    raise AssertionError("Torch not compiled with CUDA enabled")


@pytest.mark.usefixtures("site")
def test_how_python_ints_are_read_is_in_json_alone(capsys, monkeypatch):
    why = "cython: the compiled extension is installed"
    monkeypatch.setattr("attncore.kernels.why_kernels", lambda: f"{why} (reads Python ints by public C API)")
    assert doctor(capsys, "--no-create")[1]["kernels"] == f"{why} (reads Python ints by public C API)"
    main(["doctor", "--no-create"])
    assert next(one for one in capsys.readouterr().out.splitlines() if one.startswith("kernels")).endswith(why)
