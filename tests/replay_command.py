"""The replay command as the tests of tests/cli run it: a trace, and what the command prints."""

import json

import pytest

from attncore.cli import main


@pytest.fixture
def trace(tmp_path):
    """A trace of three requests; 513 and 520 tokens of the prompts are longer than a default block of ids."""
    path = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": 0, "input_length": 513, "output_length": 6, "hash_ids": [0, 1]},
        {"timestamp": 40, "input_length": 30, "output_length": 9, "hash_ids": [2]},
        {"timestamp": 90, "input_length": 520, "output_length": 3, "hash_ids": [0, 3]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def ran(capsys, *words):
    code = main(["replay", *words])
    output = capsys.readouterr()
    return code, output.out, output.err


def reported(capsys, *words):
    code, out, err = ran(capsys, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)
