"""``attncore build``: an answer is counted before memory is taken for it, and a line before it is read."""

import gc
import io
import json
import os
import resource
import sys
import weakref

import pytest

from attncore.builder import CommonMetadataBuilder
from attncore.cli import main
from attncore.json_lines.list_builder import build_batch, parse_batch
from attncore.json_lines.metadata_as_json import MAX_ANSWER
from attncore.json_lines.persistent_builder import StepOptions, build_step, parse_step


@pytest.fixture
def build(monkeypatch, capsys):
    """Runs the command over a stream of bytes: (exit code, lines of output, text on standard error)."""

    def run(stream, *arguments):
        stream = io.BytesIO(stream.encode()) if isinstance(stream, str) else stream
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        code = main(["build", *arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


def sequence(**fields):
    return {"seq_id": 0, "query_len": 1, "context_len": 0, "block_table": [1], **fields}


def batch(*sequences, is_prompt=True, **fields):
    groups = [{"is_prompt": is_prompt, "sequences": [one]} for one in sequences]
    return json.dumps({"block_size": 4, "groups": groups, **fields})


def step(*sequences, block_size=2**30):
    return json.dumps({"block_size": block_size, "sequences": sequences})


LONG_AND_MANY = [sequence(seq_id=n) for n in range(1, 400)] + [sequence(context_len=99_999, block_table=[1] * 100_000)]
BEYOND = {
    "a prompt of a profiling run": (batch(sequence(query_len=2**31 - 100, block_table=None)), [], "groups: an answer"),
    "padded requests": (
        batch(sequence(), is_prompt=False, graph_batch_size=2**31 - 9, max_seq_len_to_capture=4), [], "groups: an answ",
    ),
    "a captured table": (
        batch(sequence(), is_prompt=False, graph_batch_size=1000, max_seq_len_to_capture=2**31 - 1),
        [],
        "groups: an answer of 1000 tokens and a table of 1000 x 536870912",
    ),
    "a long table beside many short ones": (
        batch(*LONG_AND_MANY, is_prompt=False, block_size=1), [], "groups: an answer of 400 tokens and a table of 400",
    ),
    "a large block": (step(sequence(query_len=2**29)), ["--speculative", "1"], "sequences: an answer of 536870912 tok"),
    "a large block of two groups": (
        json.dumps({"sequences": [{**sequence(query_len=10**6), "block_tables": {"a": [1], "b": [1]}}]}).replace(
            '"block_table": [1], ', ""
        ),
        ["--groups", "a:1048576,b:1048576", "--max-answer", "10000000"],
        "sequences: an answer of 1000000 tokens",
    ),
    "a long table beside many short ones, by steps": (
        step(*LONG_AND_MANY, block_size=1), ["--speculative", "1"], "sequences: an answer of 400 tokens and tables of",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("line", "words", "message"), BEYOND.values(), ids=BEYOND)
def test_an_answer_far_larger_than_its_line_is_refused_before_it_takes_memory(line, words, message, build):
    build(batch(sequence()))  # what is imported is not counted below
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, lines, err = build(line, *words)
    assert (code, lines, err.count("\n")) == (2, [], 1)
    assert err.startswith(f"line 1: {message}")
    assert "--max-answer" in err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


ANSWERED = [
    (batch(sequence(query_len=7, block_table=[99_999, 10])), []),
    (batch(sequence(query_len=12, block_table=None)), ["--layout", "flashinfer"]),
    (batch(sequence(), is_prompt=False, graph_batch_size=11, max_seq_len_to_capture=40), ["--layout", "flash"]),
    (step(sequence(query_len=123), sequence(seq_id=-5, query_len=1, context_len=10)), ["--speculative", "1"]),
    (
        '{"sequences": [{"seq_id": 7, "query_len": 3, "context_len": 9, "block_tables": {"a": [5, 1], "b": [2]}}]}',
        ["--groups", "a:8,b:16"],
    ),
]


@pytest.mark.parametrize(("line", "words"), ANSWERED)
def test_the_limit_counts_the_bytes_of_the_answer(line, words, build):
    code, (answer,), err = build(line, *words)
    assert (code, err) == (0, "")
    assert build(line, *words, "--max-answer", str(len(answer)))[:2] == (0, [answer])
    code, lines, err = build(line, *words, "--max-answer", str(len(answer) - 1))
    assert (code, lines) == (2, [])
    assert err == f"line 1: answer: {len(answer)} bytes are longer than {len(answer) - 1}; --max-answer allows more\n"


def test_more_is_allowed_where_it_is_asked_for(build):
    line = batch(sequence(query_len=40_000, block_table=None))
    code, _, err = build(line, "--max-answer", "100000")
    assert (code, "33333 numbers allowed here (of `attncore build`, as many as --max-answer bytes hold)" in err) == (
        2,
        True,
    )
    assert build(line, "--max-answer", "200000")[0] == 0


def test_functions_have_the_same_limit():
    options = StepOptions(max_answer=100)
    with pytest.raises(ValueError, match=r"^answer: \d+ bytes are longer than 100; --max-answer allows more"):
        build_batch(parse_batch(batch(sequence())), max_answer=100)
    with pytest.raises(ValueError, match=r"^sequences: an answer of 50 tokens .* numbers do not fit 100 bytes"):
        build_step(parse_step(step(sequence(query_len=50)), options), options)
    assert StepOptions().max_answer == MAX_ANSWER == 64 * 2**20


class Endless(io.RawIOBase):
    """A line without an end; how much of it was read."""

    def __init__(self, letter):
        self.letter, self.taken = letter, 0

    def readable(self):
        return True

    def readinto(self, buffer):
        self.taken += len(buffer)
        buffer[:] = self.letter * len(buffer)
        return len(buffer)


@pytest.mark.parametrize("letter", [b"\0", b" ", b"[", b"9"])
def test_a_line_without_an_end_is_refused(letter, build):
    line = Endless(letter)
    code, lines, err = build(io.BufferedReader(line))
    assert (code, lines, err) == (2, [], "line 1: batch: longer than 16777216 bytes\n")
    assert line.taken < 2**24 + 2**20


def test_a_line_may_be_longer_where_an_answer_may(build):
    line = batch(sequence())[:-1] + " " * 2**24 + "}"
    assert build(line)[0] == 2
    assert build(line, "--max-answer", str(2**27))[0] == 0


def test_a_named_pipe_is_read_line_by_line(tmp_path, capsys):
    os.mkfifo(tmp_path / "lines")
    if not (child := os.fork()):
        with open(tmp_path / "lines", "w") as lines:
            lines.write(batch(sequence()) + "\n{\n")
        os._exit(0)
    assert main(["build", str(tmp_path / "lines")]) == 2
    os.waitpid(child, 0)
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert captured.err.startswith("line 2: batch: ends in the middle of a value")


LONG = "x" * 10**5
NUMBER = "9" * 4000


@pytest.mark.parametrize(
    "line",
    [
        f'{{"{LONG}": 1}}',
        f'{{"{LONG}": 1, "{LONG}": 1}}',
        f'{{"block_size": {NUMBER}}}',
        f'{{"block_size": "{LONG}"}}',
        batch(sequence(block_table=[LONG])),
        batch(sequence(block_table=LONG)),
        batch(sequence(seq_id=LONG)),
        batch(sequence()).replace('"seq_id": 0', f'"seq_id": {NUMBER}'),
        batch(sequence()).replace('"query_len": 1', f'"query_len": {NUMBER}'),
        batch(sequence()).replace("[1]", f"[{NUMBER}]"),
        batch(sequence()).replace("[1]", f"[[{'0,' * 10**5}0]]"),
        json.dumps([LONG] * 9),
        json.dumps({"block_size": 4, "groups": [{LONG: LONG}]}),
        json.dumps({"block_size": "\x1b[31m\x7f" * 9, "groups": []}),
    ],
    ids=range(14),
)
@pytest.mark.parametrize("words", [[], ["--speculative", "1"]])
def test_a_message_quotes_a_little_of_a_line(line, words, build):
    line = (
        line.replace('"groups": [{"is_prompt": true, "sequences": [', '"sequences": [').replace("}]}]", "}]")
        if words
        else line
    )
    code, lines, err = build(line, *words)
    assert (code, lines, err.count("\n")) == (2, [], 1)
    assert err[:-1].isprintable()
    assert len(err) < 500


def test_a_line_that_takes_more_memory_than_there_is(build, monkeypatch):
    """Python's MemoryError has no text of its own."""

    def lacks_memory(*_):
        raise MemoryError

    monkeypatch.setattr("attncore.cli.build.build_batch", lacks_memory)
    assert build(batch(sequence())) == (2, [], "line 1: not enough memory\n")


def test_few_builders_are_kept(monkeypatch):
    """Each keeps memory for the longest of its lines, and a stream may have lines of any settings."""
    made = weakref.WeakSet()

    class Builder(CommonMetadataBuilder):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.add(self)

    monkeypatch.setattr("attncore.json_lines.list_builder.CommonMetadataBuilder", Builder)
    groups = [{"is_prompt": False, "sequences": [{"seq_id": 0, "query_len": 1, "context_len": 0, "block_table": [1]}]}]
    for block_size in range(101, 141):
        build_batch(parse_batch(json.dumps({"block_size": block_size, "groups": groups})))
    gc.collect()
    assert 0 < len(made) <= 4
