"""What a release is made by: workflows, the list of wheels, the addresses in the metadata, and the tag."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import attncore

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ADDRESS = "https://github.example.org/somebody/attncore"


def script(name):
    return runpy.run_path(str(ROOT / ".ci" / f"{name}.py"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_actions_are_pinned_by_commit_with_their_version_beside(file):
    uses = re.findall(r"uses: (.*)", file.read_text())
    assert uses
    for one in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one), one


def test_an_action_is_the_same_commit_everywhere():
    pins = {}
    for file in WORKFLOWS:
        for name, commit in re.findall(r"uses: ([\w/-]+)@(\w+)", file.read_text()):
            assert pins.setdefault(name, commit) == commit, (file, name)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_what_a_workflow_runs_is_there(file):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets -= {"docs"}  # the site's
    text = file.read_text()
    assert set(re.findall(r"run: make ([\w-]+)", text)) - {"docs"} <= targets
    for name in re.findall(r"(?:\.ci|tests|requirements)/[\w.]+", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_job_may_read_and_no_more_unless_it_says_so(file):
    text = file.read_text()
    assert "\npermissions:\n  contents: read\n" in text
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")


def test_where_the_api_is_checked_the_tags_are_there():
    """A shallow clone has no tag, and the check would have nothing to compare with."""
    for file in WORKFLOWS:
        for job in re.split(r"\n  (?=\w+:\n)", file.read_text().partition("\njobs:")[2]):
            if "api_check" in job or ".ci/run" in job:
                assert "fetch-depth: 0" in job, (file, job)


def selects(machine):
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    return any(fnmatch(machine, one) for one in wanted["build"].split()) and not any(
        fnmatch(machine, one) for one in wanted["skip"].split()
    )


@pytest.mark.parametrize("platform", ["manylinux_x86_64", "musllinux_aarch64", "macosx_arm64"])
def test_the_wheels_of_a_release(platform):
    """No free-threaded ones, for ``import attncore`` refuses an interpreter without the GIL (test_processes.py)."""
    built = [
        f"{python}-{platform}" for python in ("cp310", "cp311", "cp312", "cp313", "cp313t", "cp314", "cp314t", "pp311")
    ]
    assert [one.partition("-")[0] for one in built if selects(one)] == ["cp311", "cp312", "cp313", "cp314"]


@pytest.fixture
def tree(tmp_path):
    """What a release of attncore and of one plugin is built from."""
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    hidden = shutil.ignore_patterns("*.so", "_slots.c", "__pycache__")
    shutil.copytree(ROOT / "attncore", tmp_path / "attncore", ignore=hidden)
    shutil.copytree(ROOT / "plugins" / "attn-flash", tmp_path / "plugins" / "attn-flash", ignore=hidden)
    return tmp_path


def metadata(folder, backend, monkeypatch):
    """METADATA of the wheel of ``folder``, by the hook that pip calls for it."""
    monkeypatch.setenv("ATTNCORE_NO_EXT", "1")
    out = folder / "out"
    out.mkdir()
    program = f"from {backend} import build_wheel; build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    listed = subprocess.run(
        [sys.executable, "-c", UNPACKED, str(wheel)], check=True, capture_output=True, text=True
    )  # a zip has its files in any order
    return listed.stdout


UNPACKED = """
import sys, zipfile
archive = zipfile.ZipFile(sys.argv[1])
print(*(archive.read(name).decode() for name in archive.namelist() if name.endswith(".dist-info/METADATA")))
"""


def test_the_source_distribution_is_the_package_without_what_a_build_makes(tree, monkeypatch):
    monkeypatch.setenv("ATTNCORE_NO_EXT", "1")
    (tree / "tests").mkdir()
    (tree / "tests" / "test_one.py").touch()
    (tree / "attncore" / "_slots.c").touch()
    program = "from setuptools.build_meta import build_sdist; build_sdist('out')"
    subprocess.run([sys.executable, "-c", program], cwd=tree, check=True, capture_output=True)
    (packed,) = (tree / "out").glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files", "attncore"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert set(listed.stdout.split()) - found == set()
    assert {"setup.py", "LICENSE", "README.md"} <= found
    assert not [name for name in found if name.startswith("tests/") or name.endswith((".c", ".so"))]


def test_a_wheel_built_after_it_has_the_addresses(tree, monkeypatch):
    assert "Project-URL" not in (ROOT / "pyproject.toml").read_text()
    script("project_urls")["main"]([ADDRESS, tree], {"DOCUMENTATION_URL": "https://docs.example.org/attncore/"})
    for folder, backend in ((tree, "setuptools.build_meta"), (tree / "plugins" / "attn-flash", "hatchling.build")):
        found = dict(re.findall(r"^Project-URL: (\w+), (.*)$", metadata(folder, backend, monkeypatch), re.MULTILINE))
        assert found == {
            "Homepage": ADDRESS,
            "Source": ADDRESS,
            "Documentation": "https://docs.example.org/attncore",
            "Changelog": f"{ADDRESS}/blob/HEAD/CHANGELOG.md",
            "Issues": f"{ADDRESS}/issues",
        }


def test_the_address_is_the_repositorys_that_runs_it(tree):
    urls = script("project_urls")
    environ = {"GITHUB_SERVER_URL": "https://github.example.org", "GITHUB_REPOSITORY": "somebody/attncore"}
    assert urls["repository_of"](environ) == ADDRESS
    urls["main"]([ADDRESS, tree], {"DOCUMENTATION_URL": ""})
    written = tomllib.loads((tree / "plugins" / "attn-flash" / "pyproject.toml").read_text())["project"]["urls"]
    assert written["Documentation"] == f"{ADDRESS}/tree/HEAD/docs"
    with pytest.raises(SystemExit, match=r"has \[project\.urls\] already"):
        urls["main"]([ADDRESS, tree], {})


@pytest.mark.parametrize("address", ["github.com/a/b", 'https://x.org/a"\nb', "https://x.org", "https://x.org/a b"])
def test_what_is_no_address_is_not_written(tree, address):
    before = (tree / "pyproject.toml").read_text()
    with pytest.raises(SystemExit, match="is no address"):
        script("project_urls")["main"]([address, tree], {})
    assert (tree / "pyproject.toml").read_text() == before


def test_without_an_address_it_says_what_to_give(tree):
    with pytest.raises(SystemExit, match="give the address"):
        script("project_urls")["main"]([], {})


def test_the_sources_name_no_address():
    for file in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
        assert "urls" not in tomllib.loads(file.read_text())["project"]


@pytest.mark.parametrize(
    ("tag", "changelog", "count"),
    [
        ("v0.2.0", "# C\n\n## [0.2.0] - 2026-12-01\n\n## [0.1.0] - 2026-11-30\n", 0),
        ("v0.2.1", "## [0.2.0] - 2026-12-01\n", 1),
        ("0.2.0", "## [0.2.0] - 2026-12-01\n", 1),
        ("v0.2.0", "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n", 1),
        ("v0.2.0", "## [0.2.0]\n", 1),
        ("v9", "", 2),
    ],
)
def test_a_tag_is_the_version_and_the_changelog_begins_with_it(tag, changelog, count):
    assert len(list(script("is_release")["faults"](tag, "0.2.0", changelog))) == count


def test_this_tree_is_no_release_of_another_version(capsys):
    assert script("is_release")["main"]("v99.0.0") == 1
    assert f"attncore/_version.py says {attncore.__version__}" in capsys.readouterr().out
