"""Interrupts calls by alarms while steps are sent to a device, and compares what the graphs of these steps read.

    python tests/device_alarms.py --seconds 60 --transport graph

On a GPU where there is one; else the nodes of the transport ``graph`` run on the host. A call that was interrupted is
made again as docs/threads-and-processes.md says. The tests run a short version
(``tests/builder/device/test_device_alarms.py``).
"""

import argparse
import dataclasses
import random
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from interrupted_calls import ByAlarm

from attncore import InputBatch, MetadataBuilder, select
from attncore.errors import CaptureError
from attncore.graphs import capturing, launch, new_graph
from attncore.reference import ReferenceBackend

BLOCK, MODEL_LEN, MAX_REQS = 4, 256, 8
SIZES = {2: 1, 4: 1, 8: 1, 5: 2}
"""Rows of the captured sizes, and tokens of each row."""
FIELDS = ("slot_mapping", "seq_lens", "query_start_loc", "positions", "block_table", "logits_indices")
DECLARED = ("seq_lens", "query_start_loc", "block_table", "paged_kv_indptr")
STEPS = 300
"""Then a new engine begins."""


class ByAlarmBesideNodes(ByAlarm):
    """Leaves alone what is one launch on a GPU, and calls of Python here."""

    def _handle(self, number, frame):
        inside = frame
        while inside is not None:
            if inside.f_code.co_filename.endswith(("graphs.py", "nodes_on_host.py")):
                signal.setitimer(signal.ITIMER_REAL, 15e-6)
                return
            inside = inside.f_back
        super()._handle(number, frame)


