"""Compares the working tree with a revision on this machine, in one go.

    python benchmarks/compare.py run REV [--rounds 3] [-k EXPRESSION] [--limit 10]
    python benchmarks/compare.py judge --old RUN.json ... --new RUN.json ... [--limit 10]

``run`` checks the revision out into a worktree of its own, builds its extension there, and lets the two sides take
turns, a file of benchmarks at a time: old new, new old, and so on, ROUNDS times through the suite. ``judge`` does the
arithmetic on saved runs, the first of --old beside the first of --new.

A machine of two cores changes its speed from one minute to the next, so a benchmark has got slower only where two
figures say so, each more than LIMIT %: the median of its ratios, turn by turn (both sides of a turn see about the same
machine), and the ratio of the two sides' best medians (noise only adds). What looks slower is then run again by itself
as often as before, and judged on all its turns. Exit code 1 where something got slower, 2 where nothing could be
compared, which one line explains.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = "not test_list_with_three_plugins"  # it starts the attncore that is installed, on either side
NOTHING_SELECTED = 5  # what pytest exits with
PYTEST = (
    "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-enable", "--benchmark-only",
    "--benchmark-max-time=0.25",  # of the usual second: more turns tell more than longer ones
    "-W", "default::pytest_benchmark.logger.PytestBenchmarkWarning",
)  # fmt: skip


class ComparisonError(Exception):
    """Why nothing can be compared, in a line."""


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
    if not found:
        raise ComparisonError("the two sides have no benchmark in common that -k selects")
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
            raise ComparisonError(f"{root} has no attncore of its own; {shown} was imported")

    def run(self, folder, selection):
        """One run of some benchmarks; its medians."""
        file = folder / "run.json"
        file.unlink(missing_ok=True)  # where tests are selected and no benchmark, none is written
        self._started(*PYTEST, f"--benchmark-json={file}", *selection, may_be=NOTHING_SELECTED)
        return medians(json.loads(file.read_text())) if file.exists() else {}

    def files(self):
        """The suite's files, as pytest is given them."""
        return {str(path.relative_to(self.root)) for path in (self.root / "tests" / "benchmarks").glob("test_*.py")}

    def _started(self, *words, may_be=0):
        done = subprocess.run(
            [sys.executable, *words], cwd=self.root, env=self.environment, capture_output=True, text=True
        )
        if done.returncode not in (0, may_be):
            raise ComparisonError(f"a run in {self.root} failed: {said(done)}")
        return done


def take_turns(old, new, rounds, selections, folder):
    """The medians of ``rounds`` runs of each side, both run for one selection after another, each first in its turn.

    The two runs of one selection are seconds apart. A selection is a side's words for pytest, or None where it has no
    such file.
    """
    runs = {old: [{} for _ in range(rounds)], new: [{} for _ in range(rounds)]}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)  # first: a round takes minutes
        for selection in selections:
            for side in (old, new) if number % 2 == 0 else (new, old):
                if selection[side] is not None:
                    found = side.run(folder, selection[side])
                    runs[side][number] |= found
                    if not found:  # no benchmark of this file is selected: it is not started again
                        selection[side] = None
    return runs[old], runs[new]


def by_file(sides, expression):
    """A selection for every file that one of ``sides`` has."""
    chosen = LEFT_OUT if expression is None else f"({expression}) and {LEFT_OUT}"
    files = {side: side.files() for side in sides}
    every = sorted(set().union(*files.values()))
    return [{side: ["-k", chosen, file] if file in files[side] else None for side in sides} for file in every]


def said(done):
    """What a command that failed said was wrong, in a line: pytest's failures, a compiler's error, or its last line."""
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    for telling in (r"FAILED |ERROR ", r".*\berror:"):
        if found := [line for line in lines if re.match(telling, line)]:
            return "; ".join(found[:3])
    return lines[-1] if lines else f"exit code {done.returncode}"


def started(what, words, **options):
    """Runs a command; its standard output. ComparisonError that begins with ``what`` where it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, **options)
    except OSError as error:
        raise ComparisonError(f"{what}: {error}") from error
    if done.returncode:
        raise ComparisonError(f"{what}: {said(done)}")
    return done.stdout


def git(*words):
    return started("git", ["git", "-C", str(ROOT), *words])


def check(revision):
    """Says on standard error what is compared; ComparisonError where that is not possible."""
    git("rev-parse", "--git-dir")
    try:
        git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except ComparisonError:
        raise ComparisonError(
            f"REV: {revision!r} is no revision of this repository; name a commit, a branch or a tag that it has"
        ) from None
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise ComparisonError(
            f"the revision's extension needs the C compiler {compiler!r}, which is not here; install it"
        )
    if git("status", "--porcelain"):
        print("the working tree has uncommitted changes: they are timed, too", file=sys.stderr)


def run(options):
    check(options.revision)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tree = folder / "revision"
        git("worktree", "add", "--quiet", "--detach", str(tree), options.revision)
        try:
            build(tree, options.revision)
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


def build(tree, revision):
    """Compiles the extension of the revision in its own tree."""
    print(f"building {revision}", file=sys.stderr)
    words = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    started(f"{revision} does not build", words, cwd=tree, env={**os.environ, "ATTNCORE_REQUIRE_EXT": "1"})


def judge(options):
    if len(options.old) != len(options.new):
        raise ComparisonError("--old and --new need as many runs each; they are compared turn by turn")
    try:
        sides = [[medians(json.loads(path.read_text())) for path in paths] for paths in (options.old, options.new)]
    except (OSError, ValueError, KeyError) as error:
        raise ComparisonError(f"a file holds no saved run: {error!r}") from error
    return show(compare(*sides), options.limit)


def rounds(text):
    """The type of --rounds."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rounds, 1 or more")
    return int(text)


def parsed(words):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run", help="runs both and compares")
    command.add_argument("revision", metavar="REV")
    command.add_argument("--rounds", type=rounds, default=3, help="runs of each side (3)")
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
    try:
        return options.call(options)
    except ComparisonError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
