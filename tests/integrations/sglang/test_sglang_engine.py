"""attncore's backends inside SGLang, on the CPU: SGLang's engine and SGLang's own attention cases, as processes.

They run in SGLang's environment, which make test-sglang sets up. What is planted in them is planted by a plugin.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from attncore import __version__

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

pytestmark = pytest.mark.sglang

CASES_WITH_WINDOW = 6
"""Of the kit's 42: two cases in three layouts of the cache."""


THIS_TREE = []
"""The folder that says what attncore provides."""


def provide(folder, name, entry_points, version="1.0"):
    """A distribution in ``folder`` with these entry points: group -> lines."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{lines}\n" for group, lines in entry_points.items()))
    return folder


@pytest.fixture
def faults(tmp_path):
    """A folder whose plugin plants what ATTNCORE_TEST_FAULT names."""
    return provide(tmp_path / "faults", "planted", {"sglang.srt.plugins": "planted = planted_faults:plant"})


@pytest.fixture(scope="session", autouse=True)
def this_tree(tmp_path_factory):
    """attncore as installed from this tree, by its entry points: nothing is built for SGLang's environment."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        groups = tomllib.load(file)["project"]["entry-points"]
    lines = {group: "\n".join(f"{name} = {at}" for name, at in those.items()) for group, those in groups.items()}
    THIS_TREE.append(provide(tmp_path_factory.mktemp("tree"), "attncore", lines, __version__))
    yield
    THIS_TREE.clear()


def run(script, *words, path=(), **env):
    """The JSON that a script printed last, and the rest of what it said."""
    paths = [*map(str, (*path, *THIS_TREE)), str(ROOT), str(HERE / "stubs")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        [sys.executable, str(HERE / script), *words], env=env, capture_output=True, text=True, timeout=300
    )
    said = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return (json.loads(lines[-1]) if lines and not done.returncode else None), said


def kit(name, **more):
    found, said = run("kit_of_sglang.py", name, **more)
    assert found is not None, said[-3000:]
    return found


def made(kind, folder):
    """``folder`` with a tiny model of random weights, and what transformers generates with it."""
    found, said = run("tiny_model.py", str(folder), kind)
    assert found is not None, said[-3000:]
    return folder, found["tokens"]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A Llama."""
    return made("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", ["attncore_reference", "attncore"])
def test_tokens_are_those_of_transformers(model, name):
    folder, expected = model
    found, said = run("engine_of_sglang.py", str(folder), name)
    assert found is not None, said[-3000:]
    assert found["tokens"] == expected
    assert found["again"] == expected[1:4]
    assert min(found["cached"]) >= 16, "no page was found again: prefix caching is off"


def test_layers_of_two_kinds(tmp_path):
    folder, expected = made("gemma2", tmp_path / "gemma2")
    found, said = run("engine_of_sglang.py", str(folder), "attncore_reference")
    assert found is not None, said[-3000:]
    assert found["tokens"] == expected


def test_a_window_off_by_one_changes_tokens(tmp_path, faults):
    folder, expected = made("gemma2", tmp_path / "gemma2")
    found, said = run("engine_of_sglang.py", str(folder), "attncore", path=[faults], ATTNCORE_TEST_FAULT="window")
    assert found is not None, said[-3000:]
    assert found["tokens"] != expected


@pytest.mark.parametrize("fault", ["rows", "table"])
def test_a_fault_in_the_table_changes_tokens(model, faults, fault):
    folder, expected = model
    found, said = run("engine_of_sglang.py", str(folder), "attncore", path=[faults], ATTNCORE_TEST_FAULT=fault)
    assert found is not None, said[-3000:]
    same = sum(one == other for one, other in zip(found["tokens"], expected, strict=True))
    assert same < len(expected), "the fault changed nothing"


def test_all_of_sglangs_own_cases():
    found = kit("attncore_reference")
    assert found["failed"] == []
    assert found["ran"] == 42


@pytest.mark.parametrize("fault", ["rows", "table", "slots"])
def test_sglangs_cases_find_a_planted_fault(faults, fault):
    found = kit("attncore", path=[faults], ATTNCORE_TEST_FAULT=fault)
    assert len(found["failed"]) >= 12, found


def test_sglangs_cases_find_a_window_off_by_one(faults):
    found = kit("attncore", path=[faults], ATTNCORE_TEST_FAULT="window")
    assert len(found["failed"]) == CASES_WITH_WINDOW, found
    assert {name for name, *_ in found["failed"]} == {
        "swa_extend_no_prefix_window_edges",
        "swa_extend_prefix_window_edges",
    }


def test_the_templates_backend_runs_as_it_is_rendered(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "attncore", "new-backend", "acme", str(tmp_path / "acme")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True,
    )  # fmt: skip
    here = provide(tmp_path / "info", "attn-acme", {"attncore.backends": "acme = attn_acme"})
    found = kit("attncore_acme", path=[tmp_path / "acme" / "src", here])
    assert found["ran"] == 42
    refused = [(name, why) for name, _, why in found["failed"]]  # its spec has no pages of one token
    assert [name for name, _ in refused] == ["mha_extend_page_size_1"] * 3, refused
    assert all(why.startswith("NoBackendError") and "block_size" in why for _, why in refused), refused


def test_a_broken_plugin_stops_no_other_backend(model, tmp_path):
    folder, expected = model
    (tmp_path / "attn_broken.py").write_text("raise SystemExit('a broken plugin')\n")
    here = provide(tmp_path / "info", "attn-broken", {"attncore.backends": "broken = attn_broken"})
    found, said = run("engine_of_sglang.py", str(folder), "attncore_reference", path=[tmp_path, here])
    assert found is not None, said[-3000:]
    assert found["tokens"] == expected
    found, said = run("engine_of_sglang.py", str(folder), "attncore_broken", path=[tmp_path, here])
    assert found is None
    assert "a broken plugin" in said, said[-3000:]


NARROW = """
import dataclasses
from attncore import hookimpl, reference

@hookimpl
def attncore_backend():
    return dataclasses.replace(reference.attncore_backend(), name="narrow", kv_cache_dtypes={"auto"})
"""


def test_what_the_backend_lacks_is_refused_at_start(model, tmp_path):
    (tmp_path / "attn_narrow.py").write_text(NARROW)
    here = provide(tmp_path / "info", "attn-narrow", {"attncore.backends": "narrow = attn_narrow"})
    words = (str(model[0]), "attncore_narrow", 'kv_cache_dtype="fp8_e4m3"')
    found, said = run("engine_of_sglang.py", *words, path=[tmp_path, here])
    assert found is None
    assert "NoBackendError" in said, said[-3000:]
    assert "kv_cache_dtype" in said, said[-3000:]


def test_another_version_of_sglang_is_refused_with_a_sentence(tmp_path):
    (tmp_path / "other_version.py").write_text("def plant():\n    import sglang\n\n    sglang.__version__ = '0.6.0'\n")
    here = provide(tmp_path / "info", "other", {"sglang.srt.plugins": "other = other_version:plant"})
    found = kit("attncore", path=[tmp_path, here])
    assert len(found["failed"]) == found["ran"]
    assert "SGLang 0.6.0 found; attncore's bridge is for SGLang 0.5.23" in found["failed"][0][2]
