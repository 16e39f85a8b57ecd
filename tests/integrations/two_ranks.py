"""A rank of a test: two_ranks.py FOLDER RESULT FAULT COMPILER INTERLEAVE.

Rank 0 writes what its engine said as JSON.
"""

import json
import os
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch  # noqa: E402
from ranks import FirstRank, OtherRank, RankError, sharded, whole  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 40, 20, 9)]
POOL = {"num_blocks": 16, "max_num_reqs": 4, "max_num_batched_tokens": 32, "block_size": 8}
NEW = 6


def dies(rank, part):
    """The process of a rank ends without a word when it comes to this part of a step for the fifth time."""
    inner, steps = getattr(rank, part), iter(range(4))

    def ends(*args):
        if next(steps, None) is None:
            os._exit(7)
        return inner(*args)

    setattr(rank, part, ends)


def main(folder, result, fault, compiler, interleave):
    torch.set_num_threads(1)
    interleave = int(interleave)
    model, number = (whole if interleave else sharded)(folder), int(os.environ["RANK"])
    options = {**POOL, "interleave": interleave, "compile": compiler != "none" and {"backend": compiler}}
    rank = OtherRank(model, **options) if number else FirstRank(model, **options)
    if fault == str(number):
        dies(rank, "_forward" if number else "_run_steps")  # while it computes, or before it says what runs
    if number:
        rank.serve()
        return torch.distributed.destroy_process_group()
    output = rank.complete(PROMPTS, NEW)
    messages = rank.messages
    rank.add_request(PROMPTS[1], NEW)
    rank.step()
    before = messages.count, messages.nbytes
    rank.step()
    decode = messages.nbytes - before[1]
    weight = model.model.layers[0].self_attn.q_proj.weight
    heads = (weight if interleave else weight.to_local()).shape[0]
    found = {"output": output, "messages": messages.count, "nbytes": messages.nbytes, "decode": decode, "rows": heads}
    found |= {"block_size": rank.block_size, "preemptions": rank.preemptions}
    found["graphs"] = counters["stats"]["unique_graphs"]
    Path(result).write_text(json.dumps(found))
    rank.close()
    return torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (RankError, ValueError) as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)  # as ranks.py does
