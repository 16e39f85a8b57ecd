"""``attncore build`` in one process: a line in, a line out, by shape of batch."""

import json

import pytest

from attncore.json_lines.list_builder import build_batch, parse_batch

SHAPES = {"100 groups of 1 block": (100, 1, 1), "1 group of 100": (1, 100, 1), "1 sequence of 100": (1, 1, 100)}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_line(benchmark, shape):
    groups, sequences, blocks = SHAPES[shape]
    table, context = list(range(1000, 1000 + blocks)), 16 * blocks - 3
    rows = [{"seq_id": i, "query_len": 1, "context_len": context, "block_table": table} for i in range(sequences)]
    line = json.dumps({"block_size": 16, "groups": [{"is_prompt": False, "sequences": rows}] * groups}).encode()
    benchmark.group, benchmark.extra_info["way"] = f"attncore build, {shape}", "batch file"
    benchmark.pedantic(lambda: json.dumps(build_batch(parse_batch(line))), rounds=200, warmup_rounds=5)
