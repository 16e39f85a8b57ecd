"""One file says the version of attncore and of its plugins; plugins and cores of other versions are told apart."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import attncore

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(folder.parent for folder in ROOT.glob("plugins/*/pyproject.toml"))
SPEAKS = """
import sys
from attncore.registry.plugins import load
from attncore.registry.spec import backend_spec
load.ATTNCORE_API = backend_spec.ATTNCORE_API = {contract}
from attncore.cli import main
sys.exit(main(["list", "--json"]))
"""


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())


def backend(folder, hook, *arguments):
    """What pip calls to build ``folder``: the name of the file that it made."""
    program = f"import hatchling.build as it; print(it.{hook}(*{arguments!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_plugin_has_the_version_of_the_core_also_from_its_sources_alone(folder, tmp_path):
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    packed = tmp_path / backend(folder, "build_sdist", str(tmp_path))
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    wheel = backend(tmp_path / packed.name.removesuffix(".tar.gz"), "build_wheel", str(tmp_path))
    assert wheel == f"{folder.name.replace('-', '_')}-{attncore.__version__}-py3-none-any.whl"


def test_no_other_file_has_a_version():
    for folder in (ROOT, *PLUGINS):
        found = project(folder)
        assert "version" not in found["project"]
        assert found["project"]["dynamic"] == ["version"]
    assert project(ROOT)["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "attncore._version.__version__"}
    for folder in PLUGINS:
        named = folder / project(folder)["tool"]["hatch"]["version"]["path"]
        assert named.resolve() == ROOT / "attncore" / "_version.py"


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_plugin_takes_this_core_and_none_of_the_next_major_version(folder):
    """What pip refuses: the contract may change with the major version alone."""
    (needs,) = (Requirement(one) for one in project(folder)["project"]["dependencies"] if one.startswith("attncore"))
    here = Version(attncore.__version__)
    assert needs.specifier.contains(here, prereleases=True)
    assert needs.specifier.contains(f"{here.major}.{here.minor + 1}.0")
    assert not needs.specifier.contains(f"{here.major + 1}.0.0", prereleases=True)


def rows(program, *path):
    """What ``attncore list --json`` prints of each backend where the core is changed by ``program``."""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(one) for one in path]!r}\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {one["name"]: one for one in json.loads(done.stdout)}


def plugin_of_contract(contract, version, folder):
    """attn-rocm as an installation whose spec names another contract."""
    shutil.copytree(ROOT / "plugins" / "attn-rocm" / "src" / "attn_rocm", folder / "attn_rocm")
    spec = folder / "attn_rocm" / "spec.py"
    text, count = re.subn(r"\bapi=\d+", f"api={contract}", spec.read_text())
    assert count == 1
    spec.write_text(text)
    info = folder / f"attn_rocm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: attn-rocm\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[attncore.backends]\nrocm = attn_rocm\n")


@pytest.mark.parametrize(("contract", "version", "fix"), [(0, "0.0.1", "attn-rocm>0.0.1"), (2, "2.0.0", "attn-rocm<2")])
def test_a_plugin_of_another_contract_is_a_row_that_says_which_to_install(tmp_path, contract, version, fix):
    plugin_of_contract(contract, version, tmp_path)
    found = rows(SPEAKS.format(contract=1), tmp_path)["rocm"]
    assert found["state"] == "incompatible"
    (reason,) = found["reasons"]
    assert f"built for contract {contract}; this attncore speaks 1" in json.dumps(reason)
    assert fix in json.dumps(reason)


@pytest.mark.parametrize("contract", [0, 2])
def test_the_plugins_of_here_say_so_to_a_core_of_another_contract(contract, tmp_path):
    plugin_of_contract(1, attncore.__version__, tmp_path)
    found = rows(SPEAKS.format(contract=contract), tmp_path)["rocm"]
    assert found["state"] == "incompatible"
    assert f"built for contract 1; this attncore speaks {contract}" in json.dumps(found["reasons"])


def test_a_plugin_of_an_older_release_of_the_same_contract_loads(tmp_path):
    plugin_of_contract(1, "0.0.1", tmp_path)
    found = rows(SPEAKS.format(contract=1), tmp_path)["rocm"]
    assert (found["state"], found["version"]) == ("loaded", "0.0.1")


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_spec_states_the_contract_that_it_was_written_for(folder):
    """A number, not the core's own constant: that would fit every core."""
    sources = [path.read_text() for path in (folder / "src").rglob("*.py")]
    assert sum(len(re.findall(r"\bapi=\d+,", text)) for text in sources) == 1
    assert not [text for text in sources if "ATTNCORE_API" in text]


def test_the_changelog_begins_with_this_version():
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first
    assert first[1].strip("[]") in (attncore.__version__, "Unreleased")
