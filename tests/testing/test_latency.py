"""The latency suite: adopted by two lines, over its shapes and over saved steps."""

import json

import pytest

from attncore.cli import main
from attncore.reference import ReferenceBackend, ReferenceImpl
from attncore.testing.engines import saved_steps, timed_steps
from attncore.testing.harness.subject import Subject

# Some releases of pytest-benchmark leave the file of --benchmark-json to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
FILE = 'from attncore.testing.latency import *\n\nBACKEND = "{name}"\n'
GROUPS = {"build", "plan", "commit", "forward"}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """pytest-benchmark times nothing in a worker of pytest-xdist; what these tests start is none."""
    for variable in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(variable, raising=False)


def run(tmp_path, text, *options):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    file = tmp_path / f"test_{tmp_path.name}.py"  # pytest imports a file only once a process, by its name
    file.write_text(text)
    fixed = ["-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path), "--import-mode=importlib"]
    return pytest.main([*fixed, "-p", "no:cacheprovider", *options, str(file)])


def test_build_plan_commit_and_forward_are_timed_apart(tmp_path):
    results = tmp_path / "results.json"
    options = ["--benchmark-json", str(results), "--benchmark-max-time=0.01", "--benchmark-min-rounds=2"]
    assert run(tmp_path, FILE.format(name="reference"), *options, "-k", "32") == 0
    found = json.loads(results.read_text())["benchmarks"]
    assert {one["group"] for one in found} == GROUPS
    assert {one["params"]["attncore_timed"] for one in found} == {"decode of 32"}
    for one in found:
        assert one["extra_info"]["tokens"] == 32
        assert one["extra_info"]["backend"] == "reference"
        assert one["stats"]["median"] > 0
        if one["group"] == "commit":  # on a CPU, by a copy within its memory
            assert one["extra_info"]["transport"] == "copy"


def test_saved_steps_are_replayed(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_steps, "MAX_STEPS", 3)
    saved = tmp_path / "steps.jsonl"
    assert (
        main(["replay", "--metadata-only", "--save-steps", str(saved), "--requests", "3", "--num-blocks", "400"]) == 0
    )
    block_size = json.loads(saved.read_text().partition("\n")[0])["block_size"]
    text = FILE.format(name="reference") + f"STEPS = {str(saved)!r}\nREQUEST = {{'block_size': {block_size}}}\n"
    results = tmp_path / "results.json"
    options = ["--benchmark-json", str(results), "--benchmark-max-time=0.01", "--benchmark-min-rounds=2"]
    assert run(tmp_path, text, *options, "-k", "saved") == 0
    found = {one["group"]: one for one in json.loads(results.read_text())["benchmarks"]}
    assert set(found) == GROUPS
    assert found["build"]["extra_info"]["steps"] == 3


def test_without_timing_every_shape_runs_once_and_missing_steps_are_a_skip(tmp_path, capsys):
    assert run(tmp_path, FILE.format(name="reference"), "--benchmark-disable", "-rs") == 0
    shown = capsys.readouterr().out
    assert "16 passed, 4 skipped" in shown, shown
    assert "unsupported: the test file sets no STEPS" in shown


def test_a_library_that_keeps_one_plan_is_timed(tmp_path, monkeypatch):
    """It refuses the layers of any other step (docs/contract.md), such as those of a step that was planned before."""
    last, forward = [], ReferenceImpl.forward

    def of_the_last(self, query, key, value, kv_cache, metadata, output=None):
        assert metadata is last[-1]
        return forward(self, query, key, value, kv_cache, metadata, output)

    monkeypatch.setattr(ReferenceBackend, "plan", lambda self, metadata: last.append(metadata))
    monkeypatch.setattr(ReferenceImpl, "forward", of_the_last)
    sequence = {"query_len": 5, "context_len": 0, "block_table": [1]}
    steps = [[{"is_prompt": True, "sequences": [{"seq_id": i, **sequence}]}] for i in range(2)]
    saved = tmp_path / "steps.jsonl"
    saved.write_text("".join(json.dumps({"block_size": 16, "groups": groups}) + "\n" for groups in steps))
    assert run(tmp_path, FILE.format(name="reference") + f"STEPS = {str(saved)!r}\n", "--benchmark-disable") == 0


def test_saved_steps_with_encoders(tmp_path):
    """A prompt that brings its encoder's tokens beside a decode that reads them; the decoder's own layers are timed."""
    saved = tmp_path / "steps.jsonl"
    rows = [(True, 5, 0, [1, 2], 9, [7, 8, 9]), (False, 1, 6, [3, 4], 6, [5, 6])]
    groups = [
        {"is_prompt": prompt, "encoder_seq_len": encoder, "cross_block_table": cross,
         "sequences": [{"seq_id": i, "query_len": query, "context_len": context, "block_table": table}]}
        for i, (prompt, query, context, table, encoder, cross) in enumerate(rows)
    ]  # fmt: skip
    saved.write_text(json.dumps({"block_size": 4, "chunked_prefill": True, "groups": groups}) + "\n")
    text = FILE.format(name="reference") + f"STEPS = {str(saved)!r}\nREQUEST = {{'block_size': 4}}\n"
    results = tmp_path / "results.json"
    options = ["--benchmark-json", str(results), "--benchmark-max-time=0.01", "--benchmark-min-rounds=2"]
    assert run(tmp_path, text, *options, "-k", "saved") == 0
    found = {one["group"]: one for one in json.loads(results.read_text())["benchmarks"]}
    assert set(found) == GROUPS
    assert found["forward"]["extra_info"]["tokens"] == 6


def test_a_step_is_the_same_each_time_it_is_timed():
    timed = timed_steps.Timed(Subject("reference"), "chunk of 128 beside 16 decodes", timed_steps.REQUEST, None)
    for _ in range(3):
        timed.reset()
        for step in (timed.builds[0](), timed.sends[0]()):
            assert (step.num_prefills, step.num_decodes, step.num_tokens) == (1, 16, 144)
            assert sorted(step.host.seq_lens.tolist()) == sorted([640, *(32 * i + 1 for i in range(1, 17))])