class Engine:
    """A batch, its builder, and for each captured size a graph that copies the fields of its step."""

    def __init__(self, seed, transport, device):
        self.draw, self.device, self.transport = random.Random(seed), device, transport
        self.batch = InputBatch(max_num_reqs=MAX_REQS, max_model_len=MODEL_LEN, block_size=BLOCK)
        sizes = {"num_heads": 2, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "block_size": BLOCK}
        config = select(**sizes, backend="reference").create(device=device).config
        spec = dataclasses.replace(
            config.spec, host_lengths="bounded", host_needs=frozenset(), cuda_graph="always",
            device_needs=frozenset(self.draw.sample(DECLARED, 3)),
        )  # fmt: skip
        backend = ReferenceBackend(dataclasses.replace(config, spec=spec))
        self.builder = MetadataBuilder(
            self.batch, backend, max_num_batched_tokens=128, decode_threshold=2, transport=transport
        )
        self.graphs, self.read = {}, {}
        for size, each in SIZES.items():
            self._capture(size, each)
        self.requests, self.next_id, self.next_block = {}, 0, 1
        self.late, self.fired = [], Counter()

    def _capture(self, size, each):
        metadata = self.builder.capture(size, each)
        for name in FIELDS:
            getattr(metadata, name)
        graph = self.graphs[size] = new_graph(self.device)
        with capturing(graph):
            launch(metadata.record)
            self.read[size] = {name: launch(self._copy, metadata, name) for name in FIELDS}

    @staticmethod
    def _copy(metadata, name):
        return getattr(metadata, name).clone()

    def interrupted(self, name, function):
        """Makes a call, which an alarm may interrupt, and another what takes it back; whether one did."""
        delays = [
            self.draw.uniform(1e-6, 250e-6),
            *(self.draw.uniform(1e-6, 80e-6) for _ in range(self.draw.choice([0, 0, 1, 2]))),
        ]
        alarm = (ByAlarm if self.device != "cpu" else ByAlarmBesideNodes)(delays[0], delays[1:])
        if self.draw.random() < 0.3:
            function()
            return False
        with alarm:
            function()
        self.fired[name] += bool(alarm.fired)
        return bool(alarm.fired)

    def run(self):
        for _ in range(STEPS):
            self.change()
            if not self.requests:
                continue
            if self.draw.random() < 0.35:
                self.run_ahead()
            else:
                self.build()
            for name, (_, computed) in self.requests.items():
                assert self.batch.num_computed_tokens(name) == computed
            if self.draw.random() < 0.2:
                self.settle()
            elif self.device != "cpu" and self.draw.random() < 0.2:
                torch.cuda._sleep(300_000)
        self.settle()
        for size in SIZES:
            self.builder.release(size)
        self.graphs.clear()
        self.read.clear()
        self.builder.close()

    def change(self):
        for _ in range(self.draw.randint(0, 3)):
            if self.draw.random() < 0.6 and len(self.requests) < MAX_REQS:
                name, self.next_id = f"r{self.next_id}", self.next_id + 1
                width = MODEL_LEN // BLOCK
                blocks, self.next_block = list(range(self.next_block, self.next_block + width)), self.next_block + width
                computed = self.draw.randint(0, 20)
                self.interrupted("add_request", lambda: self.batch.add_request(name, blocks, computed))  # noqa: B023
                if name in self.batch:
                    self.requests[name] = [blocks, computed]
            elif self.requests:
                name = self.draw.choice(list(self.requests))
                self.interrupted("remove_request", lambda: self.batch.remove_request(name))  # noqa: B023
                if name not in self.batch:
                    del self.requests[name]
        for name in [name for name, (_, computed) in self.requests.items() if computed > MODEL_LEN - 40]:
            self.batch.remove_request(name)
            del self.requests[name]

    def chosen(self, size):
        return self.draw.sample(list(self.requests), min(len(self.requests), self.draw.randint(1, size)))

    def build(self):
        size = self.draw.choice([None, *SIZES])
        if size is None:
            scheduled = {name: self.draw.choice([0, 1, 1, 3, 9]) for name in self.requests}
        else:
            chosen = self.chosen(size)
            scheduled = {name: SIZES[size] if name in chosen else 0 for name in self.requests}
        if not any(scheduled.values()):
            return
        before = self.builder.last_step
        self.interrupted("build", lambda: self.builder.build(scheduled, bucket=size))
        if self.builder.last_step == before:
            return
        metadata = self.builder.last_metadata
        running = {name: count for name, count in scheduled.items() if count}
        assert set(metadata.req_ids) == set(running)
        expected = self.expected(metadata.req_ids, running)
        self.compare({name: getattr(metadata.host, name).copy() for name in FIELDS}, expected, "host")
        if size is None:
            self.late.append(({name: getattr(metadata, name).clone() for name in FIELDS}, expected, "eager"))
        elif self.transport == "graph" and self.draw.random() < 0.15:
            step = self.builder.last_step
            while self.interrupted("abandon", metadata.abandon) and self.builder.last_step == step:
                pass
            return
        elif self.replayed(metadata, size):
            self.late.append((self.copied(size), expected, "graph"))
        for name, count in running.items():
            self.requests[name][1] += count

    def replayed(self, metadata, size):
        """Replays the step's graph; False where another step has been replayed since."""
        if not self.interrupted("replay", lambda: metadata.replay(self.graphs[size])):
            return True
        if self.transport == "graph":
            try:
                self.builder.build_empty(size).replay(self.graphs[size])
                return False
            except CaptureError:  # it was not replayed
                pass
        metadata.replay(self.graphs[size])
        return True

    def run_ahead(self):
        size = self.draw.choice([size for size, each in SIZES.items() if each == 1])
        chosen, count, before = self.chosen(size), self.draw.randint(1, 6), self.builder.last_step
        rest = {name: 0 for name in self.requests if name not in chosen}
        self.interrupted("run_ahead", lambda: self.builder.run_ahead(count, bucket=size, scheduled=rest))
        if self.builder.last_step == before:
            return
        steps, ran = self.builder.steps_ahead, 0
        assert set(steps.first.req_ids) == set(chosen)
        while steps.left:
            launched = steps.launched
            if self.draw.random() < 0.15 or (
                self.interrupted("replay ahead", lambda: steps.replay(self.graphs[size]))
                and steps.launched == launched
                and self.draw.random() < 0.3
            ):
                while self.interrupted("stop", steps.stop):
                    pass
                break
            if steps.launched == launched:
                steps.replay(self.graphs[size])
            expected = self.expected(steps.first.req_ids, dict.fromkeys(chosen, 1))
            self.late.append((self.copied(size), expected, "ahead"))
            for name in chosen:
                self.requests[name][1] += 1
            ran += 1
        assert len(steps) - ran in (0, 1)  # the replay that was interrupted before ``stop`` had run
        for name in chosen:
            self.requests[name][1] += len(steps) - ran

    def expected(self, order, counts):
        found = {name: [] for name in FIELDS} | {"query_start_loc": [0]}
        for name in order:
            blocks, computed = self.requests[name]
            length = computed + counts[name]
            for position in range(computed, length):
                found["positions"].append(position)
                found["slot_mapping"].append(blocks[position // BLOCK] * BLOCK + position % BLOCK)
            found["seq_lens"].append(length)
            found["query_start_loc"].append(found["query_start_loc"][-1] + counts[name])
            found["logits_indices"].append(found["query_start_loc"][-1] - 1)
            found["block_table"].append(blocks[: -(-length // BLOCK)])
        return found

    def copied(self, size):
        return {name: self.read[size][name].clone() for name in FIELDS}

    def settle(self):
        """Compares what lies on the device with what was expected."""
        late, self.late = self.late, []
        for found, expected, where in late:
            self.compare(found, expected, where)

    def compare(self, arrays, expected, where):
        for name, wanted in expected.items():
            found = arrays[name].tolist()
            if name == "block_table":
                found = [row[: len(blocks)] for row, blocks in zip(found, wanted, strict=False)]
            assert found[: len(wanted)] == wanted, (where, name, found, wanted)


@contextmanager
def sent(transport):
    """The device, inside of this; where there is no GPU, the nodes of the transport ``graph`` run on the host."""
    with ExitStack() as patches:
        if transport == "graph" and not torch.cuda.is_available():
            with mock.patch.object(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path]):
                from nodes_on_host import nodes_on_host
            patches.enter_context(nodes_on_host(lambda call, name: call))
            patches.enter_context(mock.patch.object(torch.cuda, "synchronize", return_value=None))
        yield "cuda:0" if torch.cuda.is_available() else "cpu"


def raise_alarms(transport, seconds, seed=0):
    """Runs engines one after another: how many, and how many calls of which name were interrupted."""
    fired, first = Counter(), seed
    with sent(transport) as device:
        end = time.monotonic() + seconds  # what is imported takes seconds, too
        while seed == first or time.monotonic() < end:
            engine = Engine(seed, transport, device)
            try:
                engine.run()
            except BaseException as error:
                raise AssertionError(f"engine {seed} with transport {transport}") from error
            fired += engine.fired
            seed += 1
    return seed - first, fired


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", choices=["copy", "graph"], default="graph")
    arguments = parser.parse_args()
    engines, fired = raise_alarms(arguments.transport, arguments.seconds, arguments.seed)
    print(f"{engines} engines, {sum(fired.values())} alarms: no inconsistent step")
    print(", ".join(f"{name} {count}" for name, count in fired.most_common()))


if __name__ == "__main__":
    main()
