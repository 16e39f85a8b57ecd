"""Compares the working tree with a revision on this machine, in one go.

    python benchmarks/compare.py run REV [--rounds 4] [-k EXPRESSION] [--limit 10]
    python benchmarks/compare.py judge --old RUN.json ... --new RUN.json ... [--limit 10]

``run`` checks the revision out into a worktree of its own, builds its extension there, and lets the two sides take
turns, a file of benchmarks at a time: old new, new old, and so on, ROUNDS times through the suite. ``judge`` does the
arithmetic on saved runs, the first of --old beside the first of --new.

A machine of two cores changes its speed from one minute to the next, so a benchmark has got slower only where two
figures say so, each more than LIMIT %: the median of its ratios, turn by turn (both sides of a turn see about the same
machine), and the ratio of the two sides' best medians (noise only adds). What looks slower is then run again by itself
as often as before, and judged on all its turns. Exit code 1 where something got slower, 2 where a run failed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = "not test_list_with_three_plugins"  # it starts the attncore that is installed, on either side
NOTHING_SELECTED = 5  # what pytest exits with
PYTEST = (
    "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-enable", "--benchmark-only",
    "-W", "default::pytest_benchmark.logger.PytestBenchmarkWarning",
)  # fmt: skip


class Compared(NamedTuple):
    """One benchmark on both sides, seconds; the ratios are new over old."""

    name: str
    old: float
    new: float
    median_ratio: float
    best_ratio: float

    def slower(self, limit):
        return min(self.median_ratio, self.best_ratio) > 1 + limit / 100


def medians(run):
    """Name -> median of one saved run, seconds."""
    return {one["fullname"]: one["stats"]["median"] for one in run["benchmarks"]}


def compare(old, new):
    """Benchmarks of both sides, the slowest ratio first, and the names that only one side has.

    ``old`` and ``new`` are ``medians`` of runs, turn by turn; a benchmark counts the turns that both sides have of it.
    """
    names = [set().union(*runs) for runs in (old, new)]
    found = []
    for name in names[0] & names[1]:
        turns = [(a[name], b[name]) for a, b in zip(old, new, strict=True) if name in a and name in b]
        if turns:
            best = [min(side) for side in zip(*turns, strict=True)]
            found.append(Compared(name, *best, statistics.median(b / a for a, b in turns), best[1] / best[0]))
    found.sort(key=lambda one: (-one.median_ratio, one.name))
    return found, sorted(names[0] - names[1]), sorted(names[1] - names[0])


def show(compared, limit):
    """Prints the table; the exit code."""
    found, only_old, only_new = compared
    print(f"{'new / old: median':>18} {'best':>6} {'old, us':>12} {'new, us':>12}")
    for one in found:
        verdict = "SLOWER" if one.slower(limit) else ""
        figures = f"{one.median_ratio:>18.3f} {one.best_ratio:>6.3f} {one.old * 1e6:>12.3f} {one.new * 1e6:>12.3f}"
        print(f"{figures}  {one.name} {verdict}".rstrip())
    for what, names in (("in the revision only", only_old), ("in the working tree only", only_new)):
        for name in names:
            print(f"{what}: {name}")
    slower = [one for one in found if one.slower(limit)]
    print(f"{len(found)} compared, {len(slower)} slower by more than {limit:g} %")
    return 1 if slower else 0


class Side:
    """A source tree whose benchmarks are run with this Python."""

    def __init__(self, root):
        self.root = root
        self.environment = {**os.environ, "PYTHONPATH": str(root), "ATTNCORE_REQUIRE_EXT": "1"}
        shown = self._started("-c", "import attncore; print(attncore.__file__)").stdout.strip()
        if not Path(shown).resolve().is_relative_to(root.resolve()):
            sys.exit(f"compare: {root} has no attncore of its own; {shown} was imported")

    def run(self, folder, selection):
        """One run of some benchmarks; its medians."""
        file = folder / "run.json"
        done = self._started(*PYTEST, f"--benchmark-json={file}", *selection, may_be=NOTHING_SELECTED)
        return {} if done.returncode else medians(json.loads(file.read_text()))

    def files(self):
        """The suite's files, as pytest is given them."""
        return {str(path.relative_to(self.root)) for path in (self.root / "tests" / "benchmarks").glob("test_*.py")}

    def _started(self, *words, may_be=0):
        done = subprocess.run(
            [sys.executable, *words], cwd=self.root, env=self.environment, capture_output=True, text=True
        )
        if done.returncode not in (0, may_be):
            print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
            print(f"compare: a run in {self.root} failed", file=sys.stderr)
            sys.exit(2)
        return done


def take_turns(old, new, rounds, selections, folder):
    """The medians of ``rounds`` runs of each side, both run for one selection after another, each first in its turn.

    The two runs of one selection are seconds apart. A selection is a side's words for pytest, or None where it has no
    such file.
    """
    runs = {old: [{} for _ in range(rounds)], new: [{} for _ in range(rounds)]}
    for number in range(rounds):
        for selection in selections:
            for side in (old, new) if number % 2 == 0 else (new, old):
                if selection[side] is not None:
                    runs[side][number] |= side.run(folder, selection[side])
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return runs[old], runs[new]


def by_file(sides, expression):
    """A selection for every file that one of ``sides`` has."""
    chosen = LEFT_OUT if expression is None else f"({expression}) and {LEFT_OUT}"
    files = {side: side.files() for side in sides}
    every = sorted(set().union(*files.values()))
    return [{side: ["-k", chosen, file] if file in files[side] else None for side in sides} for file in every]


def git(*words):
    subprocess.run(["git", "-C", str(ROOT), *words], check=True)


def run(options):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tree = folder / "revision"
        git("worktree", "add", "--quiet", "--detach", str(tree), options.revision)
        try:
            print(f"building {options.revision}", file=sys.stderr)
            words = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            subprocess.run(words, cwd=tree, env={**os.environ, "ATTNCORE_REQUIRE_EXT": "1"}, check=True)
            old, new = Side(tree), Side(ROOT)
            turns = take_turns(old, new, options.rounds, by_file((old, new), options.k), folder)
            suspects = [one.name for one in compare(*turns)[0] if one.slower(options.limit)]
            if suspects:
                print(f"{len(suspects)} look slower and are run again", file=sys.stderr)
                again = take_turns(old, new, options.rounds, [{old: suspects, new: suspects}], folder)
                turns = [first + second for first, second in zip(turns, again, strict=True)]
            return show(compare(*turns), options.limit)
        finally:
            git("worktree", "remove", "--force", str(tree))


def judge(options):
    if len(options.old) != len(options.new):
        sys.exit("compare: --old and --new need as many runs each; they are compared turn by turn")
    sides = [[medians(json.loads(path.read_text())) for path in paths] for paths in (options.old, options.new)]
    return show(compare(*sides), options.limit)


def parsed(words):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run", help="runs both and compares")
    command.add_argument("revision", metavar="REV")
    command.add_argument("--rounds", type=int, default=4, help="runs of each side (4)")
    command.add_argument("-k", metavar="EXPRESSION", help="benchmarks to run, as pytest's -k")
    command.set_defaults(call=run)
    other = commands.add_parser("judge", help="compares saved runs")
    for name in ("--old", "--new"):
        other.add_argument(name, type=Path, nargs="+", required=True, metavar="RUN.json")
    other.set_defaults(call=judge)
    for one in (command, other):
        one.add_argument("--limit", type=float, default=10, help="%% beyond which a benchmark got slower (10)")
    return parser.parse_args(words)


def main(words):
    options = parsed(words)
    return options.call(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
