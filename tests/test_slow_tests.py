"""tests/slow_tests.txt names tests that exist: a renamed one would silently be back in make test."""

import ast
import functools

import processor_times
import pytest


@functools.cache
def names_in(path):
    """The names that a file gives at its top: functions, classes and what it assigns or imports."""
    found = set()
    for node in ast.parse((processor_times.ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def test_listed_tests_exist():
    listed = processor_times.listed()
    assert len(listed) > 100
    for test in listed:
        path, _, name = test.partition("[")[0].partition("::")
        found = names_in(path)
        if "*" not in found:
            assert name.partition("::")[0] in found, test


@pytest.mark.parametrize(("kept", "slow"), [((), {"f[b]", "g"}), (("g",), {"f[b]"})])
def test_the_cheapest_case_and_what_is_kept_stay(kept, slow):
    of_limit = {"f[a]": 0.9, "f[b]": 3.0, "f[c]": 0.8, "g": 9.0, "h": 0.1}
    times = {test: processor_times.LIMIT * taken for test, taken in of_limit.items()}
    assert set(processor_times.slow_ones(times, set(kept))) == slow
