"""The support tables of a run of several test files: one for each backend, set of options and device."""

import itertools

import pytest
from testing.faulty_backend import HEAVY, LIGHT

from attncore.testing.harness.run_suite import FILE, ReportCatcher

NUMBERS = itertools.count()
OPTION = "options={'factor': Option(float, 'of the output', default=1.0)}"
CODE = """
def forward(self, *given, **named):
    return ReferenceImpl.forward(self, *given, **named).mul_(self.backend.config.options["factor"])
Impl.forward = forward
"""


@pytest.fixture
def run(site, tmp_path):
    """A function that runs test_decode of test files with these settings, and gives their tables by title."""
    light = "from attncore import Option\n" + LIGHT.format(name="keen", facts=f"dict({OPTION})")
    site.plugin("keen", light, heavy=HEAVY + CODE)

    def files(*settings):
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        catcher, nodes = ReportCatcher(), []
        for text in settings:
            file = tmp_path / f"test_table_{next(NUMBERS)}.py"  # pytest imports a file only once a process, by its name
            file.write_text(FILE.format(name="keen") + f"EXAMPLES = 1\n{text}\n")
            nodes.append(f"{file}::test_decode")
        fixed = ["-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path), "--import-mode=importlib"]
        pytest.main([*fixed, "-p", "no:cacheprovider", "-p", "no:benchmark", *nodes], plugins=[catcher])
        return catcher.found

    return files


def test_files_of_other_options_or_devices_are_other_tables(run, capsys):
    found = run("", "OPTIONS = {'factor': 1.5}", "OPTIONS = {'factor': 1.0}\nDEVICE = 'cpu'", "OPTIONS = {}")
    states = {title: [row["state"] for row in report.rows()] for title, report in found.items()}
    assert states == {
        "keen": ["supported"], "keen (factor=1.5)": ["failed"], "keen (factor=1.0) on cpu": ["supported"],
    }  # fmt: skip
    assert [len(report.results) for report in found.values()] == [2, 1, 1]
    shown = capsys.readouterr().out
    assert "attncore conformance: keen (factor=1.5) =" in shown
    assert found["keen (factor=1.5)"].as_json()["options"] == {"factor": 1.5}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{'facto': 1.5}", "OPTIONS: 'facto' is not declared by keen; declared: factor; did you mean factor?"),
        ("{'factor': 'x'}", "OPTIONS: 'factor': 'x' is not a float"),
        ("['factor']", "OPTIONS: ['factor'] is not a mapping of options to values"),
    ],
)
def test_options_that_the_backend_has_not_fail_and_do_not_skip(run, options, said):
    """A negotiation would call the backend unsupported for them, and nothing would be tested."""
    (report,) = run(f"OPTIONS = {options}").values()
    assert [(one.outcome, one.reason) for one in report.results] == [("failed", said)]


def test_another_default_device_of_an_adopter_fails_nothing(run):
    """As a conftest for a GPU sets one: checks draw on the CPU. ``meta``, which has no numbers, stands for it."""
    (report,) = run(
        """
import pytest, torch

@pytest.fixture(autouse=True)
def elsewhere():
    with torch.device("meta"):
        yield
"""
    ).values()
    assert [(one.outcome, one.reason) for one in report.results] == [("passed", "")]
