"""What each test takes of the processor, children included, and which tests are slow by that: tests/slow_tests.txt.

    PYTHONPATH=tests python -m pytest -n 2 -p processor_times -m "not gpu"    # writes build/times/*.txt
    python tests/processor_times.py --write                                   # picks the slow ones

Times of the clock tell little where two processes and other work share the machine. Of a function with several cases
the cheapest one stays in ``make test``, and so do each test that SECURITY.md names and those of ALWAYS. With ``and not
slow`` behind ``not gpu`` the run is shorter: what was slow before, and did not run, is slow still.
"""

import collections
import os
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TIMES = ROOT / "build" / "times"
LIST = ROOT / "tests" / "slow_tests.txt"
LIMIT = 0.5
"""Seconds of processor time from which a test is slow."""
ALWAYS = {
    "tests/integrations/test_compiled_layers.py::test_by_inductor": "the one that compiles as users do",
    "tests/integrations/test_ranks.py::test_two_ranks_say_what_one_says": "the one of two processes that share a model",
    "tests/integrations/test_context_parallel.py::test_two_ranks_that_share_keys_say_what_one_says": "and share keys",
    "tests/testing/test_planted_faults.py::test_the_sound_backend_passes_every_test": "without it no fault is planted",
    "tests/fuzz/test_trees.py::TestTreeBatches::runTest": "the only target of draft trees",
    "tests/fuzz/test_layers.py::test_flashinfer": "the only random layers that are planned on the host",
    "tests/fuzz/test_layers.py::test_latent_flash": "the only ones over latent caches",
    "tests/fuzz/test_layers.py::test_latent_flashinfer": "and those that are planned there",
    "tests/fuzz/test_declarations.py::test_sensible_specs": "the only random specs of a whole host",
    "tests/test_docs_use_in_an_engine.py::test_the_snippets_run_from_top_to_bottom": "what a user pastes first",
}
"""Functions of which a case stays in ``make test`` however long it takes, and why."""
SHARED = "tests/testing/test_planted_faults.py::test_a_fault_of_each_check_is_found"
"""Its cases share a run, which counts as the first one's, whichever that is."""


def listed():
    """The tests of tests/slow_tests.txt."""
    return {line for line in LIST.read_text().splitlines() if line and not line.startswith("#")}


def seconds():
    """Processor time of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    before = seconds()
    try:
        return (yield)
    finally:
        TIMES.mkdir(parents=True, exist_ok=True)
        with (TIMES / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.txt").open("a") as out:
            out.write(f"{seconds() - before:.2f} {item.nodeid}\n")


def slow_ones(times, kept):
    """The tests over LIMIT, but for the cheapest case of a function, and of ``kept`` ones at least one."""
    of_function = collections.defaultdict(list)
    for test, taken in times.items():
        of_function[test.partition("[")[0]].append((taken, test))
    found = []
    for function, cases in of_function.items():
        if function == SHARED:
            continue
        spared = 1 if len(cases) > 1 or function in kept or function.rpartition("::")[0] in kept else 0
        found += [test for taken, test in sorted(cases)[spared:] if taken > LIMIT]
    return sorted(found)


def main():
    times = {}
    for path in TIMES.glob("*.txt"):
        for line in path.read_text().splitlines():
            taken, _, test = line.partition(" ")
            times[test] = float(taken)
    kept = {f"tests/{name}" for name in re.findall(r"`([\w/]+\.py::\w+)`", (ROOT / "SECURITY.md").read_text())}
    slow = slow_ones(times, kept | ALWAYS.keys())
    saved = sum(times[test] for test in slow)
    print(f"{len(slow)} of {len(times)} tests are slow: {saved:.0f} of {sum(times.values()):.0f} seconds")
    if "--write" in sys.argv:
        head = (
            "# Tests that make test-all runs, and make test does not. Made by tests/processor_times.py, which says how."
        )
        LIST.write_text("\n".join([head, *sorted({*slow, *(listed() - times.keys())})]) + "\n")


if __name__ == "__main__":
    main()
