"""Versions and requirements, compared with the library that defines them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from attncore.registry.package_requirements import installed, parse, satisfied, version_key

RELEASE = st.lists(st.integers(0, 12), min_size=1, max_size=3).map(lambda parts: ".".join(map(str, parts)))
VERSION = st.builds(
    "{}{}{}{}".format,
    RELEASE,
    st.sampled_from(["", "", "a0", "b1", "b36", "rc2"]),
    st.sampled_from(["", "", ".post1", ".post2"]),
    st.sampled_from(["", "", ".dev0", ".dev3"]),
)
CLAUSE = st.one_of(
    st.builds("{}{}".format, st.sampled_from(["==", "!=", ">=", "<="]), VERSION),
    # what these mean beside pre- and post-releases is told differently by different versions of that library
    st.builds("{}{}".format, st.sampled_from([">", "<"]), RELEASE),
    st.builds("{}{}.*".format, st.sampled_from(["==", "!="]), RELEASE),
    st.builds("~={}.{}".format, st.integers(0, 3), RELEASE),
)


@given(VERSION, VERSION)
def test_order_is_that_of_the_standard(first, second):
    assert (version_key(first) < version_key(second)) == (Version(first) < Version(second))
    assert (version_key(first) == version_key(second)) == (Version(first) == Version(second))


@given(CLAUSE, VERSION)
def test_comparisons_are_those_of_the_standard(clause, version):
    assert satisfied(parse(f"acme{clause}"), version) == SpecifierSet(clause).contains(version, prereleases=True)


@pytest.mark.parametrize(
    ("text", "version", "fits"),
    [
        ("flash-attn>=2.8,<3", "2.8.3.post2", True),
        ("flash-attn>=2.8,<3", "3.0.0b1", False),
        ("flash-attn-4>=4.0.0b30", "4.0.0b36", True),
        ("torch>=2.6", "2.13.0+cpu", True),
        ("torch", "anything at all", True),
        ("torch>=2.6", "anything at all", False),
    ],
)
def test_versions_met_in_practice(text, version, fits):
    assert satisfied(parse(text), version) is fits


@pytest.mark.parametrize(
    "text", ["", "acme 2", "acme>=", "acme>=x", "acme~=2", "acme>=2.*", "acme; python_version>'3'", 3]
)
def test_what_is_no_requirement(text):
    with pytest.raises(ValueError, match="is not a requirement"):
        parse(text)


def test_installed_knows_what_is_here_only():
    found = installed(("numpy", "a-distribution-that-does-not-exist"))
    assert set(found) == {"numpy"}
