"""compute-sanitizer over the nodes that fetch, advance and correct steps, and the kernel that plans them.

    python benchmarks/sanitized_nodes.py [--steps 150] [--tools memcheck,racecheck] [--limit 100] [--save FILE]

Runs itself with ``--work`` under each tool: random steps and steps ahead, each compared with plain host lists as in
gpu_race.py and gpu_ahead.py, overlapped steps, and FlashInfer's plans where attn-flashinfer is there. Exit code 1 where
a tool reports an error or a step is wrong, 3 where compute-sanitizer is not on this machine. A tool that does not end
within ``--limit`` seconds is said to be unfinished.
"""

import argparse
import glob
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOUND_ERRORS = 86
ELSEWHERE = ("/usr/local/cuda*/bin/compute-sanitizer", "/usr/local/cuda*/compute-sanitizer/compute-sanitizer")
STANDIN = Path(__file__).parent.parent / "plugins" / "attn-flashinfer" / "tests"


def sanitizer():
    """The path of compute-sanitizer; None where it is not on this machine."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    found = [path for home in homes for path in glob.glob(f"{home}/bin/compute-sanitizer")]
    found += [path for pattern in ELSEWHERE for path in sorted(glob.glob(pattern))]
    return shutil.which("compute-sanitizer") or (found[0] if found else None)


def overlapped(steps, device):
    """Steps of drafts, built before the verdicts of the last one are known: the nodes that correct lengths run."""
    import torch
    from gpu_work import BLOCK_SIZE, Backend, captured

    from attncore import InputBatch, MetadataBuilder

    rows, width, drafts = 8, 64, 4
    batch = InputBatch(max_num_reqs=rows, max_model_len=width * BLOCK_SIZE, block_size=BLOCK_SIZE)
    rejected = torch.zeros(rows, dtype=torch.int32, device=device)
    builder = MetadataBuilder(
        batch, Backend(device), max_num_batched_tokens=256, decode_threshold=drafts, num_rejected=rejected,
        transport="copy" if device == "cpu" else "graph",
    )  # fmt: skip
    for row in range(rows):
        batch.add_request(row, range(1 + row * width, 1 + (row + 1) * width), 40 + row)
    lengths = [44 + row for row in range(rows)]
    metadata = builder.capture(rows, drafts)
    graph = captured(metadata.record, device)
    verdicts, wrong = None, 0
    for step in range(steps):
        now = {row: (row + step) % drafts for row in range(rows)}
        metadata = builder.build(query_len=drafts, bucket=rows, overlapped=verdicts is not None)
        metadata.replay(graph)
        wrong += metadata.seq_lens.tolist() != lengths
        rejected.copy_(torch.tensor(list(now.values()), dtype=torch.int32))
        if verdicts is not None:
            batch.rollback_many(verdicts)
        verdicts = now
        lengths = [length + drafts - now[row] for row, length in enumerate(lengths)]
    return {"overlapped": steps, "wrong": wrong}


def plans(count, device):
    """The kernel that plans, over random settings, beside a plan in plain Python."""
    sys.path.insert(0, str(STANDIN))
    import random

    import torch
    from attn_flashinfer import device_plan
    from flashinfer_standin_plan import PlanFacts, write_plan

    draw, wrong = random.Random(0), 0
    for _ in range(count):
        size, heads, tensor_cores = draw.choice((1, 8, 33, 64)), draw.choice((1, 8)), draw.random() < 0.6
        query_len = draw.choice((1, 4)) if tensor_cores else 1
        one = PlanFacts(
            size, query_len, heads * 4, heads, draw.choice((1, 16, 64)), tensor_cores=tensor_cores, processors=132
        )
        sizes = device_plan.Sizes(size, query_len, heads * 4, heads, one.page_size, -1, 132)
        indptr = [0]
        for _ in range(size):
            indptr.append(indptr[-1] + draw.choice((0, 1, draw.randint(1, 512))))
        expected = torch.zeros(1 << 16, dtype=torch.uint8)
        layout = device_plan.layout_of(write_plan(indptr, one, expected.numpy()), sizes)
        workspace = torch.full((1 << 16,), 0x7F, dtype=torch.uint8, device=device)
        row = device_plan.table_row(layout, sizes, workspace.data_ptr())
        device_plan.DevicePlan(torch.tensor(indptr, dtype=torch.int32, device=device), [row])()
        found = device_plan.words_that_run_reads(workspace, layout, sizes)
        right = device_plan.words_that_run_reads(expected, layout, sizes)
        wrong += any(not torch.equal(array, found[name]) for name, array in right.items())
    return {"plans": count, "wrong": wrong}


def work(steps, device):
    """What is run under a tool; exit code 1 where a step was wrong."""
    import gpu_ahead
    import gpu_race

    found = []

    def note(one):
        found.append(one)
        print(json.dumps(one), flush=True)

    try:
        note(plans(30 if device == "cuda" else 5, device))
    except ImportError as error:
        note({"plans": 0, "wrong": 0, "not run": str(error)})
    note(overlapped(min(steps, 60), device))
    for transport in ("copy",) if device == "cpu" else ("graph", "copy"):
        note(gpu_ahead.race(steps, device, transport, 2, 5))
        note(gpu_race.race(steps, 2, transport, device, 5))
    return int(any(one["wrong"] for one in found))


def checked(tool, name, args):
    """What one tool says of ``--work``."""
    command = [
        tool, "--tool", name, "--error-exitcode", str(FOUND_ERRORS), sys.executable, "-P", __file__, "--work",
        "--steps", str(args.racecheck_steps if name == "racecheck" else args.steps),
    ]  # fmt: skip
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            text, _ = process.communicate(timeout=args.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            text, _ = process.communicate()
            code = "unfinished"
        else:
            code = process.returncode
    lines = text.splitlines()
    reports = [line for line in lines if line.startswith("=========")]
    return {"tool": name, "exit_code": code, "reports": reports[:60], "output": lines[-12:]}


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", action="store_true", help="run the steps themselves, under no tool")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of --work")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--racecheck-steps", type=int, default=30, help="of racecheck, under which a step takes long")
    parser.add_argument("--limit", type=float, default=100, help="seconds for each tool")
    parser.add_argument("--save", type=Path, help="the result file, JSON")
    args = parser.parse_args(argv)
    if args.work:
        return work(args.steps, args.device)
    tool = sanitizer()
    if tool is None:
        print("nothing is checked: compute-sanitizer is not on this machine")
        return 3
    found = {"tool": tool, "steps": args.steps, "runs": []}
    for name in args.tools.split(","):
        found["runs"].append(checked(tool, name, args))
        print(json.dumps(found["runs"][-1], indent=1), flush=True)
        if args.save:
            args.save.parent.mkdir(parents=True, exist_ok=True)
            args.save.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(run["exit_code"] not in (0, "unfinished") for run in found["runs"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
