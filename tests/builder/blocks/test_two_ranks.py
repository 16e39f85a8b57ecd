"""Two processes, each with half of the keys, answer what one does: torch.distributed with gloo."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch.distributed

RANK = pathlib.Path(__file__).parent / "context_parallel_rank.py"


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch is built without gloo")
@pytest.mark.parametrize("interleave", [1, 4])
def test_two_ranks_merge_to_the_whole(tmp_path, interleave):
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), "2", str(interleave), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors for _, errors in answers)
    whole, other = (json.loads(output.splitlines()[-1]) for output, _ in answers)
    assert whole["steps"] == 8
    assert whole["max_abs_error"] < 1e-5
    assert whole["shard_tokens"] + other["shard_tokens"] == whole["tokens"]
    assert min(whole["shard_tokens"], other["shard_tokens"]) > 0
