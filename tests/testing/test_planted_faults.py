"""The kit finds what it is for: each fault, planted in a backend that is right otherwise, fails its test."""

import contextlib
import functools
import sys

import hypothesis
import pytest
from planting import Site
from testing import fault_table
from testing.fault_table import EVERY_FAULT
from testing.faulty_backend import HEAVY, LIGHT, forward

from attncore.registry.plugins import load
from attncore.testing import suite
from attncore.testing.harness.run_suite import FILE, ReportCatcher, conformance

QUIET = ("-p", "no:terminal")
FIRST = {fault.test.partition("[")[0]: fault for fault in reversed(EVERY_FAULT)}
"""Test of the kit -> the first fault that it must find."""
ONE_EACH = tuple(fault for fault in EVERY_FAULT if fault in FIRST.values())
OTHERS = tuple(fault for fault in EVERY_FAULT if fault not in FIRST.values())
WITHOUT = {
    "test_a_captured_graph_replays_with_new_lengths": "runs on a CUDA device",
    "test_forward_does_not_wait_for_the_device": "runs on a CUDA device",
    "test_undeclared_options_are_refused_with_a_sentence": "attncore refuses them for every backend",
}
"""Tests of the kit that no fault is planted for here, and why."""
DRAFTS_AND_ENCODERS = (
    "features={'sliding_window', 'logits_soft_cap', 'alibi', 'sinks', 'multi_token_decode', 'encoder', "
    "'encoder_decoder'}"
)
LIST_BUILDERS_ROWS = (
    "list builder", "list builder for the backend", "captured sizes of the list builder", "attend without writing",
    "graph padding", "multi_token_decode",
)  # fmt: skip
"""Rows of which the tests that are run here take steps of the list builder alone."""
hypothesis.settings.register_profile("without shrinking", phases=[hypothesis.Phase.generate])


def test_every_test_of_the_kit_has_a_fault_to_find():
    assert {name for name in vars(suite) if name.startswith("test_")} - FIRST.keys() == WITHOUT.keys()


@contextlib.contextmanager
def unshrunk():
    """A smaller counterexample is for a person; here any will do."""
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.load_profile("without shrinking")
    yield
    hypothesis.settings.load_profile(before)


@pytest.fixture(autouse=True)
def without_shrinking():
    """For every test here."""
    with unshrunk():
        yield


def plant_in(site, name, code="", facts="", light=""):
    source = LIGHT.format(name=name, facts=f"dict({facts})")
    site.plugin(name, f"{light}\n{source}", heavy=HEAVY + code)


@pytest.fixture
def plant(site):
    """A function that plants a backend: the sound one, with code and facts changed."""

    return functools.partial(plant_in, site)


def run(name, test, settings="EXAMPLES = 15\n"):
    words = test.replace("[", " and ").replace("]", "")
    return conformance(name, settings=settings, options=[*QUIET, "-k", words])


