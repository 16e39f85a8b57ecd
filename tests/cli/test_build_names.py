r"""Names and truth values in the lines of `attncore build`: a name stands once in each object, however it is written
(``\u0062lock_size`` is ``block_size``), and a truth value is ``true`` or ``false``.
"""

import io
import json
import sys

import pytest

from attncore.cli import main

SEQUENCE = {"seq_id": 0, "query_len": 5, "context_len": 0, "block_table": [4, 6]}
GROUP = {"is_prompt": True, "prefix_cache_hit": False, "sequences": [SEQUENCE]}
BATCH = {"block_size": 4, "chunked_prefill": False, "groups": [GROUP]}
STEP = {"sequences": [{**SEQUENCE, "block_table": 0, "block_tables": {"1": [4, 6], "window": [4, 6]}}]}
del STEP["sequences"][0]["block_table"]
OF_STEPS = ["--groups", "1:4,window:4"]


@pytest.fixture
def refusal(capsys, monkeypatch):
    """What `build` says of a line."""

    def told(line, *options):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line.encode())))
        code = main(["build", *options])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1), line
        return err

    return told


@pytest.mark.parametrize(
    ("line", "options", "names"),
    [
        (BATCH, [], ["block_size", "groups", "is_prompt", "sequences", "seq_id", "block_table"]),
        (STEP, OF_STEPS, ["sequences", "seq_id", "block_tables", "1", "window"]),
    ],
    ids=["list builder", "persistent builder"],
)
@pytest.mark.parametrize("escaped", [False, True])
def test_a_name_stands_once_at_every_depth(refusal, line, options, names, escaped):
    for name in names:
        again = f"\\u{ord(name[0]):04x}{name[1:]}" if escaped else name
        text = json.dumps(line).replace(f'"{name}": ', f'"{again}": 1, "{name}": ', 1)
        assert refusal(text, *options) == f"line 1: {name}: stands twice in one object\n"


@pytest.mark.parametrize("value", ["no", "false", "", 1, 0, 1.0, [], {}])
@pytest.mark.parametrize("path", ["chunked_prefill", "groups[0].is_prompt", "groups[0].prefix_cache_hit"])
def test_a_truth_value_is_true_or_false(refusal, path, value):
    batch = json.loads(json.dumps(BATCH))
    (batch if "." not in path else batch["groups"][0])[path.rpartition(".")[2]] = value
    assert refusal(json.dumps(batch)) == f"line 1: {path}: {json.dumps(value)} is not true or false\n"


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", ["seq_id", "query_len", "context_len"])
def test_a_truth_value_is_no_number(refusal, name, value):
    step = json.loads(json.dumps(STEP))
    step["sequences"][0][name] = value
    said = refusal(json.dumps(step), *OF_STEPS)
    assert said == f"line 1: sequences[0].{name}: {json.dumps(value)} is not an integer\n"
