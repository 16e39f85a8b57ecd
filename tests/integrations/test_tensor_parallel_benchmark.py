"""benchmarks/tensor_parallel.py measures what it says: tried on two processes, without a GPU."""

import json
import pathlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from integrations.start_ranks import started  # noqa: E402

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "tensor_parallel.py"

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")


def test_ranks_say_what_one_says(tmp_path):
    words = ("--device", "cpu", "--shapes", "tiny", "--backends", "reference", "--prompt", "5", "--new", "3")
    codes, said = started(PROGRAM, *words, "--save", tmp_path / "found.json", OMP_NUM_THREADS="1")
    assert codes == [0, 0], said
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["ranks"], found["requests"]) == (2, 64)
    one, ranks = found["rows"]
    assert (one["way"], ranks["way"]) == ("one", "ranks")
    assert ranks["agrees"] == 1
    assert one["decode_steps"] == ranks["decode_steps"] == 2
    assert ranks["part"] == pytest.approx(ranks["decode_us"] / one["decode_us"])
    assert ranks["floor_us"] == ranks["part_us"] + ranks["collectives_us"] > ranks["collectives_us"] > 0
    assert ranks["floor_part"] == pytest.approx(ranks["floor_us"] / one["decode_us"])