def planted(folder, faults):
    """Backends with these faults planted, and the one test of each run in a session of pytest: exit code, reports."""
    catcher = ReportCatcher()
    (folder / "pytest.ini").write_text("[pytest]\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        site, nodes = Site(folder), []
        for fault in faults:
            plant_in(site, fault.name, fault.code, fault.facts, fault.light)
            file = folder / f"test_fault_{fault.name}.py"
            file.write_text(FILE.format(name=fault.name) + "EXAMPLES = 15\n")
            nodes.append(f"{file}::{fault.test}")
        fixed = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--import-mode=importlib"]
        with unshrunk():
            code = pytest.main(
                [*fixed, "-p", "no:cacheprovider", "-p", "no:benchmark", *QUIET, *nodes], plugins=[catcher]
            )
        for name in site.modules:
            sys.modules.pop(name, None)
    load.forget()
    return code, catcher.found


@pytest.fixture(scope="module")
def one_each(tmp_path_factory):
    return planted(tmp_path_factory.mktemp("faults"), ONE_EACH)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return planted(tmp_path_factory.mktemp("others"), OTHERS)


def check_found(fault, run):
    code, reports = run
    assert code == 1
    found = reports[fault.name].failures
    assert found, reports[fault.name].results
    assert {one.test.partition("[")[0] for one in found} == {fault.test.partition("[")[0]}
    assert fault.says in found[0].reason


@pytest.mark.parametrize("fault", ONE_EACH, ids=lambda fault: fault.name)
def test_a_fault_of_each_check_is_found(one_each, fault):
    check_found(fault, one_each)


@pytest.mark.slow
@pytest.mark.parametrize("fault", OTHERS, ids=lambda fault: fault.name)
def test_every_other_fault_is_found(others, fault):
    check_found(fault, others)


def test_the_table_of_faults_is_that_of_the_planted_ones():
    assert fault_table.PAGE.read_text() == fault_table.rendered(), "run: python tests/testing/fault_table.py --write"
    assert len({fault.name for fault in EVERY_FAULT}) == len(EVERY_FAULT)


def test_the_sound_backend_passes_every_test(plant):
    plant("sound")
    code, report = conformance("sound", settings="EXAMPLES = 10\n", options=QUIET)
    assert (code, report.failures) == (0, [])
    states = {row["capability"]: row["state"] for row in report.rows()}
    assert states["graph padding"] == states["list builder"] == states["NaN canary"] == "supported"


def test_a_plan_that_is_kept_with_the_step_is_found_where_sizes_are_captured(plant):
    """As docs/contract.md has it, with each builder; the layers of a stand-in graph get the metadata of the capture."""
    code = """
def plan_layers(self, metadata, key):
    metadata.kept["lens"] = np.array(metadata.host.seq_lens)
Backend.plan_layers = plan_layers
"""
    read = 'return whole(query, key, value, kv_cache, changed(metadata, seq_lens=metadata.kept["lens"]), output)'
    plant("keeping", code + forward(read))
    code, report = run("keeping", "test_captured_sizes_over or test_captured_sizes_of_its", "CAPTURED_STEPS = 30\n")
    assert (code, report.failures) == (0, [])
    states = {row["capability"]: row["state"] for row in report.rows()}
    assert states == {"captured sizes": "supported", "captured sizes of the list builder": "supported"}


def test_where_plain_steps_are_wrong_the_rest_is_not_run(plant):
    """The first failure is the plainest one, and what says something of its own is said all the same."""
    wrong = "return whole(query, key, value, kv_cache, metadata, output).mul_(1.5)"
    plant("plainly_wrong", forward(wrong))
    code, report = conformance("plainly_wrong", settings="EXAMPLES = 5\n", options=QUIET)
    assert code == 1
    assert {one.test for one in report.results[:2]} == {"test_prefill", "test_decode"}
    assert {one.capability for one in report.failures} == {"prefill", "decode"}
    states = {row["capability"]: row["state"] for row in report.rows()}
    assert [states[name] for name in ("spec", "laziness", "cache shape")] == ["supported"] * 3
    assert states["mixed batches"] == states["sinks"] == states["declared head sizes"] == "not run"
    (reason,) = {row["reason"] for row in report.rows() if row["state"] == "not run"}
    assert reason == "test_decode fails, and the rest builds on it"


def test_a_tail_that_must_be_finite_is_left_finite(plant):
    fault = next(fault for fault in EVERY_FAULT if fault.name == "reads_unused_rows")
    plant("tail", fault.code, "finite_tail=True")
    code, report = run("tail", "test_nothing_is_read")
    assert (code, report.failures) == (0, [])


def test_a_list_builder_that_is_refused_is_unsupported_with_the_reason(plant):
    code = """
def forward(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
    if metadata.from_groups:
        raise ValueError("metadata: this backend reads the persistent builder only")
    return super(Impl, self).forward(query, key, value, kv_cache, metadata, output, write=write)
Impl.forward = forward
"""
    plant("modern", code, f"{DRAFTS_AND_ENCODERS}, cuda_graph='uniform'")
    exit_code, report = run("modern", "list_builder or several_tokens or an_encoder_over or cross_attention_of")
    assert (exit_code, report.failures) == (0, [])
    rows = {row["capability"]: row for row in report.rows()}
    for row in LIST_BUILDERS_ROWS:
        assert rows[row]["state"] == "unsupported"
        assert "persistent builder only" in rows[row]["reason"]
    assert {name for name, row in rows.items() if row["state"] == "supported"} == {"encoder", "encoder_decoder"}


def test_what_is_not_declared_is_unsupported_with_the_specs_own_reason(plant):
    plant("plain", facts="features=set(), unsupported={'sinks': 'the kernel has no place for them'}")
    code, report = run("plain", "test_a_feature_over_random_batches")
    rows = {row["capability"]: row for row in report.rows()}
    assert code == 0
    assert {row["state"] for row in rows.values()} == {"unsupported"}
    assert rows["sinks"]["reason"] == "the kernel has no place for them"
    assert rows["alibi"]["reason"] == "its spec does not declare it"


@pytest.mark.parametrize(
    ("level", "reason"),
    [
        ("never", "its spec says cuda_graph='never'"),
        ("uniform_decode", "the backend runs on cpu, where no graph can be captured"),
    ],
)
def test_why_no_graph_is_captured(plant, level, reason):
    name = f"graphs_{level}"
    plant(name, facts=f"cuda_graph={level!r}")
    code, report = run(name, "test_a_captured_graph", 'DEVICE = "cpu"\n')
    assert code == 0
    assert [(row["state"], row["reason"]) for row in report.rows()] == [("unsupported", reason)]


def test_a_backend_that_cannot_run_here_keeps_its_spec_tests(plant):
    plant("elsewhere", facts="devices={'rocm:gfx942': 50}")
    code, report = conformance("elsewhere", options=QUIET)
    assert code == 0
    outcomes = {result.test: result.outcome for result in report.results}
    assert outcomes["test_the_plugin_loads"] == outcomes["test_the_spec_is_read_without_heavy_imports"] == "passed"
    assert outcomes["test_decode"] == "skipped"
    assert "rocm:gfx942" in next(one.reason for one in report.results if one.test == "test_decode")


CAPLESS = next(fault.code for fault in EVERY_FAULT if fault.name == "no_cap")
CAP_TEST = "test_a_feature_over_random_batches[logits_soft_cap]"


def test_an_expected_failure_is_shown_as_one(plant):
    plant("capless", CAPLESS)
    settings = f"EXPECTED_FAILURES = {{{CAP_TEST!r}: 'fixed in 2.0'}}\n"
    code, report = run("capless", CAP_TEST, settings)
    assert code == 0
    assert [(row["state"], row["reason"]) for row in report.rows()] == [("expected failure", "fixed in 2.0")]


def test_an_expected_failure_that_passes_fails(plant):
    plant("fixed")
    settings = f"EXPECTED_FAILURES = {{{CAP_TEST!r}: 'fixed in 2.0'}}\n"
    code, report = run("fixed", CAP_TEST, settings)
    assert code == 1
    assert [(one.test, one.outcome) for one in report.results] == [(CAP_TEST, "failed")]
    said = f"{CAP_TEST!r} passes, which EXPECTED_FAILURES says fails (fixed in 2.0): take it out"
    assert report.failures[0].reason == said


def test_an_expected_failure_without_brackets_is_every_case_of_the_test(plant):
    fault = next(fault for fault in EVERY_FAULT if fault.name == "interleaved_heads")
    plant("some_heads", fault.code)
    code, report = run(
        "some_heads", "test_grouped_heads", "EXPECTED_FAILURES = {'test_grouped_heads': 'fixed in 2.0'}\n"
    )
    assert code == 1
    found = {one.test: (one.outcome, one.reason) for one in report.results}
    assert found["test_grouped_heads[4-2]"] == ("expected failure", "fixed in 2.0")
    outcome, said = found["test_grouped_heads[2-2]"]
    assert outcome == "failed"
    assert said.endswith("(fixed in 2.0): take it out, or name the cases that do, each as 'test_grouped_heads[2-2]'")


def test_an_expected_failure_of_no_test_is_an_error(plant):
    plant("stale")
    code, _ = run("stale", "test_decode", "EXPECTED_FAILURES = {'test_decoed': 'fixed in 2.0'}\n")
    assert code == 4


def test_a_name_that_no_distribution_provides(site):
    code, report = conformance("nobody", options=(*QUIET, "-k", "loads"))
    assert code == 1
    assert "no distribution installed here provides 'nobody'" in report.failures[0].reason
