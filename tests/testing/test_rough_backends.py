"""python -m attncore.testing: backends that fork, raise what has no text, or change the process, and odd options."""

import json
import os
import subprocess
import sys

import pytest
from planting import SPEC

from attncore.testing.__main__ import main
from attncore.testing.harness.run_suite import conformance

HEAVY = """
import os, sys
from attncore.reference import ReferenceBackend, ReferenceImpl

class Silent(BaseException):
    def __str__(self):
        raise SystemExit(0)

class Shy:
    def __repr__(self):
        raise SystemExit(0)

class Impl(ReferenceImpl):
    def forward(self, *args, **kwargs):
        if not hasattr(sys, {once!r}):
            sys.{once} = True
            {does}
        return super().forward(*args, **kwargs)

class Backend(ReferenceBackend):
    impl_class = Impl
    def __init__(self, config, **options):
        super().__init__(config)
"""
SCALE = """
        options={"scale": Option(float, "a number")},
        host_needs={"query_start_loc", "seq_lens", "context_lens", "slot_mapping"}, host_lengths="exact",
        device_needs={"slot_mapping", "block_table"}"""


def plant(site, name, does):
    source = SPEC.format(name=name, module=f"attn_{name}", extra=SCALE).replace("MultipleOf,", "MultipleOf, Option,")
    site.plugin(name, source, heavy=HEAVY.format(once=f"once_{name}", does=does))


def run(site, tmp_path, name, does):
    plant(site, name, does)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    folder = tmp_path / "temporary"
    folder.mkdir()
    words = [sys.executable, "-m", "attncore.testing", name, "--json", "--examples", "2", "-k", "test_decode"]
    environ["TMPDIR"] = str(folder)
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=100)
    return done, list(folder.glob("attncore-conformance-*"))


def test_a_backend_that_forks_is_one_table(site, tmp_path):
    done, left = run(site, tmp_path, "forks", "(child := os.fork()) and os.waitpid(child, 0)")
    assert (done.returncode, left) == (0, []), done.stdout + done.stderr
    assert json.loads(done.stdout)["rows"][0]["state"] == "supported"
    assert done.stderr.count("1 passed") == 1


@pytest.mark.parametrize(
    "does", ["sys.stdout.close()", "sys.stderr.detach()", "__import__('io').TextIOWrapper(sys.stdout.buffer)"]
)
def test_a_backend_that_closes_streams_is_one_table(site, tmp_path, does):
    done, _ = run(site, tmp_path, "closes", does)
    assert (done.returncode, done.stderr.count("1 passed")) == (0, 1), done.stdout + done.stderr
    assert json.loads(done.stdout)["rows"][0]["state"] == "supported"


def test_an_option_that_is_a_number_is_given_and_told_as_json(site, capsys):
    plant(site, "odd", "pass")
    main(["odd", "--json", "--option", "scale=1e9", "--examples", "1", "-k", "test_decode"])
    shown = capsys.readouterr()
    table = json.loads(shown.out, parse_constant=pytest.fail)
    assert table["options"] == {"scale": 1e9}
    assert [row["capability"] for row in table["rows"]][:1] == ["decode"]
    assert "interrupted" not in shown.err


def test_tests_that_cannot_be_collected_are_an_error(capsys):
    code, report = conformance("reference", settings="1 / 0\n")
    assert (code, report.results) == (1, [])
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("attncore: error: reference: its tests cannot be collected: ")
    assert "ZeroDivisionError" in told


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("silent", "raise Silent", "Silent without a message"),
        (
            "shy",
            "del sys.once_shy; super().forward(*args, **kwargs); return Shy()",
            "forward gave an output of type Shy; the contract says a tensor",
        ),
    ],
    ids=["the text of an error", "a repr"],
)
def test_what_raises_when_it_is_shown_is_a_failure(site, capsys, name, body, reason):
    plant(site, name, body)
    assert main([name, "--json", "--examples", "1", "-k", "test_decode"]) == 1
    shown = capsys.readouterr()
    assert "INTERNALERROR" not in shown.out + shown.err
    (failure,) = json.loads(shown.out)["failures"]
    assert failure["reason"].startswith(reason)


def test_an_interrupt_that_a_backend_may_have_raised_names_it(site, capsys):
    plant(site, "breaks", "raise KeyboardInterrupt")
    assert main(["breaks", "--examples", "1", "-k", "test_decode"]) == 130
    assert capsys.readouterr().err == "attncore: error: interrupted while breaks was tested\n"


def test_the_table_has_what_was_installed_before_the_tests(site, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    plant(site, "clears", "sys.path.clear()")
    main(["clears", "--json", "--examples", "1", "-k", "test_decode"])
    table = json.loads(capsys.readouterr().out)
    assert (table["distribution"], table["version"]) == ("attn-clears", "1.0")
