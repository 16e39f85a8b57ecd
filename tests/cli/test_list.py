"""``attncore list``."""

import importlib.util
import json
import re
import subprocess
import sys

from planting import SPEC, zoo

import attncore
from attncore import kernels
from attncore.cli import main


def test_json_is_an_array_of_backends(site, capsys):
    zoo(site)
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    by_name = {(row["name"], row["distribution"]): row for row in rows}
    reference = by_name["reference", "attncore"]
    assert (reference["state"], reference["reasons"]) == ("loaded", [])
    raises = by_name["raises", "zoo-raises"]
    assert (raises["version"], raises["state"]) == ("1.0", "broken")
    assert set(raises["reasons"][0]) == {"code", "message", "asked", "accepted", "source", "fix"}


def test_text_has_a_row_for_each(site, capsys):
    expected = zoo(site)
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "DISTRIBUTION", "VERSION", "STATE", "RUNS", "DEVICES", "REASON"]
    assert lines[-1] == "not installed: flash, flashinfer, rocm; attncore explain says how"
    first = [line.split()[0] for line in lines[1:-1]]
    assert first == sorted(first)
    assert set(first) == {*expected, "good", "reference"}
    assert "no licence file" in next(line for line in lines if line.startswith("raises"))


def test_devices_are_those_of_all_variants(site, capsys):
    """A backend whose spec names some devices, and a variant others, runs on both."""
    extra = "variants=(__import__('attncore').Variant('old', devices={'cuda:sm_75': 3}), "
    site.plugin("two", extra=extra + "__import__('attncore').Variant('new', devices={'cuda:sm_80+': 9}))")
    assert main(["list"]) == 0
    assert "cuda:sm_75, cuda:sm_80+" in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    (two,) = (row for row in json.loads(capsys.readouterr().out) if row["name"] == "two")
    assert two["devices"] == {"cuda:sm_75": 3, "cuda:sm_80+": 9}


def test_devices_are_sorted_and_each_is_named_once(site, capsys):
    """In whatever order a spec declares them, which means nothing."""
    devices = '{"rocm:gfx1100": 9, "cuda:sm_100": 60, "cuda:sm_80+": 55, "rocm:gfx942": 7, "cuda:sm_75": 60}'
    source = SPEC.format(name="mixed", module="mixed", extra="")
    site.plugin("mixed", re.sub(r"devices=\{.*?\}", f"devices={devices}", source))
    assert main(["list"]) == 0
    shown = " cuda:sm_75, cuda:sm_80+, rocm:gfx942, rocm:gfx1100 "
    assert shown in capsys.readouterr().out
    assert main(["show", "--all"]) == 0
    assert shown in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    (mixed,) = (row for row in json.loads(capsys.readouterr().out) if row["name"] == "mixed")
    assert mixed["devices"] == json.loads(devices)
    assert mixed["missing"][0]["accepted"] == shown.strip().split(", ")
    assert mixed["missing"][0]["message"].endswith(f"supported: {shown.strip()}")
    assert main(["show", "mixed"]) == 0
    priorities = "cuda:sm_75 (priority 60), cuda:sm_80+ (priority 55), cuda:sm_100 (priority 60), "
    assert f"{priorities}rocm:gfx942 (priority 7), rocm:gfx1100 (priority 9); the closest entry counts" in (
        capsys.readouterr().out
    )


def test_what_plugins_print_does_not_spoil_json(site, capsys):
    site.plugin("loud", "print('hello'); raise RuntimeError('x')")
    assert main(["list", "--json"]) == 0
    captured = capsys.readouterr()
    assert any(row["name"] == "loud" for row in json.loads(captured.out))
    assert "hello" in captured.err


