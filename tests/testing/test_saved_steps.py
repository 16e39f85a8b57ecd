"""Files of saved steps: which batches of them are timed, and what they may take."""

import json
from pathlib import Path

import pytest

from attncore.testing.bench import run as runs
from attncore.testing.bench.run import Question
from attncore.testing.engines import saved_steps
from attncore.testing.engines.saved_steps import read_steps


def line(*tables, block_size=16, query_len=9, **group):
    sequences = [
        {"seq_id": i, "query_len": query_len, "context_len": 0, "block_table": table} for i, table in enumerate(tables)
    ]
    return json.dumps({"block_size": block_size, "groups": [{"is_prompt": True, "sequences": sequences, **group}]})


@pytest.fixture
def file(tmp_path):
    def write(*lines):
        (tmp_path / "steps.jsonl").write_text("\n".join(lines))
        return tmp_path / "steps.jsonl"

    return write


def tables_of(steps):
    return [one.block_table for batch in steps.batches for group in batch.groups for one in group.sequences]


def test_a_cache_has_the_blocks_that_are_named_whatever_their_ids(file):
    steps = read_steps(file(line([2147483647], [200000]), "", line([7, 200000]), line(None)))
    assert tables_of(steps) == [[3], [2], [1, 2], None]
    assert steps.num_blocks == 4
    encoder = {"encoder_seq_len": 9, "cross_block_table": [5]}
    steps = read_steps(file(line([10**6], **encoder)))
    assert (tables_of(steps), steps.batches[0].groups[0].cross_block_table, steps.num_blocks) == ([[2]], [1], 3)


def test_of_many_lines_some_are_taken_and_all_are_checked_on_request(file, monkeypatch):
    monkeypatch.setattr(saved_steps, "MAX_STEPS", 2)
    written = file(*(line([i]) for i in (1, 2)), line([-1]), line([4]))
    assert len(read_steps(written).batches) == 2
    with pytest.raises(ValueError, match=r"steps\.jsonl: line 3: groups\[0\].*block id -1"):
        read_steps(written, every_line=True)


MISTAKES = {
    "": " is empty; it takes what `attncore replay --save-steps FILE` writes",
    "\n\n": " is empty",
    "not JSON": ": line 1: batch: is not JSON: expected a value, found 'n' at column 1",
    line([1])[:-5]: ": line 1: batch: ends in the middle of a value, at column",
    "\n[1]": ": line 2: batch: [1] is not an object",
    '{"block_size": 1e300}': ": line 1: groups: missing",
    '{"block_size": 4, "sequences": []}': ": line 1: sequences: stand in steps of the persistent builder",
    **{line([1], block_size=value): ": line 1: block_size: " for value in (0, -4, 2**31, 4.0, True, "x")},
    line([]): ": line 1: groups[0].sequences[0].block_table: sequence 0 holds 0 blocks",
    line([1]) + "\n" + line([1], block_size=32): ": line 2: block_size: 32 differs from 16 of the first line",
    line(None, query_len=2**31 - 1): ": line 1: groups: ",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_bad_line_is_named_before_any_pass(text, file, tmp_path):
    with pytest.raises(ValueError, match=r"^--steps: ") as error:
        Question("reference", "", steps=file(text)).as_json(tmp_path / "copy")
    assert f"steps.jsonl{MISTAKES[text]}" in str(error.value)


def test_every_pass_reads_what_was_checked(file, tmp_path):
    asked = json.loads(Question("reference", "", steps=file(line([1]))).as_json(tmp_path / "copy"))
    file("not JSON")
    assert len(read_steps(asked["steps"]).batches) == 1


def test_a_deleted_folder_is_said_of_the_option(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ValueError, match=r"^--steps: x cannot be read: No such file"):
        Question("reference", "", steps=Path("x")).as_json(tmp_path / "copy")


def test_what_steps_take_is_counted_before_any_pass(file, monkeypatch, tmp_path):
    small = file(line([1], [2]))
    asked = json.loads(Question("reference", "", steps=small).as_json(tmp_path / "copy"))
    assert asked["block_size"] == 16
    shared = line([1] * 10**5, block_size=16384, query_len=1).replace('"context_len": 0', '"context_len": 1600000000')
    shared = shared.replace("true", "false")  # a decode
    for text in (line([1], block_size=10**9), line([1], block_size=10**6), shared):
        monkeypatch.setattr(runs, "available_bytes", lambda device: 20 << 30)
        with pytest.raises(ValueError, match=r"^--steps: .*steps\.jsonl: block_size .* GiB, and 20\.0 GiB are free"):
            Question("acme", "", steps=file(text)).as_json(tmp_path / "copy")
