"""Readers: hand-made files, every way to break one, and the slices of the published traces where they are there."""

import contextlib
import gzip
import json
from pathlib import Path

import pytest

from attncore.replay.traces.read_trace import read_trace
from attncore.replay.traces.trace import Request, TraceError

TRACES = Path(__file__).parents[3] / "shared" / "traces"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = (
    f"{HEADER}\r\n"
    "2023-11-16 23:59:59.9000000,374,44\r\n"
    "2023-11-17 00:00:00.0000001,396,109\r\n"
    "2023-11-17 00:00:00.0000001,1,1"  # the published files end without a line end
)
MOONCAKE = [
    {"timestamp": 500, "input_length": 513, "output_length": 5, "hash_ids": [0, 7]},
    {"timestamp": 500, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    {"timestamp": 1777, "input_length": 1024, "output_length": 9, "hash_ids": [0, 8]},
]


def written(path: Path, content: str | bytes, *, zipped: bool = False) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("content", [AZURE, AZURE.replace("\r\n", "\n"), "\ufeff" + AZURE, AZURE + "\r\n"])
def test_azure_is_read_from_its_content(tmp_path, content, zipped):
    trace = read_trace(written(tmp_path / "trace.txt", content, zipped=zipped))
    assert trace.format == "azure"
    assert trace.requests == (
        Request(1, 0.0, 374, 44),
        Request(2, 0.1000001, 396, 109),  # over midnight, to 100 ns
        Request(3, 0.1000001, 1, 1),
    )


@pytest.mark.parametrize("zipped", [False, True])
def test_mooncake_is_read_from_its_content(tmp_path, zipped):
    trace = read_trace(written(tmp_path / "trace.csv", lines(*MOONCAKE), zipped=zipped))
    assert trace.format == "mooncake"
    assert trace.requests == (
        Request(1, 0.0, 513, 5, (0, 7)),
        Request(2, 0.0, 512, 1, (0,)),
        Request(3, 1.277, 1024, 9, (0, 8)),
    )


def test_only_the_first_requests_or_seconds_are_kept(tmp_path):
    path = written(tmp_path / "trace", lines(*MOONCAKE))
    assert [request.row for request in read_trace(path, max_requests=2).requests] == [1, 2]
    assert [request.row for request in read_trace(path, max_seconds=1.277).requests] == [1, 2]
    assert [request.row for request in read_trace(path, max_seconds=1.278).requests] == [1, 2, 3]


def test_rows_behind_the_last_one_kept_are_checked_too(tmp_path):
    path = written(tmp_path / "trace", AZURE.replace(",1,1", ",1,x"))
    with pytest.raises(TraceError, match="row 3"):
        read_trace(path, max_requests=1)


def accepted(path, text):
    """Where a text may be cut so that it is still a trace: what is behind the last line end, and whether that is in
    doubt."""
    found = []
    for length in range(1, len(text)):
        path.write_bytes(text[:length].encode())
        with contextlib.suppress(TraceError):
            found.append((text[:length].rpartition("\n")[2], bool(read_trace(path).doubt)))
    return found


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_cut_is_found_but_in_the_last_number_and_between_two_rows(end, tmp_path):
    rows = [f"2023-11-16 18:15:4{second}.68,374,{output}" for second, output in ((6, 44), (7, 1), (9, 55))]
    found = accepted(tmp_path / "trace", end.join((HEADER, *rows)))
    expected = [(rows[0][:-1], True), (rows[0], True), (rows[1], True), (rows[2][:-1], True)]
    expected += [(row + "\r", True) for row in rows[:2] if end != "\n"]
    assert sorted(found) == sorted([*expected, ("", False), ("", False)])
    assert {last for last, _ in accepted(tmp_path / "trace", lines(*MOONCAKE))} == {
        "", *(json.dumps(one) for one in MOONCAKE)
    }  # fmt: skip


def azure_row(row: str) -> str:
    return f"{HEADER}\r\n2023-11-16 18:15:46.6805900,374,44\r\n{row}\r\n"


def mooncake_row(**changes: object) -> str:
    record = {**MOONCAKE[2], **changes}
    return lines(MOONCAKE[0], {name: value for name, value in record.items() if value is not ...})


LATER = "2023-11-16 18:15:50.9951690"
BAD = {
    "empty": ("", ["empty"]),
    "header only": (HEADER + "\r\n", ["no requests"]),
    "unknown format": ("time,prompt,output\r\n1,2,3\r\n", ["unknown format", "line 1", "time,prompt,output", "Azure"]),
    "other columns": (HEADER + ",Model\r\n", ["unknown format", "Model"]),
    "binary": (b"\x89PNG\r\n\xff\xfe", ["not UTF-8"]),
    "gzip, cut": (gzip.compress((AZURE + "\r\n2023-11-17 00:00:09,12,34" * 9999).encode())[:-20], ["gzip", "cut"]),
    "gzip, cut in its header": (gzip.compress(AZURE.encode())[:5], ["gzip", "cut"]),
    "gzip, damaged": (gzip.compress(AZURE.encode())[:-8] + bytes(8), ["gzip"]),
    "gzip, empty": (gzip.compress(b""), ["empty"]),
    "azure, cut in the time": (azure_row("2023-11-16 18:1"), ["row 2 (line 3)", "columns: 1", "GeneratedTokens"]),
    "azure, cut after a comma": (azure_row(f"{LATER},374,"), ["row 2 (line 3)", "GeneratedTokens", "''"]),
    "azure, cut before the output": (azure_row(f"{LATER},374"), ["row 2 (line 3)", "columns: 2"]),
    "azure, empty line": (azure_row(""), ["row 2 (line 3)", "columns"]),
    "azure, not a number": (azure_row(f"{LATER},x,44"), ["row 2 (line 3)", "ContextTokens", "'x'"]),
    "azure, a fraction": (azure_row(f"{LATER},37.5,44"), ["row 2 (line 3)", "ContextTokens", "37.5"]),
    "azure, foreign digits": (azure_row(f"{LATER},٣,44"), ["row 2 (line 3)", "ContextTokens"]),
    "azure, zero prompt": (azure_row(f"{LATER},0,44"), ["row 2 (line 3)", "ContextTokens", "0 is not between 1 and"]),
    "azure, zero output": (azure_row(f"{LATER},44,0"), ["row 2 (line 3)", "GeneratedTokens", "0 is not between 1"]),
    "azure, negative": (azure_row(f"{LATER},44,-3"), ["row 2 (line 3)", "GeneratedTokens", "-3 is not between 1"]),
    "azure, too long": (azure_row(f"{LATER},2147483648,1"), ["row 2 (line 3)", "ContextTokens", "2147483647"]),
    "azure, digits without end": (azure_row(f"{LATER},{'9' * 5000},1"), ["row 2 (line 3)", "ContextTokens"]),
    "azure, too long together": (azure_row(f"{LATER},2147483647,1"), ["row 2 (line 3)", "GeneratedTokens", "together"]),
    "azure, bad month": (azure_row("2023-13-16 18:15:50.9,1,1"), ["row 2 (line 3)", "TIMESTAMP", "2023-13-16"]),
    "azure, other time": (azure_row("16/11/2023 18:15,1,1"), ["row 2 (line 3)", "TIMESTAMP"]),
    "azure, out of order": (azure_row("2023-11-16 18:15:46.6805899,1,1"), ["row 2 (line 3)", "TIMESTAMP", "order"]),
    "mooncake, cut": (
        lines(*MOONCAKE)[:-20],
        ["row 3: the line ends in the middle of a value, at column", ": it may be cut"],
    ),
    "mooncake, cut in a string": (
        lines(MOONCAKE[0]) + '{"timest\n',
        ["row 2: the line ends in the middle of a value, at column 8: it may be cut"],
    ),
    "mooncake, empty line": (
        lines(MOONCAKE[0]) + "\n" + lines(MOONCAKE[2]),
        ["row 2: the line is empty; each line has timestamp,"],
    ),
    "mooncake, not an object": (
        lines(MOONCAKE[0], [1, 2]),
        ["row 2: the line is [1, 2], not an object with timestamp,"],
    ),
    "mooncake, nested without end": (lines(MOONCAKE[0]) + "[" * 100_000, ["row 2: the line is nested too deeply"]),
    "mooncake, a field twice": (
        lines(MOONCAKE[0]) + '{"timestamp": 0, ' + json.dumps(MOONCAKE[0])[1:],
        ['row 2: the line has the field "timestamp" twice'],
    ),
    "mooncake, deep": (
        lines(MOONCAKE[0]) + '{"x": ' + "[" * 99 + "]" * 99 + ", " + json.dumps(MOONCAKE[0])[1:],
        ["row 2: the line is nested too deeply"],
    ),
    "mooncake, digits without end": (
        lines(MOONCAKE[0]) + '{"timestamp": ' + "9" * 5000 + "}",
        ["row 2: the line holds"],
    ),
    "mooncake, other fields": (lines({"time": 1}), ["row 1", "timestamp: missing"]),
    "mooncake, no ids": (mooncake_row(hash_ids=...), ["row 2", "hash_ids: missing"]),
    "mooncake, too few ids": (mooncake_row(hash_ids=[0]), ["row 2", "hash_ids: 1 found", "1024 needs 2", "512"]),
    "mooncake, too many ids": (mooncake_row(hash_ids=[0, 1, 2]), ["row 2", "hash_ids: 3 found", "needs 2"]),
    "mooncake, ids in text": (mooncake_row(hash_ids="ab"), ["row 2", "hash_ids", '"ab" is not a list']),
    "mooncake, an id of text": (mooncake_row(hash_ids=[0, "1"]), ["row 2", "hash_ids: [1]"]),
    "mooncake, a boolean id": (mooncake_row(hash_ids=[0, True]), ["row 2", "hash_ids: [1]", "true"]),
    "mooncake, a negative id": (mooncake_row(hash_ids=[-1, 1]), ["row 2", "hash_ids: [0] is -1"]),
    "mooncake, an id too large": (mooncake_row(hash_ids=[0, 2**62]), ["row 2", "hash_ids: [1]", "2**62"]),
    "mooncake, zero prompt": (mooncake_row(input_length=0), ["row 2", "input_length", "0 is not between 1 and"]),
    "mooncake, negative output": (mooncake_row(output_length=-1), ["row 2", "output_length", "-1 is not between"]),
    "mooncake, fraction of a token": (mooncake_row(output_length=1.5), ["row 2", "output_length", "1.5"]),
    "mooncake, boolean length": (mooncake_row(output_length=True), ["row 2", "output_length", "true"]),
    "mooncake, length in text": (mooncake_row(input_length="12"), ["row 2", "input_length", '"12"']),
    "mooncake, negative time": (lines({**MOONCAKE[0], "timestamp": -1}), ["row 1", "timestamp: -1"]),
    "mooncake, no time": (mooncake_row(timestamp=None), ["row 2", "timestamp", "null"]),
    "mooncake, time is not a number": (
        mooncake_row(timestamp=float("nan")),
        ["row 2: the line is not JSON: NaN is no number"],
    ),
    "mooncake, out of order": (mooncake_row(timestamp=499), ["row 2", "timestamp: 499", "500", "order"]),
}


@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_one_line_naming_file_row_and_field(tmp_path, content, words):
    path = written(tmp_path / "some trace", content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400 + len(str(path))
    for word in (str(path), *words):
        assert word in text


@pytest.mark.parametrize("name", ["absent", "."])
def test_a_path_that_is_no_file_is_named(tmp_path, name):
    with pytest.raises(TraceError, match=r"No such file|Is a directory") as caught:
        read_trace(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "format_name", "count", "prompt", "output"),
    [
        ("azure_llm_2023_conv.csv.gz", "azure", 5000, 1161, 258),
        ("azure_llm_2023_code.csv.gz", "azure", 4000, 2043, 27),
        ("mooncake_fast25_conversation.jsonl.gz", "mooncake", 4000, 13312, 347),
        ("mooncake_fast25_synthetic.jsonl.gz", "mooncake", 1500, 11664, 198),
    ],
)
def test_published_slices(name, format_name, count, prompt, output):
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not beside the checkout (../shared/traces)")
    trace = read_trace(TRACES / name)
    assert (trace.format, len(trace.requests)) == (format_name, count)
    assert round(sum(request.prompt_tokens for request in trace.requests) / count) == prompt
    assert round(sum(request.output_tokens for request in trace.requests) / count) == output
