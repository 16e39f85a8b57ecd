"""benchmarks/context_parallel.py measures what it says: tried on two processes, without a GPU."""

import json
import pathlib

import pytest

torch = pytest.importorskip("torch")

from integrations.start_ranks import started  # noqa: E402

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "context_parallel.py"
WORDS = ("--device", "cpu", "--shape", "tiny", "--steps", "1")

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")


def test_one_rank_beside_two(tmp_path):
    codes, said = started(PROGRAM, *WORDS, "--contexts", "1,45", "--decodes", "3", "--save", tmp_path / "found.json")
    assert codes == [0, 0], said
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ranks"] == 2
    assert [(row["context"], row["way"]) for row in found["rows"]] == [
        (1, "one"), (1, "ranks"), (45, "one"), (45, "ranks")
    ]  # fmt: skip
    for one, ranks in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        assert ranks["speed_up"] == one["step_us"] / ranks["step_us"]
        assert ranks["sent_bytes"] == 2 * 3 * 4 * (16 * 4 + 4)  # layers, decodes, heads, output and log-sum-exp
        assert ranks["scale"] > 0
        assert ranks["error"] < 1e-5 * ranks["scale"]


@pytest.mark.slow
def test_outputs_that_differ_fail():
    codes, _ = started(PROGRAM, *WORDS, "--contexts", "45", "--decodes", "3", "--tolerance", "-1")
    assert codes == [1, 0]
