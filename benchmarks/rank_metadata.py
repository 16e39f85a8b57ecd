"""A step's metadata on two ranks: each builds its own from rank 0's small message, or rank 0 builds and broadcasts it.

    torchrun --nproc-per-node 2 benchmarks/rank_metadata.py [--decodes 64,256] [--context 600] [--save FILE]

No model and no GPU: processes on one machine, over gloo, with the messages of examples/ranks.py. One request in 16 gets
a block in each step. A row for each number of decodes, in turns, and each of

``own``: rank 0 says which blocks are new and that all decode; every rank tells its batch so, and builds;
``message``: rank 0 builds, and sends the fields that the backend's spec declares (``asdict_zerocopy``) in one pickled
message, of which the others make metadata (``metadata_from_fields``);
``arrays``: the same, but each array is a broadcast of its own from the builder's memory, and the message has the rest.

Of a block table the columns that hold blocks are sent. ``nbytes`` is the median of what rank 0 broadcasts a step,
``ready_us`` the median time from its start on rank 0 until every rank has metadata, and ``rank_0_us`` the part of
rank 0, which can run the model after it. ``ready_p10_us`` is the 10th percentile, and ``cpu_us`` the median processor
time of a step on rank 0 and on rank 1: other work on the machine changes these least. Ranks wait for the message of a
step when it starts. Exit code 1 where a field of any step differs between the ranks.
"""

import argparse
import json
import os
import pickle
import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent.parent / "examples"), str(Path(__file__).parent)]
from gpu import machine  # noqa: E402
from ranks import Messages  # noqa: E402

import attncore  # noqa: E402
from attncore.builder import metadata_from_fields  # noqa: E402

WAYS = ("own", "message", "arrays")
BLOCK = 16
STEPS = 2 * BLOCK
"""Of a turn: each request gets two blocks."""


