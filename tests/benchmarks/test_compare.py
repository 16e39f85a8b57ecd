"""The comparison of two revisions and the timing of peers, on results that were made up."""

import importlib.util
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
TRUE = {"a::small": 8e-7, "a::lists": 1.5e-4, "b::whole": 2e-2}


def loaded(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{Path(name).stem}", FOLDER / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compare = loaded("compare.py")
timing = loaded("peers/timing.py")


@pytest.fixture
def judged(tmp_path, capsys):
    """Runs of made-up medians judged: the exit code and what was printed."""

    def judge(old, new, *options):
        words = ["judge"]
        for side, runs in (("old", old), ("new", new)):
            words.append(f"--{side}")
            for turn, run in enumerate(runs):
                path = tmp_path / f"{side}{turn}.json"
                found = [{"fullname": name, "stats": {"median": median}} for name, median in run.items()]
                path.write_text(json.dumps({"benchmarks": found}))
                words.append(str(path))
        code = compare.main([*words, *options])
        return code, capsys.readouterr().out

    return judge


def runs(turns=4, noise=0.0, seed=0, **factors):
    """``turns`` runs; each is slower than the truth by up to ``noise``, as a whole and benchmark by benchmark."""
    rng = random.Random(seed)
    made = []
    for _ in range(turns):
        whole = 1 + noise * rng.random()
        made.append(
            {
                name: median * factors.get(name.partition("::")[2], 1) * whole * (1 + noise * rng.random())
                for name, median in TRUE.items()
            }
        )
    return made


def test_equal_runs_pass(judged):
    code, out = judged(runs(), runs())
    assert code == 0
    assert "3 compared, 0 slower by more than 10 %" in out


def test_a_planted_regression_fails_and_is_named(judged):
    code, out = judged(runs(), runs(lists=1.12))
    assert code == 1
    assert [line for line in out.splitlines() if "SLOWER" in line] == [
        f"{1.12:>18.3f} {1.12:>6.3f} {150:>12.3f} {168:>12.3f}  a::lists SLOWER"
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_regression_is_found_in_the_noise_and_noise_alone_is_none(judged, seed):
    assert judged(runs(noise=0.1, seed=seed), runs(noise=0.1, seed=seed + 100, lists=1.4))[0] == 1
    assert judged(runs(noise=0.05, seed=seed), runs(noise=0.05, seed=seed + 100))[0] == 0


def test_slow_moments_of_one_side_are_no_regression(judged):
    new = runs()
    for turn in (0, 2):
        new[turn] = {name: 3 * median for name, median in new[turn].items()}
    assert judged(runs(), new)[0] == 0


def test_what_was_once_as_quick_as_before_is_no_regression(judged):
    new = runs(lists=1.3)
    assert judged(runs(), new)[0] == 1
    new[1] = runs(lists=1.02)[0]
    assert judged(runs(), new)[0] == 0


def test_what_got_quicker_or_slower_within_the_limit_passes(judged):
    assert judged(runs(), runs(small=0.5, lists=1.09))[0] == 0
    assert judged(runs(), runs(lists=1.09), "--limit", "5")[0] == 1


def test_benchmarks_of_one_side_are_listed_and_not_failed(judged):
    old, new = runs(), runs()
    for run in old:
        run["c::gone"] = 1.0
    for run in new:
        run["c::added"] = 1.0
    code, out = judged(old, new)
    assert code == 0
    assert "in the revision only: c::gone" in out
    assert "in the working tree only: c::added" in out
    assert "3 compared" in out


def test_sides_of_different_length_are_refused(judged, capsys):
    assert compare.main(["judge", "--old", "a", "b", "--new", "c"]) == 2
    assert capsys.readouterr().err == (
        "compare: --old and --new need as many runs each; they are compared turn by turn\n"
    )


def test_sides_with_nothing_in_common_are_refused(judged, capsys):
    assert judged([{"a::x": 1.0}], [{"a::y": 1.0}])[0] == 2


def refusal(capsys, *words):
    """The one line that a comparison was refused with."""
    assert compare.main([*words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("compare: ")
    assert error.count("\n") == 1
    return error


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of one commit whose setup.py fails, with tree and index as committed."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "setup.py").write_text("import sys\nsys.exit('slots.c:1:1: error: expected a bracket')\n")
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", root, *words], check=True)
    monkeypatch.setattr(compare, "ROOT", root)
    return root


@pytest.mark.parametrize("revision", ["nosuch", "--help", "HEAD~9", ""])
def test_a_revision_that_is_not_there_is_one_line(repository, capsys, revision):
    assert f"REV: {revision!r} is no revision" in refusal(capsys, "run", "--", revision)


def test_no_repository_and_no_compiler_are_one_line(repository, capsys, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O3")
    assert "needs the C compiler 'no-such-compiler'" in refusal(capsys, "run", "HEAD")
    shutil.rmtree(repository / ".git")
    assert refusal(capsys, "run", "HEAD").startswith("compare: git: fatal: not a git repository")


def test_a_revision_that_does_not_build_is_one_line_and_its_tree_is_removed(repository, capsys):
    (repository / "new.txt").write_text("not committed")
    assert compare.main(["run", "HEAD"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "the working tree has uncommitted changes: they are timed, too",
        "building HEAD",
        "compare: HEAD does not build: slots.c:1:1: error: expected a bracket",
    ]
    listed = subprocess.run(["git", "-C", repository, "worktree", "list"], capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 1


def test_tests_without_a_benchmark_are_no_run(tmp_path, monkeypatch):
    """pytest skips them and writes no file: that of the other side's last run is not taken for it."""

    def started(self, *words, may_be=0):
        (name,) = (word.partition("=")[2] for word in words if word.startswith("--benchmark-json"))
        if "timed" in words:
            Path(name).write_text(json.dumps({"benchmarks": [{"fullname": "a", "stats": {"median": 1e-6}}]}))

    monkeypatch.setattr(compare.Side, "__init__", lambda self: None)
    monkeypatch.setattr(compare.Side, "_started", started)
    side = compare.Side()
    assert side.run(tmp_path, ["timed"]) == {"a": 1e-6}
    assert side.run(tmp_path, ["untimed"]) == {}


def test_a_number_of_rounds_is_checked(capsys):
    with pytest.raises(SystemExit) as end:
        compare.main(["run", "HEAD", "--rounds", "0"])
    assert end.value.code == 2
    assert "'0' is not a number of rounds" in capsys.readouterr().err


def counted(log):
    log.append("kept")
    left_out = log.append("dropped")
    if left_out is None:
        log.append("dropped too")
    return log


def test_statements_are_left_out_by_what_they_say():
    assert timing.without(counted, "'dropped'", "left_out is None")([]) == ["kept"]
    assert counted([]) == ["kept", "dropped", "dropped too"]


def test_what_is_not_there_cannot_be_left_out():
    with pytest.raises(ValueError, match=r"'nowhere'.*another version"):
        timing.without(counted, "'dropped'", "nowhere")


def test_ways_take_turns():
    log = []
    ways = {
        "a": timing.Way(lambda: log.append("a"), 2, lambda: log.append("reset")),
        "b": timing.Way(lambda: log.append("b"), 2, lambda: log.append("again"), alone=True),
    }
    found = timing.interleaved(ways, 2)
    first, second = ["reset", "a", "a"], ["again", "b", "again", "b"]
    assert log == first + second + first + second + second + first
    assert set(found) == {"a", "b"}
    assert found["a"]["q1"] <= found["a"]["median"] <= found["a"]["q3"]


def test_a_file_whose_benchmarks_are_not_selected_is_started_once(tmp_path):
    class Side:
        def __init__(self):
            self.asked = []

        def run(self, folder, selection):
            self.asked.append(selection)
            return {selection: 1.0} if selection == "some" else {}

    old, new = Side(), Side()
    turns = compare.take_turns(old, new, 3, [{old: word, new: word} for word in ("some", "none")], tmp_path)
    assert old.asked == new.asked == ["some", "none", "some", "some"]
    assert turns == ([{"some": 1.0}] * 3, [{"some": 1.0}] * 3)
