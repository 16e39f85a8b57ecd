"""The commands that attncore prints for what is not installed: they work for this copy of it, as they stand."""

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from attncore import how_to_install
from attncore.how_to_install import (
    compile_extension,
    install_distribution,
    install_extra,
    install_required,
    missing_module,
)
from attncore.registry.plugins.known_backends import KNOWN

ROOT = Path(__file__).parents[1]


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Make attncore's module and metadata those of an installation from ``direct_url``; None: it has no metadata."""

    def plant(direct_url, *, metadata=True):
        packages = tmp_path / "site-packages"
        info = packages / "attncore-0.1.0.dist-info"
        info.mkdir(parents=True)
        if metadata:
            extras = 'Requires-Dist: numba>=0.60; extra == "numba"\nRequires-Dist: pluggy>=1.5\n'
            extras += 'Requires-Dist: attncore[numba]; extra == "test"\nRequires-Dist: pytest<9,>=8; extra == "test"\n'
            (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: attncore\nVersion: 0.1.0\n{extras}")
        if direct_url is not None:
            (info / "direct_url.json").write_text(direct_url)

        def found(name):
            if not metadata:
                raise importlib.metadata.PackageNotFoundError(name)
            return importlib.metadata.PathDistribution(info)

        monkeypatch.setattr(importlib.metadata, "distribution", found)
        monkeypatch.setattr(how_to_install, "_HERE", packages)
        how_to_install._origin.cache_clear()
        return packages

    yield plant
    how_to_install._origin.cache_clear()


def checkout(folder):
    (folder / "plugins" / "attn-flash").mkdir(parents=True)
    return folder


def test_an_extra_is_what_it_requires(installed):
    installed(None)
    assert install_extra("numba") == "pip install 'numba>=0.60'"
    assert install_extra("test") == "pip install 'numba>=0.60' 'pytest<9,>=8'"


def test_an_extra_that_the_metadata_are_too_old_for(installed):
    here = checkout(installed(None))
    assert install_extra("completion") == f"pip install -e '{here}[completion]'"


def test_a_checkout_on_the_path_is_installed_first(installed):
    here = checkout(installed(None, metadata=False))
    assert shlex.split(install_extra("numba")) == ["pip", "install", "-e", f"{here}[numba]"]
    assert f"'{here}[numba]'" in install_extra("numba")  # a bare [ is a pattern to zsh
    assert install_distribution("attn-flash") == f"pip install -e {here} {here}/plugins/attn-flash"
    assert install_distribution("attncore") == f"pip install -e {here}"


@pytest.mark.parametrize("editable", [False, True])
def test_a_plugin_comes_from_the_checkout_that_attncore_came_from(installed, tmp_path, editable):
    source = checkout(tmp_path / "a checkout")
    installed(json.dumps({"url": source.as_uri(), "dir_info": {"editable": editable}}))
    assert install_distribution("attn-flash") == f"pip install '{source}/plugins/attn-flash'"


def test_a_checkout_that_is_gone_is_not_named_as_one(installed, tmp_path):
    url = (tmp_path / "gone").as_uri()
    installed(json.dumps({"url": url, "dir_info": {}}))
    assert install_distribution("attn-flash") == f"install attn-flash from where attncore came from, {url}"


@pytest.mark.parametrize("direct_url", [None, "", "no JSON", "[]", "{}"])
def test_what_came_from_an_index_names_that_of_the_plugin(installed, direct_url):
    installed(direct_url)
    assert install_distribution("attn-flash") == "pip install attn-flash"


def test_a_wheels_plugins_are_not_said_to_be_in_an_index(installed):
    url = "https://example.org/attncore-0.1.0-py3-none-any.whl"
    installed(json.dumps({"url": url, "archive_info": {}}))
    assert install_distribution("attn-flash") == f"install attn-flash from where attncore came from, {url}"


@pytest.mark.parametrize("extra", ["torch", "numba", "transformers", "test"])
def test_every_extra_of_this_installation_is_a_list_of_requirements(extra):
    for text in shlex.split(install_extra(extra))[2:]:
        assert "attncore" not in Requirement(text).name


def test_a_known_backends_command_names_a_folder_that_is_there():
    for known in KNOWN.values():
        assert Path(shlex.split(install_distribution(known.distribution))[-1], "pyproject.toml").is_file()


def test_a_missing_extension_in_a_source_tree_is_told_from_one_in_an_installation(installed):
    here = installed(None)
    assert compile_extension().startswith("install a C compiler and then attncore again")
    (here / "setup.py").touch()
    assert compile_extension().startswith(f"this attncore is the source tree {here}, ")
    assert f"pip install -e {here}, or, where attncore is installed, start Python in another" in compile_extension()


def test_nothing_says_to_install_ours_by_name():
    """Nothing here is published: in an index the names are nobody's, or a stranger's."""
    by_name = re.compile(r"""pip install [^\n#"]*?(?<![\w/.-])'?(attncore|attn-(flash|flashinfer|rocm))\b(?!/)""")
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for folder in ("attncore", "plugins", "examples", "benchmarks"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".txt", ".toml")]
    found = [f"{path}: {line}" for path in files for line in path.read_text().splitlines() if by_name.search(line)]
    assert not found, "\n".join(found)


def test_what_attncore_requires_itself(installed, monkeypatch):
    installed(None)
    assert install_required("pluggy") == "pip install 'pluggy>=1.5'"
    assert [install_required(name) for name in ("numba", "pytest", "plug", "", None)] == [""] * 5

    def absent(name, *_):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(how_to_install, "distribution", absent)
    assert install_required("pluggy") == ""
    monkeypatch.setattr(how_to_install, "_HERE", ROOT)
    assert install_required("rich") == "pip install 'rich>=13'"


def test_what_is_installed_is_not_asked_for_again(installed, monkeypatch):
    installed(None)
    found = {"numba": "0.61.0", "pytest": "7.0"}
    monkeypatch.setattr(how_to_install, "installed_version", found.__getitem__)
    assert install_extra("test") == "pip install 'pytest<9,>=8'"
    found["pytest"] = "8.1"  # all are there, and something else is wrong: none is left out
    assert install_extra("test") == "pip install 'numba>=0.60' 'pytest<9,>=8'"


def test_a_missing_module_is_said_in_one_way(installed):
    installed(None)
    command = "pip install 'numba>=0.60'"
    assert missing_module(ModuleNotFoundError("No module named 'x'", name="x"), "numba") == (
        f"x is not installed: {command}"
    )
    part = ModuleNotFoundError("No module named 'x.y'", name="x.y")  # of an x that is installed
    assert missing_module(part, "numba") == f"No module named 'x.y': {command}"
    private = ModuleNotFoundError("No module named '_pytest'", name="_pytest")
    assert missing_module(private, "numba") == f"pytest is not installed: {command}"
    assert missing_module(ImportError("libx.so is damaged"), "numba") == f"libx.so is damaged: {command}"


@pytest.mark.parametrize("lacking", ["torch", "transformers"])
@pytest.mark.parametrize("imported", ["attncore.integrations.transformers", "engine"])
def test_models_without_their_libraries_say_what_to_install(lacking, imported):
    program = (
        f"import sys; sys.modules[{lacking!r}] = None; sys.path.insert(0, 'examples')\n"
        f"try:\n    import {imported}\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"attncore.integrations.transformers: {lacking} is not installed: pip install ")