class Rank:
    """The requests of a turn, and a step of theirs in each way. Ranks differ in who speaks."""

    def __init__(self, count, context, messages):
        self.count, self.context, self.messages, self.arrays_nbytes = count, context, messages, 0
        blocks = 1 + (context + 2 * STEPS) // BLOCK
        self.num_blocks = count * blocks + 1
        host = attncore.Host.assume("cpu")
        shape = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "float32", "block_size": BLOCK}
        self.backend = attncore.select(**shape, backend="reference", host=host).create()
        self.needed = self.backend.spec.host_needs | self.backend.spec.device_needs
        self.batch = attncore.InputBatch(
            max_num_reqs=count, max_model_len=blocks * BLOCK, block_size=BLOCK, num_blocks=self.num_blocks
        )
        self.builder = attncore.MetadataBuilder(self.batch, self.backend, max_num_batched_tokens=count)
        self.free = []

    def restart(self):
        """Requests whose contexts are ``context`` tokens in the middle of a turn; their last blocks fill one by one."""
        for name in self.batch.req_ids:
            self.batch.remove_request(name)
        self.free = list(range(self.num_blocks - 1, 0, -1))
        for name in range(self.count):
            computed = self.context - STEPS // 2 - name % BLOCK
            self.batch.add_request(name, [self.free.pop() for _ in range(-(-computed // BLOCK))], computed)

    def first(self, way):
        """A step on rank 0: the metadata."""
        blocks = {name: [self.free.pop()] for name in self.batch.needs_block()}
        if way == "own":
            self.messages.send([pickle.dumps(("built", blocks))])
            return self.built(blocks)
        metadata = self.built(blocks)
        fields = metadata.asdict_zerocopy()
        fields = {name: value for name, value in fields.items() if name in self.needed or not hasattr(value, "shape")}
        if "block_table" in fields:
            fields["block_table"] = fields["block_table"][:, : -(-metadata.max_seq_len // BLOCK)]
        arrays = [name for name, value in fields.items() if hasattr(value, "shape")]
        if way == "message":  # NumPy's: they are pickled faster than tensors
            fields |= {name: fields[name].numpy() for name in arrays}
            self.messages.send([pickle.dumps(("received", fields))])
            return metadata
        tensors = [fields.pop(name).contiguous() for name in arrays]
        places = {name: (one.dtype, one.shape) for name, one in zip(arrays, tensors, strict=True)}
        self.messages.send([pickle.dumps(("received", fields, places))])
        for one in tensors:
            dist.broadcast(one, 0, group=self.messages.group)
        self.arrays_nbytes += sum(one.nbytes for one in tensors)
        return metadata

    def other(self):
        """The same step on another rank."""
        ((name, *arguments),) = self.messages.receive()
        return getattr(self, name)(*arguments)

    def built(self, blocks):
        self.batch.append_blocks_many(blocks)
        return self.builder.build()

    def received(self, fields, places=None):
        for name, (dtype, shape) in (places or {}).items():
            fields[name] = torch.empty(shape, dtype=dtype)
            dist.broadcast(fields[name], 0, group=self.messages.group)
        return metadata_from_fields(fields, self.backend)

    def checked(self, metadata):
        """A number that is the same where the fields that the backend needs are."""
        width = -(-metadata.max_seq_len // BLOCK)
        found = zlib.crc32(str((metadata.num_reqs, metadata.num_decodes, metadata.max_seq_len)).encode())
        for name in sorted(self.needed & metadata.asdict_zerocopy().keys()):
            array = getattr(metadata, name)
            found = zlib.crc32((array[:, :width] if name == "block_table" else array).contiguous().numpy(), found)
        return found


class Step(NamedTuple):
    """A step on one rank. Times are nanoseconds of clocks that the processes of a machine share."""

    start: int
    end: int
    cpu: int
    nbytes: int
    held: int


def turn(rank, way, number):
    """Of each step on this rank: start and end, processor time, bytes so far, and what its metadata holds."""
    rank.restart()
    found = []
    for _ in range(STEPS):
        dist.barrier(group=rank.messages.group)
        if not number:
            time.sleep(0.0005)  # the others wait for the message meanwhile
        cpu, start = time.process_time_ns(), time.perf_counter_ns()
        metadata = rank.other() if number else rank.first(way)
        end, cpu = time.perf_counter_ns(), time.process_time_ns() - cpu
        found.append(Step(start, end, cpu, rank.messages.nbytes + rank.arrays_nbytes, rank.checked(metadata)))
    return found


def rows_of(count, args, messages):
    """Rows of a number of decodes, on rank 0; on others none."""
    number, every = dist.get_rank(), [None] * dist.get_world_size()
    rank, before = Rank(count, args.context, messages), messages.nbytes
    steps = {way: [] for way in WAYS}
    for one in range(args.turns + 1):  # the first is a warm-up
        for way in WAYS:
            dist.all_gather_object(every, turn(rank, way, number), group=messages.group)
            for ranks in zip(*every, strict=True):
                sent, before = ranks[0].nbytes - before, ranks[0].nbytes
                steps[way].append((one > 0, sent, ranks))
    rank.builder.close()
    return [] if number else [{"decodes": count, "context": args.context, **row_of(*way)} for way in steps.items()]


def row_of(way, steps):
    """The row of a way, of all steps but those of the warm-up; these are compared, too."""
    timed = [(sent, ranks) for counts, sent, ranks in steps if counts]
    ready = [max(one.end for one in ranks) - ranks[0].start for _, ranks in timed]
    return {
        "way": way,
        "nbytes": statistics.median(sent for sent, _ in timed),
        "ready_us": statistics.median(ready) / 1e3,
        "ready_p10_us": statistics.quantiles(ready, n=10)[0] / 1e3,
        "rank_0_us": statistics.median(ranks[0].end - ranks[0].start for _, ranks in timed) / 1e3,
        "cpu_us": [statistics.median(ranks[one].cpu for _, ranks in timed) / 1e3 for one in (0, 1)],
        "same": all(len({one.held for one in ranks}) == 1 for *_, ranks in steps),
    }


def arguments(words):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--decodes", default="64,256", help="numbers of decodes in a step")
    add("--context", type=int, default=600, help=f"tokens of a request, {2 * STEPS} at least")
    add("--turns", type=int, default=20, help=f"of {STEPS} steps, for each way")
    add("--save", metavar="FILE")
    args = parser.parse_args(words)
    if args.context < 2 * STEPS:
        parser.error(f"--context: {args.context} given; at least {2 * STEPS}")
    return args


def main(words=None):
    args = arguments(words)
    if int(os.environ.get("WORLD_SIZE", 0)) < 2:
        print("rank_metadata.py: start two ranks or more, by torchrun", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    messages, rows = Messages(), []
    for count in map(int, args.decodes.split(",")):
        for row in rows_of(count, args, messages):
            print(json.dumps(row), flush=True)
            rows.append(row)
    if args.save and rows:
        found = {"machine": machine(), "ranks": dist.get_world_size(), "steps": args.turns * STEPS, "rows": rows}
        Path(args.save).write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()
    return int(not all(row["same"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
