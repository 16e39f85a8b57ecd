"""--save-steps: a whole file or none, and lines that the other door understands."""

import json
import os
from pathlib import Path

import pytest

from attncore.cli import main
from attncore.replay.checks.oracle import PlannedRow, expected
from attncore.replay.results.save_steps import StepsFile
from attncore.replay.runner import replay
from attncore.replay.settings import Settings
from attncore.replay.traces.trace import Request

# Chunks, prefix hits (row 3) and, with 9 blocks to hand out, preemption.
REQUESTS = [
    Request(1, 0.0, 9, 12, (1,)),
    Request(2, 0.0, 6, 9, (2,)),
    Request(3, 0.1, 12, 3, (1,)),
]
SETTINGS = Settings(num_blocks=9, block_size=4, max_num_seqs=3, max_num_batched_tokens=6)


def saved(path):
    with StepsFile(path, 4) as record:
        outcome = replay(REQUESTS, SETTINGS, record=record)
    return outcome, [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_by_hand(tmp_path):
    outcome, lines = saved(tmp_path / "steps.jsonl")
    assert len(lines) == len(outcome.steps.build_ns)
    assert outcome.preemptions
    assert outcome.prefix_hit_tokens
    assert lines[0] == {
        "block_size": 4,
        "chunked_prefill": False,
        "groups": [
            {
                "is_prompt": True,
                "sequences": [{"seq_id": 1, "query_len": 6, "context_len": 0, "block_table": [1, 2, 3]}],
            }
        ],
    }
    assert lines[1]["chunked_prefill"] is True
    assert [(group["is_prompt"], group["sequences"][0]["query_len"]) for group in lines[1]["groups"]] == [
        (True, 3),
        (True, 3),
    ]
    assert [(group["is_prompt"], group["sequences"][0]["seq_id"]) for group in lines[2]["groups"]] == [
        (True, 2),
        (False, 1),
    ]


def test_attncore_build_accepts_every_line_and_finds_the_same_slots(tmp_path, capsys):
    path = tmp_path / "steps.jsonl"
    _, lines = saved(path)
    assert main(["build", str(path)]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == len(lines)
    for line, answer in zip(lines, answers, strict=True):
        sequences = [sequence for group in line["groups"] for sequence in group["sequences"]]
        rows = [PlannedRow(one["context_len"], one["query_len"], one["block_table"]) for one in sequences]
        wanted = expected(rows, 4)
        for name in ("slot_mapping", "seq_lens", "context_lens", "query_start_loc", "seq_start_loc", "max_query_len"):
            assert answer[name] == wanted[name], name


def test_nothing_is_left_behind_by_a_run_that_fails(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text("before\n")

    def fail(_):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError), StepsFile(path, 4) as record:
        replay(REQUESTS, SETTINGS, record=record, progress=fail)
    assert path.read_text() == "before\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_that_name_is_replaced_and_a_link_followed(tmp_path):
    target, link = tmp_path / "steps.jsonl", tmp_path / "link"
    target.write_text("before\n")
    link.symlink_to(target)
    _, lines = saved(link)
    assert link.is_symlink()
    assert len(target.read_text().splitlines()) == len(lines)


def test_a_name_of_letters_of_several_bytes_may_be_as_long_as_any(tmp_path):
    """The name that it has until all is written was longer than any may be."""
    path = tmp_path / f"{'界' * 80}.jsonl"
    saved(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_to_and_not_replaced():
    with StepsFile("/dev/null", 4) as record:
        replay(REQUESTS, SETTINGS, record=record)
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("name", ["absent/steps.jsonl", ".", "file/steps.jsonl"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"No such file|is a directory|Not a directory") as caught:
        StepsFile(tmp_path / name, 4).open()
    assert str(tmp_path) in str(caught.value)


def test_a_place_that_cannot_be_written_is_named_by_the_command(tmp_path, capsys):
    """The command takes away what an open that failed may have left, and still says why it failed."""
    (tmp_path / "file").touch()
    file = tmp_path / "file/steps.jsonl"
    assert main(["replay", "--metadata-only", "--requests", "1", "--save-steps", str(file)]) == 2
    assert capsys.readouterr().err == f"attncore: error: {file} cannot be written: Not a directory\n"


def test_a_place_in_a_deleted_folder_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(OSError, match=r"^s\.jsonl cannot be written: No such file"):
        StepsFile("s.jsonl", 4)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_named():
    with (
        pytest.raises(OSError, match=r"^/dev/full cannot be written: No space left"),
        StepsFile("/dev/full", 4) as record,
    ):
        replay(REQUESTS, SETTINGS, record=record)


def test_a_file_that_only_some_may_read_stays_so(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.touch(mode=0o600)
    with StepsFile(path, 16):
        pass
    assert path.stat().st_mode & 0o777 == 0o600


def test_not_even_while_it_is_made_may_others_read_it(tmp_path, monkeypatch):
    path, real, modes = tmp_path / "steps.jsonl", os.fchmod, []
    path.touch()
    path.chmod(0o640)

    def seen(descriptor, mode):
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        real(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", seen)
    with StepsFile(path, 16):
        pass
    assert modes == [0o600]
    assert path.stat().st_mode & 0o777 == 0o640
