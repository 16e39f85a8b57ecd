"""What `attncore new-backend` writes works as it stands: found, chosen, verified, and through the kit."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from clean_venv import borrow, clean_venv, in_venv, sources
from planting import Site, site

from attncore.cli import COMMANDS, _parser, main
from attncore.cli.new_backend import TEMPLATE
from attncore.testing.harness.run_suite import conformance

__all__ = ["site"]


@pytest.fixture
def rendered(tmp_path_factory, capsys):
    """The repository of the backend acme-x, just written."""
    directory = tmp_path_factory.mktemp("repository") / "acme"
    assert main(["new-backend", "acme-x", str(directory)]) == 0
    capsys.readouterr()
    return directory


def test_its_own_code_is_under_150_lines(rendered):
    lines = [line for file in (rendered / "src").rglob("*.py") for line in file.read_text().splitlines()]
    assert 50 < len(lines) < 150
    assert len((rendered / "tests" / "test_conformance.py").read_text().split("\n\n")) == 2
    assert not [line for line in lines if "attncore.reference" in line or "attncore.reference.causal" in line]


def test_nothing_is_left_to_fill_in(rendered):
    files = [path for path in rendered.rglob("*") if path.is_file()]
    assert len(files) == len(list(TEMPLATE.rglob("*.txt")))
    for file in files:
        assert not re.search(r"\{\{\w*\}\}", file.read_text())  # ${{ github.ref }} is the workflow's
        assert "PACKAGE" not in str(file)


def test_the_readme_names_the_example_in_the_section_that_goes(rendered):
    """And in the line of the checklist that finds what is left of it."""
    parts = re.split(r"^## ", (rendered / "README.md").read_text(), flags=re.MULTILINE)
    (section,) = (part for part in parts if "take this section out" in part)
    for word in ("scores", "float64", "new-backend", "slowly"):
        lines = [line for part in parts if part is not section for line in part.splitlines() if word in line]
        assert all("grep" in line for line in lines), lines
    assert not re.search("scores|float64", (rendered / ".github/workflows/ci.yml").read_text())


@pytest.fixture
def installed(rendered, site: Site):
    """The repository, installed."""
    for source in (rendered / "src" / "attn_acme_x").iterdir():
        target = site.folder / "attn_acme_x" / source.name
        target.parent.mkdir(exist_ok=True)
        target.write_text(source.read_text())
    site.plugin("acme-x", "", module="unused", version="0.1.0")
    info = site.folder / "attn_acme_x-0.1.0.dist-info"
    (info / "entry_points.txt").write_text("[attncore.backends]\nacme-x = attn_acme_x\n")
    site.modules |= {"attn_acme_x", "attn_acme_x.backend"}
    return rendered


def commands(text):
    """The lines that the steps of a workflow run."""
    for step in re.findall(r"^ *(?:- )?run: (\|\n(?: {10,}.*\n)+|.*\n)", text, re.MULTILINE):
        yield from (line.partition(" #")[0].strip() for line in step.removeprefix("|\n").splitlines())


def test_the_workflow_is_yaml_and_publishes_only_what_was_tested(rendered):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    flow = yaml.safe_load((rendered / ".github/workflows/ci.yml").read_text())
    jobs = flow["jobs"]
    assert flow[True] == {"push": {"branches": ["main"], "tags": ["v*"]}, "pull_request": None}  # YAML reads on as true
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "lint": None, "test": None, "kit": "test", "build": ["lint", "test"], "publish": ["build", "kit"],
    }  # fmt: skip
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert flow["permissions"] == {"contents": "read"}
    project = (rendered / "pyproject.toml").read_text()
    versions = jobs["test"]["strategy"]["matrix"]["attncore"]
    words = r"\$\{\{ fromJSON\(vars\.ATTNCORE && format\('\[\{0\}\]', toJSON\(vars\.ATTNCORE\)\) \|\| '(.*)'\) \}\}"
    (listed,) = re.fullmatch(words, versions).groups()
    oldest, newest = json.loads(listed)
    assert re.fullmatch(r"attncore==(\d+\.\d+)\.0", oldest)[1] in newest
    (installs,) = (step for step in jobs["test"]["steps"] if "pip install" in step.get("run", ""))
    assert installs["env"] == {"ATTNCORE": "${{ matrix.attncore }}"}  # no row tests another version than it says
    assert f'dependencies = ["{newest}", ' in project
    oldest = jobs["test"]["strategy"]["matrix"]["python"][0]
    assert f'requires-python = ">={oldest}"' in project


def test_the_workflow_and_the_readme_run_commands_that_exist(rendered):
    text = (rendered / ".github/workflows/ci.yml").read_text()
    consoles = re.findall(r"```console\n(.*?)```", (rendered / "README.md").read_text(), re.DOTALL)
    lines = [*commands(text), *(line.partition(" #")[0] for part in consoles for line in part.splitlines())]
    assert len(lines) > 20
    assert {"ruff check .", "pytest", "python -m build", "twine check --strict dist/*"} <= set(lines)
    assert sum("attncore.testing.badge" in line for line in lines) == 2
    for line in lines:
        words = shlex.split(line.partition(" >")[0])
        words[0] = words[0].removeprefix("clean/bin/")
        if words[0] == "attncore":
            assert words[1] in COMMANDS, line
            _parser(words[1]).parse_args(words[2:])
        elif words[:2] == ["python", "-m"] and words[2].startswith("attncore"):
            assert importlib.util.find_spec(words[2]), line
        else:
            assert words[0] in {"python", "pip", "pytest", "ruff", "twine", "git"}, line


@pytest.mark.parametrize("name", ["acme-x", "a" * 64, "a"])
def test_what_is_written_is_formatted_and_without_findings(tmp_path, name):
    if not importlib.util.find_spec("ruff"):
        pytest.skip("ruff is not installed")
    assert main(["new-backend", name, str(tmp_path)]) == 0
    for words in (["check", "."], ["format", "--check", "."]):
        done = subprocess.run([sys.executable, "-m", "ruff", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_its_option_is_checked_and_passes_the_kit(installed):
    import attncore

    fields = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float32", "backend": "acme-x"}
    choice = attncore.select(**fields)
    with pytest.raises(ValueError, match=r"^options: 'scores': 'float8' is not one of 'float32', 'float64'"):
        choice.create(options={"scores": "float8"})
    text = (installed / "tests/test_conformance_float64.py").read_text()
    (given,) = re.findall(r"^OPTIONS = (.*)$", text, re.MULTILINE)
    assert dict(choice.create(options=eval(given)).config.options) == eval(given)
    code, report = conformance("acme-x", settings=f"EXAMPLES = 3\nOPTIONS = {given}\n", options=("-p", "no:terminal"))
    assert (code, report.failures) == (0, [])


def test_the_latency_test_runs_each_part_once(installed, site: Site):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site.folder), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_latency.py"]
    done = subprocess.run(words, cwd=installed, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d\d passed", done.stdout.splitlines()[-1]), done.stdout


def test_a_profiling_run_writes_no_block_of_a_request_and_needs_no_cache(installed):
    torch = pytest.importorskip("torch")
    import attncore

    fields = {"num_heads": 2, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "backend": "acme-x"}
    backend = attncore.select(**fields, block_size=4).create()
    batch = attncore.InputBatch(max_num_reqs=2, max_model_len=8, block_size=4)
    builder = attncore.MetadataBuilder(batch, backend, max_num_batched_tokens=8)
    cache = torch.zeros(backend.kv_cache_shape(3, 4, 2, 8))
    tensors = (torch.ones(3, 2, 8) for _ in range(3))
    backend.impl("layers.0", scale=1.0).forward(*tensors, cache, builder.build_profile([3]))
    assert not cache[:2].any()
    query = torch.ones(3, 2, 8)
    answer = backend.impl("layers.1", scale=1.0).forward(query, query, query, None, builder.build_profile([3]))
    torch.testing.assert_close(answer, query)


WRONG_STEPS = {
    "query without its last token": ("query", lambda step: step.query[1:]),
    "query of other heads": ("query", lambda step: step.query[:, 1:]),
    "query of another size": ("query", lambda step: step.query[..., 1:]),
    "query of another dtype": ("query", lambda step: step.query.double()),
    "no query": ("query", lambda step: None),
    "keys without the last token": ("key", lambda step: step.key[1:]),
    "keys of other heads": ("key", lambda step: step.key[:, 1:]),
    "keys of another dtype": ("key", lambda step: step.key.double()),
    "keys of another device": ("key", lambda step: step.key.to("meta")),
    "no keys": ("key", lambda step: None),
    "values of another size": ("value", lambda step: step.value[..., 1:]),
    "values of another dtype": ("value", lambda step: step.value.half()),
    "sparse values": ("value", lambda step: step.value.to_sparse()),
    "a cache of another block size": ("kv_cache", lambda step: step.kv_cache[..., 1:, :, :]),
    "a cache of another dtype": ("kv_cache", lambda step: step.kv_cache.half()),
    "a cache that is too small": ("kv_cache", lambda step: step.small_cache),
    "no cache": ("kv_cache", lambda step: None),
    "an output that is too small": ("output", lambda step: step.query[1:].clone()),
    "an output of another dtype": ("output", lambda step: step.query.double()),
    "an output whose rows are one": ("output", lambda step: step.query[:1].expand(3, -1, -1)),
    "a cache as metadata": ("metadata", lambda step: step.kv_cache),
    "a flag that is none": ("write", lambda step: "no"),
}


@pytest.mark.parametrize("backend", ["acme-x", "reference"])
def test_a_step_that_does_not_fit_is_refused_as_by_reference_and_writes_nothing(installed, backend):
    torch = pytest.importorskip("torch")
    import attncore

    fields = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "backend": backend}
    made = attncore.select(**fields, block_size=4).create()
    batch = attncore.InputBatch(max_num_reqs=2, max_model_len=8, block_size=4)
    builder = attncore.MetadataBuilder(batch, made, max_num_batched_tokens=8)
    batch.add_request("a", block_ids=[2], num_computed_tokens=0)
    step = SimpleNamespace(
        query=torch.ones(3, 4, 8), key=torch.ones(3, 2, 8), value=torch.ones(3, 2, 8),
        kv_cache=made.allocate_kv_cache(3), small_cache=made.allocate_kv_cache(2), metadata=builder.build({"a": 3}),
    )  # fmt: skip
    layer = made.impl("layers.0", scale=1.0)
    right = {name: getattr(step, name) for name in ("query", "key", "value", "kv_cache", "metadata")}
    for what, (name, change) in WRONG_STEPS.items():
        with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
            layer.forward(**{**right, name: change(step)})
        assert not step.kv_cache.any(), what
        assert not step.small_cache.any(), what
    layer.forward(**right)
    layer.forward(**{**right, "key": None, "value": None}, write=False)
    layer.forward(**{**right, "key": step.query.double(), "value": step.query[:1]}, write=False)  # they are not read


def test_it_is_found_chosen_and_passes_the_kit(installed, capsys):
    assert main(["explain", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert (chosen["name"], chosen["block_size"]) == ("acme-x", 16)
    code, report = conformance("acme-x", settings="EXAMPLES = 6\n", options=("-p", "no:terminal"))
    assert (code, report.failures) == (0, [])
    states = {row["capability"]: row["state"] for row in report.rows()}
    assert states["sliding_window"] == states["logits_soft_cap"] == states["NaN canary"] == "supported"
    assert states["sinks"] == "unsupported"


@pytest.mark.slow
def test_its_wheel_works_beside_attncores_wheel_in_a_clean_environment(rendered, tmp_path):
    """Builds both wheels, installs them in a new environment, which sees this one's torch and pytest behind them."""
    source = sources(tmp_path / "source")
    wheels = tmp_path / "wheels"
    pip = ("-m", "pip", "--disable-pip-version-check")
    for project in (source, rendered):
        in_venv(
            sys.executable,
            *pip,
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            wheels,
            project,
            cwd=tmp_path,
        )
    assert len(list(wheels.iterdir())) == 2

    python = clean_venv(tmp_path / "venv")
    in_venv(python, *pip, "install", "-q", "--no-deps", "--no-index", *wheels.iterdir(), cwd=tmp_path)
    packages = borrow(python)

    where = in_venv(
        python, "-c", "import attncore, attn_acme_x as x; print(attncore.__file__, x.__file__)", cwd=tmp_path
    )
    assert all(Path(path).is_relative_to(packages) for path in where.split())
    attncore = str(python.with_name("attncore"))
    again = json.loads(in_venv(attncore, "new-backend", "acme-y", tmp_path / "again", "--json", cwd=tmp_path))
    assert ".github/workflows/ci.yml" in again["files"]  # the wheel has all of the template
    rows = {row["name"]: row for row in json.loads(in_venv(attncore, "list", "--json", cwd=tmp_path))}
    assert (rows["acme-x"]["state"], rows["acme-x"]["distribution"]) == ("loaded", "attn-acme-x")
    explained = json.loads(in_venv(attncore, "explain", "--assume", "cpu", "--json", cwd=tmp_path))
    assert explained["chosen"]["name"] == "acme-x"
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    (verdict,) = json.loads(in_venv(attncore, "verify", "acme-x", "--json", cwd=tmp_path, **cache))
    assert verdict["state"] == "agrees"
    words = ("bench", "acme-x", "--json", "--passes", "3", "--seconds", "0.001")
    timed = json.loads(in_venv(attncore, *words, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path)))
    assert (timed["backend"], timed["compared_with"], len(timed["rows"])) == ("acme-x", [], 16)
    assert "| NaN canary | supported |" in in_venv(python, "-m", "pytest", cwd=rendered)
    table = json.loads(in_venv(python, "-m", "attncore.testing", "acme-x", "--json", "--examples", "5", cwd=tmp_path))
    assert (table["distribution"], table["failures"]) == ("attn-acme-x", [])
    (tmp_path / "kit.json").write_text(json.dumps(table))
    row = in_venv(python, "-m", "attncore.testing.badge", "kit.json", "--svg", "badge.svg", cwd=tmp_path)
    assert "| acme-x | attn-acme-x 0.1.0 |" in row
    assert " 0 failed" not in (badge := (tmp_path / "badge.svg").read_text())
    assert "supported</text>" in badge


def test_the_workflow_publishes_by_the_pinned_action_of_this_repository(rendered):
    """What is handed a token of the index is named by its hash, for a tag may be moved."""
    ours = Path(__file__).parents[1] / ".github/workflows/wheels.yml"
    used = [
        re.findall(r"pypa/gh-action-pypi-publish@[0-9a-f]{40} # v\S+", file.read_text())
        for file in (ours, rendered / ".github/workflows/ci.yml")
    ]
    assert used[0] == used[1] != []
