"""One engine over several processes, by torch.distributed: each has a part of
every layer (transformers' tp_plan).

torchrun --nproc-per-node 2 examples/ranks.py MODEL Once upon
torchrun --nproc-per-node 2 examples/ranks.py --share-keys MODEL Once upon

Rank 0 schedules. Before each step it sends the others what changed and what
runs, as one message; each builds the step's metadata for its own caches.
Sampling is the same on every rank: all have all logits and the same seed.
"""

from __future__ import annotations

import argparse
import datetime
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from command_line import asked_of_ranks

if __name__ == "__main__":
    ASKED = asked_of_ranks(__doc__)  # first: the libraries take seconds, and may not be installed

try:
    from worker import Worker  # first: it says what is not installed
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"ranks.py: {error}")

# isort: split
import torch
import torch.distributed as dist
from engine import Engine
from run import Run
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

FIRST = 256
"""Bytes of a message that are sent at once; what is longer follows in a second part."""


class RankError(RuntimeError):
    """A rank failed or is gone. The others cannot go on: each has a part of the model, or of the keys."""


class Messages:
    """Pickled calls from rank 0 to the others, over gloo: on the host, whatever the model's own group is.

    Ranks trust each other, as torch.distributed has them do: its own messages are pickled, too."""

    def __init__(self) -> None:
        self.rank, self.count, self.nbytes = dist.get_rank(), 0, 0
        # Ranks wait for the next request, however late it comes. One whose process ends is noticed at once.
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365))

    def send(self, calls: list[bytes]) -> None:
        data = b"".join(calls)
        data = len(data).to_bytes(8, "little") + data
        self._broadcast(torch.frombuffer(bytearray(data[:FIRST].ljust(FIRST, b"\0")), dtype=torch.uint8))
        if data[FIRST:]:
            self._broadcast(torch.frombuffer(bytearray(data[FIRST:]), dtype=torch.uint8))
        self.count, self.nbytes = self.count + 1, self.nbytes + max(len(data), FIRST)

    def receive(self) -> list[tuple[Any, ...]]:
        first = self._broadcast(torch.empty(FIRST, dtype=torch.uint8, device="cpu")).numpy().tobytes()
        size = 8 + int.from_bytes(first[:8], "little")
        rest = torch.empty(max(size - FIRST, 0), dtype=torch.uint8, device="cpu")
        rest = (self._broadcast(rest) if len(rest) else rest).numpy().tobytes()
        calls = io.BytesIO((first + rest)[8:size])
        return [pickle.load(calls) for _ in iter(lambda: calls.tell() < size - 8, False)]

    def _broadcast(self, data: torch.Tensor) -> torch.Tensor:
        with ending(self.rank, "no message came through"):
            dist.broadcast(data, 0, group=self.group)
        return data


@contextmanager
def ending(rank: int, what: str) -> Iterator[None]:
    """RankError for whatever fails inside: a step of one rank alone is none."""
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise RankError(
            f"rank {rank}: {what} ({said}); a rank failed or is gone, and the others cannot run without its part: "
            "all end; start them again"
        ) from error


class FirstRank(Engine):
    """Rank 0: an Engine that has the other ranks do what it does. A step that fails ends it, and them."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.messages, self.calls = Messages(), []  # of this step

    def _noted(self, *call: Any) -> None:
        """Pickled at once: the engine goes on to change lists of blocks and tokens."""
        self.calls.append(pickle.dumps(call))

    def _add(self, *args: Any) -> None:
        self._noted("_add", *args)
        super()._add(*args)

    def _append(self, *args: Any) -> None:
        self._noted("_append", *args)
        super()._append(*args)

    def _remove(self, *args: Any) -> list[int]:
        self._noted("_remove", *args)
        return super()._remove(*args)

    def _run_steps(self, *args: Any) -> None:
        self._send("_run_steps", *args)
        super()._run_steps(*args)

    def _send(self, *last: Any) -> None:
        self._noted(*last)
        self.messages.send(self.calls)
        self.calls = []

    def _tried(self, part: Callable[[Run], None], run: Run) -> None:
        with ending(self.messages.rank, "the step failed"):
            part(run)

    def close(self) -> None:
        self._send("close")
        super().close()


class OtherRank(Worker):
    """A rank that does what rank 0 says, until it closes."""

    def serve(self) -> None:
        messages = Messages()
        while True:
            for name, *args in messages.receive():
                with ending(messages.rank, "the step failed"):
                    getattr(self, name)(*args)
                if name == "close":
                    return


def refuse_unshardable(config: Any, ranks: int) -> None:
    """ValueError for a model whose layers transformers' tp_plan cannot share out to so many ranks."""
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"model: transformers has no tp_plan for {config.model_type}, so that none of its layers can be shared out "
            "to several ranks; run it on one"
        )
    for part, kind, field in (("q_proj", "query", "num_attention_heads"), ("k_proj", "key", "num_key_value_heads")):
        heads = getattr(text, field, None) or text.num_attention_heads
        layer = next((name for name, how in plan.items() if name.endswith(part) and "colwise" in how), None)
        if layer and heads % ranks:
            raise ValueError(
                f"layer {layer}: {ranks} ranks do not divide the number of its {kind} heads, {heads}; give a "
                f"number that does"
            )


def sharded(name: str, **options: Any) -> Any:
    """This rank's part of a model.

    The whole model is loaded to the host first: loading parts alone, ``from_pretrained(distributed_config=...)``, takes
    the package accelerate."""
    ranks, device = _place()
    refuse_unshardable(AutoConfig.from_pretrained(name), ranks)
    _start(device)
    model = AutoModelForCausalLM.from_pretrained(name, **options)
    mesh, parts = dist.init_device_mesh(device, (ranks,)), DistributedConfig(tp_size=ranks, tp_plan="auto")
    return type(model).maybe_distribute_model(model, parts, mesh).to(device)


def whole(name: str, **options: Any) -> Any:
    """The whole model on this rank's device: for ``FirstRank`` and ``OtherRank`` with ``interleave``."""
    _, device = _place()
    _start(device)
    return AutoModelForCausalLM.from_pretrained(name, **options).to(device)


def _place() -> tuple[int, str]:
    """How many ranks there are, and the kind of device, by what torchrun has set."""
    if "RANK" not in os.environ:
        raise ValueError("RANK is not set; start every rank by torchrun, as --help shows")
    return int(os.environ["WORLD_SIZE"]), "cuda" if torch.cuda.is_available() else "cpu"


def _start(device: str) -> None:
    """Starts torch.distributed, unless it runs."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")


def main(asked: argparse.Namespace) -> int:
    name, text = asked.model, " ".join(asked.words) or "Once upon a time"
    options = {"interleave": 1} if asked.share_keys else {}
    try:
        load = whole if asked.share_keys else sharded
        model = load(name, **({"dtype": torch.bfloat16} if torch.cuda.is_available() else {}))
        if dist.get_rank():
            OtherRank(model, **options).serve()
        else:
            engine = FirstRank(model, tokenizer=AutoTokenizer.from_pretrained(name), **options)
            print(text, end="", flush=True)
            for _, piece in engine.generate([text], max_new_tokens=100):
                print(piece, end="", flush=True)
            print()
            engine.close()
        dist.destroy_process_group()  # while Python is there: a thread of gloo's may otherwise abort the process
    except (OSError, ValueError, RankError) as error:
        print(f"ranks.py: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        if isinstance(error, RankError):
            os._exit(2)  # at once: the library's threads wait for a rank that is gone
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(ASKED))
