"""What is read of a trace is limited, whatever it unpacks to; a pipe is read as it comes."""

import fcntl
import gzip
import json
import os
import resource
import termios
import time

import pytest

from attncore.replay.traces import read_trace as module
from attncore.replay.traces.read_trace import read_trace
from attncore.replay.traces.trace import TraceError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:00.0,9,2\n" * 20
MOONCAKE = (json.dumps({"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]}) + "\n") * 20


def refusal(path, **limits):
    with pytest.raises(TraceError) as caught:
        read_trace(path, **limits)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    return text.removeprefix(f"{path}: ")


def test_a_line_that_unpacks_to_a_gigabyte_is_refused(tmp_path):
    with gzip.open(tmp_path / "bomb.gz", "wb", compresslevel=1) as file:
        for _ in range(1024):
            file.write(b" " * 2**20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refusal(tmp_path / "bomb.gz") == "line 1: longer than 4194304 bytes"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_a_device_without_an_end_is_refused():
    assert refusal("/dev/zero") == "line 1: longer than 4194304 bytes"


def test_lines_without_end_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "trace"
    path.write_text(AZURE)
    monkeypatch.setattr(module, "MAX_REQUESTS", 7)
    assert refusal(path) == "more than 7 requests; say how many with --requests, or give --minutes"
    assert len(read_trace(path, max_requests=12).requests) == 12
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    assert refusal(path, max_requests=5) == "longer than 100 bytes, unpacked"


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path, monkeypatch):
    path, text = tmp_path / "trace.gz", (AZURE + "2023-11-16 18:15:00.0,9,2\n" * 20000).encode()
    path.write_bytes(gzip.compress(text))
    size = path.stat().st_size
    assert len(text) > 200 * size
    assert len(read_trace(path, max_requests=5).requests) == 5  # of less than MAX_SMALL bytes
    monkeypatch.setattr(module, "MAX_SMALL", len(text) // 2)
    assert refusal(path, max_requests=5) == (
        f"its first {size} bytes unpack to more than {len(text) // 2} bytes and to more than 100 times as many, which "
        "no trace does; if it is one, give it unpacked"
    )
    monkeypatch.setattr(module, "MAX_RATIO", 1 + len(text) // size)
    assert len(read_trace(path, max_requests=5).requests) == 5
    monkeypatch.undo()
    monkeypatch.setattr(module, "MAX_SMALL", 100)
    (tmp_path / "plain").write_bytes(text)
    assert len(read_trace(tmp_path / "plain", max_requests=5).requests) == 5


NOTHING = {
    "zeros behind it": lambda packed, count: packed + bytes(count),
    "parts without data": lambda packed, count: packed + gzip.compress(b"") * (count // 20),
    "a name in its header": lambda packed, count: (
        packed[:3] + b"\x08" + packed[4:10] + b"a" * count + b"\0" + packed[10:]
    ),
}


@pytest.mark.parametrize("what", NOTHING)
def test_bytes_without_end_that_unpack_to_nothing_are_refused(tmp_path, what, monkeypatch):
    path, packed = tmp_path / "trace.gz", gzip.compress(AZURE.encode())
    monkeypatch.setattr(module, "MAX_NOTHING", 2**18)  # what is read ahead is 2**17
    path.write_bytes(NOTHING[what](packed, 1000))
    assert len(read_trace(path).requests) == 20
    path.write_bytes(NOTHING[what](packed, 2**19))
    with open(path, "ab") as file:
        file.truncate(2**40)  # it takes no place
    assert "which no trace does; fetch the file again" in refusal(path)


def test_a_line_that_cannot_be_packed_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_NOTHING", 2 * 2**19)
    monkeypatch.setattr(module, "MAX_LINE", 2**19)
    ids = [id_ * 2**61 // 2**15 for id_ in range(2**14)]
    text = json.dumps({"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids})
    (tmp_path / "trace.gz").write_bytes(gzip.compress(text.encode(), compresslevel=0))
    assert len(read_trace(tmp_path / "trace.gz").requests) == 1


def test_ids_without_end_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "trace"
    path.write_text(MOONCAKE)
    monkeypatch.setattr(module, "MAX_HASH_IDS", 11)
    assert refusal(path) == "hash_ids: more than 11 in all; replay fewer requests with --requests"
    assert len(read_trace(path, max_requests=5).requests) == 5


@pytest.mark.parametrize("content", [AZURE.encode(), MOONCAKE.encode(), gzip.compress(AZURE.encode(), mtime=0)])
def test_a_pipe_is_read(content, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    if not (child := os.fork()):
        with open(tmp_path / "pipe", "wb", buffering=0) as pipe:
            pipe.write(content[:1])
            while fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)) != bytes(4):  # the first byte is read alone
                time.sleep(0.001)
            pipe.write(content[1:])
        os._exit(0)
    trace = read_trace(tmp_path / "pipe")
    os.waitpid(child, 0)
    assert len(trace.requests) == 20


LONG = "\x1b[31m" + "x" * 10**5


@pytest.mark.parametrize(
    "content",
    [
        LONG,
        AZURE + LONG,
        AZURE + f"{LONG},1,1",
        AZURE + f"2023-11-16 18:15:50.0,{'9' * 39},1",
        "{" + LONG,
        json.dumps({LONG: 1}),
        MOONCAKE + MOONCAKE.splitlines()[0].replace("1024", "9" * 4000),
        MOONCAKE + json.dumps({"timestamp": LONG, "input_length": 1, "output_length": 1, "hash_ids": []}),
        MOONCAKE + json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [LONG]}),
        MOONCAKE + MOONCAKE.splitlines()[0].replace("[0, 1]", f"[0, {'9' * 4000}]"),
    ],
    ids=range(10),
)
def test_a_message_quotes_a_little_of_a_trace(content, tmp_path):
    (tmp_path / "trace").write_text(content)
    assert refusal(tmp_path / "trace").isprintable()
