"""benchmarks/rank_metadata.py measures what it says: tried on two processes."""

import json
import pathlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from integrations.start_ranks import started  # noqa: E402

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "rank_metadata.py"

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")


def test_every_rank_has_the_metadata_of_every_step(tmp_path):
    words = ("--decodes", "3,40", "--context", "200", "--turns", "1", "--save", tmp_path / "found.json")
    codes, said = started(PROGRAM, *words)
    assert codes == [0, 0], said
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["ranks"], found["steps"]) == (2, 32)
    ways = ("own", "message", "arrays")
    assert [(row["decodes"], row["way"]) for row in found["rows"]] == [(size, way) for size in (3, 40) for way in ways]
    for row in found["rows"]:
        assert row["same"]
        assert 0 < row["rank_0_us"] <= row["ready_us"]
    own, message, arrays = found["rows"][3:]
    assert own["nbytes"] == 256
    # slots as int64, four fields of a row and two of its starts, 13 columns of its table: int32
    assert min(message["nbytes"], arrays["nbytes"]) > 40 * (8 + 13 * 4)
    assert max(message["nbytes"], arrays["nbytes"]) < 2 * 40 * (8 + 6 * 4 + 13 * 4)


FAULTY = """
import copy, sys
sys.path.insert(0, {folder!r})
import rank_metadata

class Rank(rank_metadata.Rank):
    def {part}(self, *arguments):
        metadata = super().{part}(*arguments)
        if not rank_metadata.dist.get_rank():
            return metadata
        metadata = copy.copy(metadata)
        metadata.{field} = metadata.{field} + 1
        return metadata

rank_metadata.Rank = Rank
sys.exit(rank_metadata.main(["--decodes", "3", "--context", "64", "--turns", "1", "--save", sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "field", "wrong"),
    [("received", "seq_lens", {"message", "arrays"}), ("built", "slot_mapping", {"own"})],
)
def test_metadata_that_differs_between_ranks_fails(tmp_path, part, field, wrong):
    program = tmp_path / "faulty.py"
    program.write_text(FAULTY.format(folder=str(PROGRAM.parent), part=part, field=field))
    codes, said = started(program, tmp_path / "found.json")
    assert codes == [1, 0], said
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert {row["way"] for row in rows if not row["same"]} == wrong
