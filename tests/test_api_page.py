"""docs/api.md has every public name, with the signature that the code has."""

import api_page

import attncore
from attncore import slots


def test_the_page_has_every_public_name():
    named = set(api_page.names(api_page.PAGE.read_text()))
    assert "slots" in named
    assert sorted(named - {"slots"} | set(attncore.__all__) & set(vars(slots))) == sorted(attncore.__all__)


def test_the_signatures_are_those_of_the_code():
    text = api_page.PAGE.read_text()
    assert text == api_page.rendered(text), "run: python tests/api_page.py --write"
