"""A start of the example engine with compiled layers, for test_second_start.py: prints as JSON what it found."""

import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples")]

from engine import Engine  # noqa: E402
from integrations.models import decoder  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

POOL = {"num_blocks": 64, "max_num_reqs": 4, "max_num_batched_tokens": 32, "block_size": 8}
PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 40)]

if __name__ == "__main__":
    engine = Engine(decoder("llama", hidden_size=int(sys.argv[1])), compile=True, **POOL)
    tokens = engine.complete(PROMPTS, 6)
    found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("miss", "hit", "bypass")}
    print(json.dumps({**found, "graphs": counters["stats"]["unique_graphs"], "tokens": tokens}))
