"""A backend that takes the place of the one named is never silent: an attribute, a warning, a line of the log."""

import logging
import subprocess
import sys
import warnings

import pytest

import attncore
from attncore.how_to_install import install_distribution

FIELDS = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"}
FALLBACK = {"backend": "rocm", "policy": "fallback", **FIELDS}


def test_a_choice_says_what_it_stands_in_for(site):
    with pytest.warns(attncore.FallbackWarning):
        choice = attncore.select(**FALLBACK)
    assert (choice.name, choice.fell_back_from) == ("reference", "rocm")
    assert "IN PLACE OF rocm" in repr(choice)
    for fields in (FIELDS, {**FALLBACK, "backend": "reference"}):
        assert attncore.select(**fields).fell_back_from is None


def test_the_warning_names_both_the_reason_and_the_callers_line(site):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attncore.select(**FALLBACK)
    [one] = caught
    assert one.filename == __file__
    text = str(one.message)
    assert text.startswith("using reference (attncore 0.1.0) on cpu in place of rocm, which the request names and")
    assert f"cannot be used: not installed; {install_distribution('attn-rocm')}" in text
    assert issubclass(one.category, UserWarning)


def test_both_phases_warn_at_the_callers_line(site, monkeypatch):
    monkeypatch.setenv("ATTNCORE_BACKEND", "rocm")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        joint = attncore.select_joint(policy="fallback", **FIELDS)
    assert [joint.prefill.fell_back_from, joint.decode.fell_back_from] == ["rocm", "rocm"]
    assert [one.filename for one in caught] == [__file__] * 2
    assert "for prefill on cpu in place of rocm, which ATTNCORE_BACKEND names" in str(caught[0].message)


def test_a_plain_program_says_it_once(tmp_path):
    """As a newcomer runs it: no filter, no logging."""
    fields = ", ".join(f"{name}={value!r}" for name, value in FALLBACK.items())
    program = tmp_path / "program.py"
    program.write_text(f"import attncore\nfor _ in range(3):\n    attncore.select({fields})\n")
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert ran.stderr.count("FallbackWarning") == 1
    assert f"{program}:3: FallbackWarning: using reference" in ran.stderr


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (FIELDS, "its priority 5 comes first of 2 usable backends"),
        ({**FIELDS, "exclude": ["acme"]}, "no other backend can be used"),
        ({**FIELDS, "prefer": ["reference"]}, "the request prefers it"),
        ({**FIELDS, "backend": "reference"}, "the request names it"),
    ],
)
def test_each_choice_is_logged_with_its_reason(site, caplog, fields, why):
    site.plugin("acme")
    with caplog.at_level(logging.INFO, "attncore"):
        choice = attncore.select(**fields)
    assert [one.message for one in caplog.records] == [f"using {choice.candidate.label} on cpu because {why}"]


def test_a_fallback_is_logged_as_a_warning(site, caplog):
    with pytest.warns(attncore.FallbackWarning):
        attncore.select(**FALLBACK)
    [entry] = caplog.records
    assert entry.message.endswith("on cpu because rocm, which the request names, cannot be used")
    assert (entry.name, entry.levelno) == ("attncore", logging.WARNING)


def test_both_phases_are_logged(site, caplog):
    with caplog.at_level(logging.INFO, "attncore"):
        attncore.select_joint(**FIELDS)
    assert [one.message.partition(" on ")[0] for one in caplog.records] == [
        "using reference (attncore 0.1.0) for prefill",
        "using reference (attncore 0.1.0) for decode",
    ]