def test_a_bad_variable_is_one_line_and_2(site, capsys, monkeypatch):
    monkeypatch.setenv("ATTNCORE_STRICT_PLUGINS", "maybe")
    assert main(["list"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "attncore: error: ATTNCORE_STRICT_PLUGINS: 'maybe' is neither 0 nor 1\n"


def test_strict_is_one_line_and_2(site, capsys, monkeypatch):
    zoo(site)
    monkeypatch.setenv("ATTNCORE_STRICT_PLUGINS", "1")
    assert main(["list"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_one_plugins_texts_and_values_do_not_stop_the_others(site, capsys):
    site.plugin("half", "raise ValueError('\\ud800')")
    site.plugin("odd", SPEC.format(name="odd", module="m", extra="").replace("api=1", "api=object()"))
    site.plugin("mute", "class E(Exception):\n    def __str__(self): raise SystemExit(3)\nraise E")
    assert main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert "ValueError: \\ud800" in rows["half"]["reasons"][0]["message"]
    assert "is not an integer" in rows["odd"]["reasons"][0]["message"]
    assert rows["mute"]["reasons"][0]["message"].endswith("E: without a message")
    assert main(["list"]) == 0


def test_nothing_is_said_to_be_nothing(site, capsys, monkeypatch):
    monkeypatch.setattr("attncore.registry.plugins.discover._entry_points", list)
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "no backend is installed\n"
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_entry_points_that_cannot_be_read_are_a_row_of_list_and_doctor(site, capsys, monkeypatch):
    info = site.plugin("mangled")
    (info / "entry_points.txt").write_text("[attncore.backends]\nno equals sign\n")
    monkeypatch.setenv("ATTNCORE_DISABLE_PLUGINS", "reference")
    for command, code in ((["list"], 0), (["doctor"], 1)):
        assert main(command) == code
        assert any(line.startswith("?  ") for line in capsys.readouterr().out.splitlines())


def test_ctrl_c_is_one_line_that_names_the_plugin(site, capsys):
    site.plugin("waits", "raise KeyboardInterrupt")
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "attncore: error: interrupted while waits (attn-waits 1.0) was loaded\n"


def test_where_all_are_there_no_line_says_what_is_not(site, capsys):
    for name in ("flash", "flashinfer", "rocm"):
        site.plugin(name)
    assert main(["list"]) == 0
    assert "not installed:" not in capsys.readouterr().out


ASK = "print({who!r}, gc.isenabled(), len(gc.get_objects()) < {most}, file=sys.stderr)"
OF_A_PROCESS = f"""
import atexit, gc, importlib.metadata, sys  # which loads json from Python 3.13 on
before = set(sys.modules)
atexit.register(lambda: {ASK.format(who="end", most=1_000)})
sys.path[:] = {{path!r}}
from attncore.__main__ import main
try:
    main()
finally:
    print("loaded", *sorted(set(sys.modules) - before), file=sys.stderr)
"""


def test_a_process_loads_what_it_needs_and_collects_garbage_only_meanwhile(site):
    """What is loaded before code of plugins runs is not searched, and nothing is when the process ends."""
    site.plugin("asks", f"import gc, sys; {ASK.format(who='plugin', most=20_000)}")
    program = OF_A_PROCESS.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", program, "list"], check=True, capture_output=True, text=True)
    assert "\nasks" in done.stdout
    assert "plugin True True\n" in done.stderr
    assert done.stderr.splitlines()[-1] == "end True True"
    loaded = next(line.split() for line in done.stderr.splitlines() if line.startswith("loaded "))
    assert "attncore.registry.choice.runs_here" in loaded
    unneeded = "json difflib numpy torch attncore.registry.child_process attncore.registry.choice.candidates"
    assert {*unneeded.split()} & {*loaded} == set()


def test_without_kernels_nothing_runs(site, capsys, monkeypatch):
    """Neither the compiled extension nor numba: they are looked for, and not imported."""
    find = importlib.util.find_spec
    monkeypatch.setattr(kernels, "_can_be_found", kernels._can_be_found.__wrapped__)
    hidden = {"attncore._slots", "numba"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in hidden else find(name, *more))
    assert main(["list"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("reference"))
    assert line.split()[4] == "no"
    lacking = "kernels cannot be found: the compiled extension, and numba in its place"
    assert f"{lacking}; attncore doctor says how to get them" in line
    hidden.remove("attncore._slots")
    assert "reference" in attncore.backends().runs_here
    monkeypatch.setenv("ATTNCORE_KERNELS", "numba")
    assert main(["list"]) == 0
    assert "those of numba, which ATTNCORE_KERNELS asks for" in capsys.readouterr().out
    monkeypatch.delenv("ATTNCORE_KERNELS")
    hidden.add("attncore._slots")
    assert main(["list", "--json"]) == 0
    row = next(row for row in json.loads(capsys.readouterr().out) if row["name"] == "reference")
    assert (row["runs_here"], row["missing"][0]["source"]) == (False, "attncore")
    hidden.clear()
    assert main(["list", "--json"]) == 0
    assert next(row for row in json.loads(capsys.readouterr().out) if row["name"] == "reference")["runs_here"]
