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


NUMBER = "options={'splits': Option(int, 'how many', default=4)}, check=check"
TOO_FEW = """
def check(request, host):
    if request.options.get({name!r}, {{}}).get("splits", 4) < 1:
        yield "splits below 1 make no part"
"""
INIT = """
def init(self, config):
    if config.options.get("splits", 4) < 1:
        raise {error}
    super(Backend, self).__init__(config)
Backend.__init__ = init
"""
REFUSED = "option splits=-1: check refuses it (splits below 1 make no part), and Choice.create(options=...) "


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ValueError('options: splits has to be 1 or more')", None),
        ("ValueError('splits has to be 1 or more')", "by an error that does not begin with options and name it"),
        ("ValueError('options: has to be 1 or more')", "by an error that does not begin with options and name it"),
        ("KeyError('splits')", "by another error than a ValueError: KeyError"),
        ("", "takes it: create does not ask check, so the class refuses it, too"),
    ],
)
def test_what_check_refuses_is_refused_by_create(plant, error, said):
    name = "splits"
    plant(name, INIT.format(error=error) if error else "", NUMBER, LIGHT + TOO_FEW.format(name=name))
    code, report = run(name, "test_values_that_check_refuses")
    (one,) = report.results
    assert (code, one.outcome) == ((0, "passed") if said is None else (1, "failed"))
    assert said is None or one.reason.startswith(REFUSED + said)


def test_a_check_that_refuses_no_option_has_nothing_to_try(plant):
    plant("lenient", "", NUMBER, LIGHT + TOO_FEW.format(name="another"))
    code, report = run("lenient", "test_values_that_check_refuses")
    assert (code, [one.outcome for one in report.results]) == (0, ["nothing to check"])
