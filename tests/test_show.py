"""Text for people: short, on one line, and never an exception; names that are spelt alike."""

import pytest

import attncore
from attncore import show
from attncore.did_you_mean import close_name, did_you_mean


class Hostile:
    """A value whose ``repr`` fails in every way."""

    def __init__(self, error):
        self.error = error

    def __repr__(self):
        raise self.error


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, "two\nlines\x1b[31m\ud800", 10**5000, 10**4000, [[[[1]]] * 99] * 99, b"y" * 10**6,
     Hostile(ValueError()), Hostile(SystemExit(3)), Hostile(RecursionError())],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_any_value_is_short_and_on_one_line(value):
    text = show.short(value)
    assert 0 < len(text) <= 48
    assert text.isprintable()
    assert show.escaped(text).encode()


def test_an_interrupt_passes():
    with pytest.raises(KeyboardInterrupt):
        show.short(type("Interrupted", (), {"__repr__": lambda self: (_ for _ in ()).throw(KeyboardInterrupt)})())


def test_what_a_description_raises_becomes_text():
    class Broken:
        @show.guarded
        def __repr__(self):
            raise MemoryError

        @show.guarded_html
        def _repr_html_(self):
            raise SystemExit

    assert repr(Broken()).endswith("not shown, MemoryError>")
    assert Broken()._repr_html_().startswith("<pre>&lt;")


def test_lines_and_tables_fit():
    text = show.angled("a" * 99, ["b" * 200, "", *["c" * 30] * 9])
    assert max(map(len, text.splitlines())) <= 80
    assert show.angled("One", ["fact"]) == "<One: fact>"
    assert show.some(range(9), most=3) == show.some(range(3), 9, 3) == "0, 1, 2, ... 6 more"
    assert show.some([]) == "none"
    rows = [["x", "word " * 40], ["longer", ""]]
    lines = show.table(("A", "B"), rows).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "longer"
    markup = show.html_table(("<A>",), [["<b>"], [show.Markup("<span>")]])
    assert "<b>" not in markup
    assert "<A>" not in markup
    assert "<span>" in markup


def test_names_that_are_spelt_alike():
    assert did_you_mean("slot_maping", ["slot_mapping", "positions"]) == "; did you mean slot_mapping?"
    assert did_you_mean("telepathy", ["slot_mapping"]) == did_you_mean("slot_mapping", ["slot_mapping"]) == ""
    for odd in (None, 3, ["slot_maping"], "slot_mapping" * 9999):
        assert close_name(odd, ["slot_mapping"]) is None
    with pytest.raises(AttributeError, match=r"'selct'; did you mean select\?"):
        _ = attncore.selct
