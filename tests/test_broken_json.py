"""What is said of a text that is no JSON: short words of attncore's own, the same in every version of Python."""

import json

import pytest

from attncore.broken_json import mistake
from attncore.input_files import loaded_json, parse_json, utf8

WHOLE = '{"a": [1, -2.5e+3, true, null], "b\\u00e9\\ud83d\\ude00\\n": {"c": "d \\\\"}, "e": -Infinity}'
CUT = "ends in the middle of a value, at"


def said(text, read=loaded_json):
    with pytest.raises(ValueError) as error:
        read(text, "give an object")
    return str(error.value)


def of_bytes(data, empty):
    return parse_json(data, 8, empty)


@pytest.mark.parametrize("behind", ["", "\n", "\r\n", " \t\n\n"])
def test_every_beginning_of_a_line_is_cut(behind):
    for length in range(1, len(WHOLE)):
        end = len(WHOLE[:length].rstrip())
        words = said(WHOLE[:length] + behind).removesuffix(", or a quotation mark is missing")
        assert words == f"{CUT} column {end}: it may be cut"


def test_every_beginning_of_a_file_is_cut():
    whole = json.dumps(json.loads(WHOLE), indent=2)
    for length in range(1, len(whole)):
        text = whole[:length].rstrip()
        line = text.count("\n") + 1
        place = f"line {line}, column {len(text.splitlines()[-1])}" if line > 1 else f"column {len(text)}"
        assert said(text.encode(), of_bytes).startswith(f"{CUT} {place}: it may be cut")


def test_a_missing_quotation_mark_is_thought_of():
    assert said('{"block_size: 4}') == f"{CUT} column 16: it may be cut, or a quotation mark is missing"
    assert "quotation" not in said('{"block_size": [4')


@pytest.mark.parametrize("text", ["", "\n", " \t\r\n"])
def test_nothing_is_empty(text):
    assert said(text) == said(text.encode(), of_bytes) == "is empty; give an object"


REASONS = {
    "not JSON": "expected a value, found 'n' at column 1",
    "<html>\n": "expected a value, found '<' at column 1",
    "\0\0": r"expected a value, found '\x00' at column 1",
    "[+1]": "expected a value, found '+' at column 2",
    "[1, , 2]": "expected a value, found ',' at column 5",
    "[True]": "expected a value, found 'T' at column 2",
    "{'a': 1}": 'expected a name in double quotes, found "\'" at column 2',
    "{1: 2}": "expected a name in double quotes, found '1' at column 2",
    '{"a" 1}': "expected ':' after a name, found '1' at column 6",
    '{"a": 1 "b": 2}': "expected ',' or a closing bracket, found '\"' at column 9",
    "[01]": "expected ',' or a closing bracket, found '1' at column 3",
    "[1.e]": "expected ',' or a closing bracket, found '.' at column 3",
    '{"a": [1}': "expected ',' or a closing bracket, found '}' at column 9",
    '{"a": 1}\n{"a": 2}\n': "expected the end, found '{' at line 2, column 1",
    '{"a": 1}]': "expected the end, found ']' at column 9",
    '{"a": 1, }': "a comma before the closing '}' at column 8",
    '{\n  "a": [\n    1,\n  ]\n}': "a comma before the closing ']' at line 3, column 6",
    '{"a": "b,\n "c": 1}': "a line ends inside a string at line 1, column 10",
    '{"a": "b\tc"}': r"'\t' stands inside a string at column 9",
    '{"a": "b\x1b[31m"}': r"'\x1b' stands inside a string at column 9",
    '{"a": "\\d"}': r"unknown escape '\d' in a string at column 8",
    '{"a": "\\u12"}': r"expected four hexadecimal digits after \u at column 9",
    '{"a": \u202e1}': r"expected a value, found '\u202e' at column 7",
}


@pytest.mark.parametrize("text", REASONS, ids=range(len(REASONS)))
def test_what_is_wrong_is_said_with_its_place(text):
    assert said(text) == said(text.encode(), of_bytes) == f"is not JSON: {REASONS[text]}"


@pytest.mark.parametrize(
    ("message", "text", "position", "words"),
    [
        ("Illegal trailing comma before end of object", '{"a": 1, }', 7, "a comma before the closing '}' at column 8"),
        ("Illegal trailing comma before end of array", "[1,]", 2, "a comma before the closing ']' at column 3"),
        ("Something that a later version says", "[1 2]", 3, "unexpected '2' at column 4"),
    ],
)
def test_words_of_other_versions_of_python(message, text, position, words):
    assert mistake(json.JSONDecodeError(message, text, position)) == f"is not JSON: {words}"


def test_bytes_that_are_no_text():
    assert said("\ufeff{}") == "begins with a byte order mark: save it as UTF-8 without one"
    assert said('{"é": "'.encode()[:3], of_bytes) == "ends in the middle of a character, at byte 3: it may be cut"
    assert (
        said('{"€"'.encode()[:4] + b"\r\n", of_bytes) == "ends in the middle of a character, at byte 4: it may be cut"
    )
    assert said('{"é": "'.encode("latin-1"), of_bytes) == "is not UTF-8: byte 3 is 0xe9"
    assert said("{}".encode("utf-16-le") + b"\xff", of_bytes) == "is not UTF-8: byte 5 is 0xff"
    assert utf8("é".encode()) == "é"


@pytest.mark.parametrize("text", ["[" * 10**6 + "x", '"' + "x" * 10**6, "x" * 10**6, '["a", ' * 100 + "\x1b" * 10**6])
def test_words_are_short_and_printable(text):
    words = said(text)
    assert words.isprintable()
    assert len(words) < 120
