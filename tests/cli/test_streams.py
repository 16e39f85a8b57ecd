"""Streams that are closed, full or read no more, encodings and signals: no traceback, and the exit code says it."""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attncore.cli import COMMANDS as COMMANDS_OF_THE_LINE
from attncore.cli import main
from attncore.command import READER_GONE, Terminated

SEQUENCE = {"seq_id": 0, "query_len": 5, "context_len": 0, "block_table": [4, 6]}
BATCH = {"block_size": 4, "groups": [{"is_prompt": True, "sequences": [SEQUENCE]}]}
COMMANDS = {
    "replay": ["replay", "--metadata-only", "--requests", "3"],
    "replay as JSON": ["replay", "--metadata-only", "--requests", "3", "--json"],
    "build": ["build", "batches.jsonl"],
    "list": ["list"],
    "explain": ["explain"],
    "doctor": ["doctor", "--no-create"],
    "new-backend": ["new-backend", "acme", "new"],
    "help": ["--help"],
    "a command's help": ["replay", "--help"],
    "version": ["--version"],
}
HOW = [*((name, "") for name in COMMANDS), ("replay", "1"), ("a command's help", "1")]  # PYTHONUNBUFFERED
NEEDS_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "batches.jsonl").write_text((json.dumps(BATCH) + "\n") * 3)
    monkeypatch.setenv("ATTNCORE_PLUGINS", "reference")
    return tmp_path


def started(words, folder, **streams):
    return subprocess.Popen([sys.executable, "-m", "attncore", *words], cwd=folder, stderr=subprocess.PIPE, **streams)


@NEEDS_FULL
@pytest.mark.parametrize(("name", "unbuffered"), HOW)
def test_a_full_disk_is_one_line(name, unbuffered, folder, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full, started(COMMANDS[name], folder, stdout=full) as process:
        said = process.stderr.read().decode()
    assert (process.returncode, said) == (2, "attncore: error: standard output: No space left on device\n")


@pytest.mark.parametrize(("name", "unbuffered"), HOW)
def test_a_pipe_that_is_read_no_more_ends_a_command_silently(name, unbuffered, folder, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    read, write = os.pipe()
    os.close(read)
    with started(COMMANDS[name], folder, stdout=write) as process:
        os.close(write)
        said = process.stderr.read().decode()
    assert (process.returncode, said) == (READER_GONE, "")


@NEEDS_FULL
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_an_error_keeps_its_code_where_nothing_can_be_said(stream, folder):
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: full}
        words = [sys.executable, "-m", "attncore", "build", "absent"]
        assert subprocess.run(words, cwd=folder, check=False, **streams).returncode == 2


CLOSED = "attncore: error: standard output: it is closed\n"


@pytest.mark.parametrize(
    ("closed", "code", "said"), [("<&-", 0, ""), ("2>&-", 0, ""), (">&-", 2, CLOSED), ("<&- >&- 2>&-", 2, "")]
)
@pytest.mark.parametrize(("name", "unbuffered"), [*((name, "") for name in ("replay", "help", "list")), ("list", "1")])
def test_closed_streams(name, unbuffered, closed, code, said, folder, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    words = f"{sys.executable} -m attncore {' '.join(COMMANDS[name])} {closed}"
    done = subprocess.run(["sh", "-c", words], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_closed_standard_output_that_nothing_is_written_to(folder):
    words = f"{sys.executable} -m attncore absent >&-"
    done = subprocess.run(["sh", "-c", words], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "absent" in done.stderr


@pytest.mark.parametrize(
    "environ", [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}]
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_names_that_an_encoding_lacks(environ, options, folder):
    name = os.fsencode(folder) + b"/tr\xc3\xa4ce \xff\xf0\x9f\x98\x80.csv"
    with open(name, "w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:00.0,9,2\n")
    words = [sys.executable, "-m", "attncore", "replay", name, "--metadata-only", *options]
    done = subprocess.run(words, capture_output=True, env={**os.environ, **environ}, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    if options:
        assert os.fsencode(json.loads(done.stdout)["trace"]["source"]) == name
    missing = subprocess.run([*words[:4], name + b"\x1b", *words[5:]], capture_output=True, check=False)
    assert missing.returncode == 2
    assert missing.stderr.count(b"\n") == 1
    assert b"\x1b" not in missing.stderr


def mistaken_files(folder):
    (folder / "empty").touch()
    (folder / "gz").write_bytes(gzip.compress(os.urandom(9000))[:4000])
    (folder / "half").write_text(json.dumps(BATCH)[:70])
    (folder / "secret").touch(mode=0)
    return [".", "absent", "empty", "gz", "half", "secret"]


def test_files_that_hold_no_input_are_one_line(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    for name in mistaken_files(folder):
        for words in (["build", name], ["replay", name, "--metadata-only"], ["explain", "--config", name]):
            assert main(words) == 2, words
            out, err = capsys.readouterr()
            assert (out, err.count("\n")) == ("", 1), words


@contextlib.contextmanager
def saving(folder):
    """A replay that writes a file of steps for a long time, once it has begun to."""
    words = ["replay", "--metadata-only", "--requests", "100000", "--save-steps", "steps.jsonl"]
    with started(words, folder, stdout=subprocess.PIPE) as process:
        try:
            end = time.monotonic() + 60
            while not list(folder.glob("*.partial")):
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < end
                time.sleep(0.02)
            yield process
        finally:
            process.kill()  # a test that fails would wait for it, and it would fill the disk


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 143, b""),
        (signal.SIGHUP, 129, b""),
        (signal.SIGINT, 130, b"attncore: error: interrupted\n"),
    ],
)
def test_a_signal_leaves_no_half_of_a_file(number, code, said, folder):
    before = set(folder.iterdir())
    with saving(folder) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, b"", said)
    assert set(folder.iterdir()) == before


def test_a_signal_that_is_ignored_stays_ignored(folder):
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with saving(folder) as process:
            process.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("command", COMMANDS_OF_THE_LINE)
@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Terminated(15), 143)])
def test_every_command_ends_by_its_signal(command, error, code, capsys, monkeypatch):
    import attncore.cli

    class Interrupted:
        def parse_args(self, words):
            return self

        def run(self, args):
            raise error

    monkeypatch.setattr(attncore.cli, "_parser", lambda name: Interrupted())
    before = signal.getsignal(signal.SIGTERM)
    assert main([command]) == code
    assert capsys.readouterr().err.count("\n") == (code == 130)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_build_that_waits_for_a_line_is_interrupted(folder):
    with started(["build"], folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(json.dumps(BATCH).encode() + b"\n")
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == b"attncore: error: interrupted\n"


def test_lines_come_from_a_pipe_that_does_not_wait(folder):
    """As a parent's event loop shares it: a pause, in the middle of a line too, is not the end."""
    line = (json.dumps(BATCH) + "\n").encode()
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    with started(["build"], folder, stdin=reads, stdout=subprocess.PIPE) as process:
        os.close(reads)
        os.write(writes, line)
        assert process.stdout.readline()
        os.write(writes, line[:30])
        time.sleep(0.2)
        os.write(writes, line[30:] + line)
        os.close(writes)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out.count(b"\n"), err) == (0, 2, b"")


