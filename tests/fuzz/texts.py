"""Texts of files: seeds of the folder corpus, their bytes changed, their JSON changed, and bytes of any kind."""

import json
import pathlib

from hypothesis import strategies as st

CORPUS = pathlib.Path(__file__).parent / "corpus"
VALUES = (
    None, True, False, 0, 1, -1, 3, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**31) - 1, -(2**63) - 1, 10**30, 10**400,
    0.5, 1e308, -0.0, "", "1", "\n", "\x1b[2J", "\ud800", "../../etc/passwd", "__class__", [], [[]], {}, {"": {}},
    [0] * 40, {"a": 1}, "x" * 300,
)  # fmt: skip
RAW = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 5000, b"{\"a\":" * 2000, b"\x00", b"\xff\xfe",
    b"\r", b"\n\n", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\x1b]0;x\x07", b",", b"\"", b"\\u0000", b"\\ud800",
)  # fmt: skip


def texts(folder):
    """Bytes that are, or nearly are, what the seeds of a folder of the corpus are; one time in ten anything."""
    seeds = sorted((CORPUS / folder).iterdir())
    seed = st.sampled_from([path.read_bytes() for path in seeds])
    return st.integers(0, 9).flatmap(
        lambda n: st.binary(max_size=200) if n == 0 else seed.flatmap(changed_bytes if n < 4 else changed_json)
    )


@st.composite
def changed_bytes(draw, seed):
    """The seed with up to three pieces cut, doubled or replaced."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, 12)))
        piece = draw(st.sampled_from(RAW) | st.binary(max_size=4) | st.just(bytes(data[start:stop]) * 2))
        data[start:stop] = piece
    return bytes(data)


@st.composite
def changed_json(draw, seed):
    """The seed with up to three values of its JSON lines replaced, left out or renamed; not JSON: bytes changed."""
    lines = seed.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(lines) - 1))
        try:
            whole = json.loads(lines[number])
        except ValueError:
            return draw(changed_bytes(seed))
        lines[number] = json.dumps(draw(changed(whole))).encode()
    return b"\n".join(lines)


@st.composite
def changed(draw, value):
    """A JSON value of which one part, at any depth, is another."""
    if not isinstance(value, (dict, list)) or not value or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(VALUES) | st.integers(-2, 40))
    if isinstance(value, list):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], draw(changed(value[index])), *value[index + 1 :]]
    name = draw(st.sampled_from(sorted(value)))
    rest = {key: one for key, one in value.items() if key != name}
    deed = draw(st.integers(0, 9))
    if deed == 0:
        return rest
    if deed == 1:
        return {draw(st.sampled_from(["", "x", name.upper(), "a b", "\n"])): value[name], **rest}
    return {**rest, name: draw(changed(value[name]))}
