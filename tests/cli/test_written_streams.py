"""Files of replay that are streams: `--save-steps` and `--html` to a pipe, a descriptor, or standard output."""

import json
import os
import subprocess
import sys
import threading

import pytest

from attncore.standard_output import named_descriptor

REPLAY = f"{sys.executable} -m attncore replay --metadata-only --requests 2"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs a line of the shell in an empty folder, in which it leaves only the files that are named."""
    monkeypatch.setenv("ATTNCORE_PLUGINS", "reference")

    def run(line, *files):
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        assert {file.name for file in tmp_path.iterdir()} == set(files)
        return done

    return run


def steps(text):
    return [sorted(json.loads(line)) for line in text.splitlines()]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/proc/thread-self/fd/1"])
@pytest.mark.parametrize("option", ["--save-steps", "--html", "--json --save-steps"])
def test_standard_output_has_the_report_and_nothing_else(shell, option, name):
    done = shell(f"{REPLAY} {option} {name}")
    assert (done.returncode, done.stdout) == (2, "")
    said = f"{option.split()[-1]}: {name} is standard output, which the report is written to; give another file"
    assert done.stderr == f"attncore: error: {said}\n"


@pytest.mark.parametrize("streams", ["3>&1", ">both"])
def test_a_file_that_is_standard_output_by_another_name_is_refused(shell, streams):
    name = "/dev/fd/3" if streams == "3>&1" else "both"
    done = shell(f"{REPLAY} --save-steps {name} {streams}", *(["both"] if name == "both" else []))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--save-steps: {name} is standard output" in done.stderr


def test_a_pipe_gets_the_steps(shell):
    done = shell(f"{{ {REPLAY} --save-steps /dev/fd/3 3>&1 >report; }} | cat", "report")
    assert done.stderr == ""
    found = steps(done.stdout)
    assert len(found) > 100
    assert all(one == ["block_size", "chunked_prefill", "groups"] for one in found)


def test_a_descriptor_of_a_file_is_written_on_where_it_stands(shell, tmp_path):
    assert shell(f"{{ echo 0 >&3; {REPLAY} --save-steps /dev/fd/3 >report; }} 3>steps", "report", "steps").stderr == ""
    first, *rest = (tmp_path / "steps").read_text().splitlines()
    assert first == "0"
    assert len(rest) > 100


def test_standard_error_may_have_them(shell):
    assert len(steps(shell(f"{REPLAY} --save-steps /dev/stderr >/dev/null").stderr)) > 100


def test_every_name_of_a_descriptor_is_known():
    thread = threading.get_native_id()
    folders = ("/dev/fd", "/proc/self/fd", "/proc/thread-self/fd", f"/proc/{os.getpid()}/fd", f"/proc/{thread}/fd")
    folders += (f"/proc/self/task/{thread}/fd", f"/proc/{os.getpid()}/task/{thread}/fd", "/proc/self/cwd/../dev/fd")
    with open("/dev/null") as file:
        found = [named_descriptor(f"{folder}/{file.fileno()}") for folder in folders[:-1]]
        assert found == [file.fileno()] * len(found)
    for name in (f"/proc/{os.getppid()}/fd/1", "/proc/self/fd/1/2", "/proc/self/fd/x", "/proc/self/fdinfo/1"):
        assert named_descriptor(name) is None, name


@pytest.mark.parametrize("name", ["x/", "x/.", "x//"])
def test_a_name_of_a_folder_is_no_file_s(shell, name):
    done = shell(f"{REPLAY} --save-steps {name}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"attncore: error: {name} cannot be written: Is a directory\n"


def test_what_is_thrown_away_may_be_both(shell):
    assert shell(f"{REPLAY} --save-steps /dev/null >/dev/null").returncode == 0


@pytest.mark.parametrize(("name", "streams"), [("/dev/fd/9", ""), ("/dev/fd/0", "</dev/null")])
def test_a_descriptor_that_cannot_be_written_is_one_line(shell, name, streams):
    done = shell(f"{REPLAY} --save-steps {name} {streams}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"attncore: error: {name} cannot be written: Bad file descriptor\n"