@pytest.mark.parametrize("words", [["build"], ["replay", "--metadata-only", "--save-steps", "/dev/fd/{}"]])
def test_answers_wait_for_a_pipe_that_does_not_wait(words, folder):
    """As a parent's event loop shares it: answers beyond what a pipe holds are whole once they are read."""
    whole = {**SEQUENCE, "query_len": 60000, "block_table": list(range(15000))}
    line = json.dumps({**BATCH, "groups": [{"is_prompt": True, "sequences": [whole]}]}) + "\n"
    (folder / "long.jsonl").write_text(line * 2)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    words = [one.format(writes) for one in words]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "pass_fds": [writes]}
    if words == ["build"]:
        words, streams["stdout"] = ["build", "long.jsonl"], writes
    with started(words, folder, **streams) as process:
        os.close(writes)
        time.sleep(1)
        with open(reads, "rb") as file:
            answers = [json.loads(one) for one in file]
        assert (process.wait(60), process.stderr.read()) == (0, b"")
    assert len(answers) == 2 or words[0] == "replay"
    assert sum(len(json.dumps(one)) for one in answers) > 1 << 17  # more than a pipe holds


@pytest.mark.parametrize("words", ["build", "replay --metadata-only -"])
def test_standard_input_that_cannot_be_read_is_named(words, folder):
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m attncore {words} 0>f"], cwd=folder, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"attncore: error: standard input cannot be read: Bad file descriptor\n"


def test_a_link_that_leads_to_itself_is_one_line(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    os.symlink("loop", "loop")
    plain = ["--metadata-only", "--requests", "2"]
    for words in ([*plain, "--trace", "loop"], [*plain, "--save-steps", "loop"], ["--model", "loop"]):
        assert main(["replay", *words]) == 2, words
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "loop" in err
    assert main(["bench", "reference", "--steps", "loop", "--no-save"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
