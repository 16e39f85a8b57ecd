"""The kit's row of options: which values are tried, and which are left out."""

import functools

import pytest
from testing.option_faults import LIGHT, under
from testing.test_planted_faults import plant_in, run

from attncore.testing.harness.subject import Subject

TEST = "test_each_value_of_each_option"
FACTS = "options={'kernel': Option(str, 'which', default='a', choices=('a', 'b'))}"
WRONG = under("given.get('kernel') == 'b'", "return whole(query, key, value, kv_cache, metadata, output).neg_()")
CHECK = """
def check(request, host):
    if request.options.get({name!r}, {{}}).get("kernel") == "b" and {refused}:
        yield "kernel b takes no such thing"
"""


@pytest.fixture
def plant(site):
    return functools.partial(plant_in, site)


def outcomes(name, settings=""):
    code, report = run(name, TEST, settings)
    return code, [(one.outcome, one.reason) for one in report.results]


def test_options_that_are_given_are_all_that_is_tried(plant):
    plant("given", WRONG, FACTS, LIGHT)
    assert outcomes("given", "OPTIONS = {'kernel': 'a'}\n") == (0, [("nothing to check", "the options are given")])
    code, found = outcomes("given")
    assert (code, found[0][0]) == (1, "failed")


def test_a_backend_without_options_has_no_row(plant):
    plant("plain")
    code, report = run("plain", TEST)
    assert (code, report.rows()) == (0, [])


def test_values_that_this_machine_refuses_are_left_out(plant):
    plant("refuses", WRONG, f"{FACTS}, check=check", LIGHT + CHECK.format(name="refuses", refused="True"))
    assert outcomes("refuses") == (0, [("skipped", "kernel=b: kernel b takes no such thing")])


def test_a_value_that_takes_larger_blocks_alone_is_tried_with_them(plant):
    refused = "request.block_size < 64"
    plant("large", WRONG, f"{FACTS}, check=check", LIGHT + CHECK.format(name="large", refused=refused))
    assert Subject("large", options={"kernel": "b"}).backend().config.block_size == 64
    code, found = outcomes("large")
    assert code == 1
    assert found[0][1].startswith("with option kernel=b: ")
    assert "block size 64" in found[0][1]
