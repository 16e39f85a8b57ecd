"""Runs the suite of tests/benchmarks, saves the run, shows the last one of this machine beside it, prints the goals.

    python benchmarks/run.py [--strict] [-- WORDS FOR PYTEST]

Runs are kept in .benchmarks/, which git ignores, a folder for each machine. With words for pytest a part of the suite
is run: it is compared, and neither saved nor judged. Exit code 1 where a benchmark failed, or with --strict where a
goal was missed, 2 where nothing could be run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import reach
from pytest_benchmark.utils import get_machine_id

from attncore.testing.bench.machine import machine, machine_name

ROOT = Path(__file__).resolve().parent.parent
HISTORY = ROOT / ".benchmarks"
FACTS = ("python_version", "numpy", "kernels", "reads_ints")
"""What a run's machine_info says that may change from one run of a machine to the next."""
PYTEST = (
    sys.executable, "-m", "pytest", "tests/benchmarks", "-rfE", "--benchmark-enable", "--benchmark-only",
    "--benchmark-columns=median,min,iqr,rounds", "--benchmark-group-by=group", "--benchmark-sort=min",
    "-W", "default::pytest_benchmark.logger.PytestBenchmarkWarning",
    # Kilobytes about the machine; changed_facts says it in a line.
    "-W", "ignore:Benchmark machine_info:pytest_benchmark.logger.PytestBenchmarkWarning",
)  # fmt: skip


def saved_runs(folder):
    """The runs in ``folder`` of this kind of Python, the oldest first: pytest-benchmark compares with the last."""
    return sorted((folder / get_machine_id()).glob("[0-9]*.json"))


def changed_facts(old, new):
    """What differs between the machine_info of two runs and matters, in words: a line or none."""
    found = [
        f"{name} {old['machine_info'].get(name)} then, {new['machine_info'].get(name)} now"
        for name in FACTS
        if old["machine_info"].get(name) != new["machine_info"].get(name)
    ]
    return ["the last saved run differs: " + "; ".join(found)] if found else []


def is_writable(folder):
    """Whether a run can be saved in ``folder``, which is made; says on standard error why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        print(f"bench: the run is not saved: {error}", file=sys.stderr)
        return False


def judge(run, strict):
    """Prints the goals of a run; the exit code."""
    code = reach.show(run)
    if code and not strict:
        print("A goal is missed: see if it is again on a quiet machine. With STRICT=1 it is an error.")
    return code if strict else 0


def run(options):
    """Runs, saves, compares, judges; the exit code."""
    folder = HISTORY / machine_name(machine())
    before = saved_runs(folder)
    if options.words:
        return part(folder, before, options.words)
    with tempfile.TemporaryDirectory(prefix="attncore-bench-") as place:
        if not is_writable(folder):
            folder = Path(place)
            before = []
        words = [f"--benchmark-storage=file://{folder}", "--benchmark-autosave"]
        if code := started([*words, *(["--benchmark-compare"] if before else [])]):
            return code
        file = saved_runs(folder)[-1]
        found = json.loads(file.read_text())
        if before:
            print(f"compared with {before[-1]}", *changed_facts(json.loads(before[-1].read_text()), found), sep="\n")
        return judge(found, options.strict)


def part(folder, before, words):
    """Runs a part of the suite beside the last whole run; the exit code."""
    compared = [f"--benchmark-storage=file://{folder}", "--benchmark-compare"] if before else []
    return started([*compared, *words])


def started(words):
    """The exit code of the suite: 0, 1 where a benchmark failed, 2 where none ran."""
    return min(2, subprocess.run([*PYTEST, *words], cwd=ROOT).returncode)


def main(words):
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a goal is missed")
    options = parser.parse_args(words[:split])
    options.words = words[split + 1 :]
    try:
        return run(options)
    except KeyboardInterrupt:
        print("bench: interrupted; nothing is saved", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
