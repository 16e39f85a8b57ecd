"""The same step over keys that several ranks share out: a thread each, which exchange by copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fuzz.layers.caches import nobodys
from fuzz.layers.compositions import is_plain
from fuzz.layers.parts import Part, Parts, Run
from fuzz.layers.settings import MAX_REQS, Tested
from torch import Tensor

from attncore import InputBatch, MetadataBuilder
from attncore.builder import ContextParallel
from attncore.graphs import capturing, launch, new_graph
from attncore.ranks import exchange, over_ranks

TIMEOUT = 600
"""Seconds, in which a rank's kernels may have to be compiled."""


@dataclass
class Group:
    """What ranks in threads have for a process group."""

    rank: int
    barrier: threading.Barrier
    running: threading.Lock
    """Whose turn it is: Triton's interpreter runs in one thread at a time."""
    sent: dict[int, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.barrier.parties

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        self.sent[self.rank] = sent
        self._wait()
        received.view(self.size, -1).copy_(torch.stack([self.sent[rank] for rank in range(self.size)]))
        self._wait()

    def _wait(self) -> None:
        self.running.release()
        try:
            self.barrier.wait(TIMEOUT)
        finally:
            self.running.acquire()


@contextmanager
def distributed() -> Iterator[None]:
    """torch.distributed as it runs for groups of threads."""
    with (
        mock.patch.multiple(
            dist, is_initialized=lambda: True, get_rank=lambda group: group.rank,
            get_world_size=lambda group: group.size,
        ),
        mock.patch.object(
            exchange, "_all_gather", lambda received, sent, group: group.all_gather(received, sent)
        ),
    ):  # fmt: skip
        yield


class OverRanks:
    def __init__(self, parts: Parts, tested: Tested) -> None:
        self.parts, self.settings, self.tested, self.draw = parts, parts.settings, tested, parts.draw
        self.backends: list[Any] = []
        """Of the ranks."""
        self.made: dict[int, list[Any]] = {}
        """By layer, that of each rank."""
        size, count = self.settings.block_size, self.draw.choice([2, 3])
        interleave = self.draw.choice([one for one in range(1, size + 1) if size % one == 0])
        sent: dict[int, Tensor] = {}
        barrier, running = threading.Barrier(count), threading.Lock()
        self.groups = [Group(rank, barrier, running, sent) for rank in range(count)]
        self.ranks = [ContextParallel(count, rank, size, interleave) for rank in range(count)]
        if "lse" in tested.features and not self.settings.groups[-1].cross:
            parts.more.append(self.of)

    def of(self, part: Part, counts: dict[str, int]) -> list[Part] | None:
        if not counts or self.draw.random() < 0.5:
            return None

        def attend(run: Run) -> tuple[Tensor, Tensor | None] | None:
            if not is_plain(run) or run.layer.group in self.settings.variants:  # ranks share out blocks of one size
                return None
            if run.layer.writes:
                run.impl.write_cache(run.keys, run.values, run.cache, run.metadata)
            with distributed():
                return self._attend(run, counts)

        return [replace(part, attend=attend, how=(*part.how, "ranks"))]

    def _impls(self, run: Run) -> list[Any]:
        if run.number not in self.made:
            self.backends = self.backends or [
                over_ranks(self.tested.make(self.settings), ranks, group=group)
                for ranks, group in zip(self.ranks, self.groups, strict=True)
            ]
            features = dict(run.layer.features, k_scale=run.impl.k_scale, v_scale=run.impl.v_scale)
            self.made[run.number] = [backend.impl("0", **features) for backend in self.backends]
        for impl in self.made[run.number]:
            impl.set_scales(run.impl.k_scale, run.impl.v_scale)
            if run.impl.sinks is not None:
                impl.set_sinks(run.impl.sinks)
        return self.made[run.number]

    def _attend(self, run: Run, counts: dict[str, int]) -> tuple[Tensor, Tensor | None]:
        with_lse, write_before = self.draw.random() < 0.5, self.draw.random() < 0.3
        calls, builders = [], []
        for impl, ranks in zip(self._impls(run), self.ranks, strict=True):
            builder, cache = self._holding(run, impl.backend, ranks, counts)
            builders.append(builder)
            metadata = builder.build(counts)
            firsts, at = {}, 0
            for name, count in counts.items():
                firsts[name], at = at, at + count
            order = [firsts[name] + k for name in metadata.req_ids for k in range(counts[name])]
            given = [None if one is None else one[order] for one in (run.query, run.keys, run.values)]
            calls.append((impl, metadata, cache, given))
        in_graph = (
            self.tested.cuda_graph != "never" and set(counts.values()) == {1} and not write_before
            and run.query.device.type == "cpu" and self.draw.random() < 0.6
        )  # fmt: skip
        if in_graph:
            found = self._replayed(calls, builders, counts, with_lse=with_lse)
        else:

            def attend(rank: int) -> Any:
                impl, metadata, cache, given = calls[rank]
                method = impl.forward_with_lse if with_lse else impl.forward
                if write_before:
                    impl.write_cache(*given[1:], cache, metadata)
                    given = [given[0], None, None]
                return method(*given, cache, metadata, write=not write_before)

            found = self._in_threads(attend)
        for builder in builders:
            builder.close()  # on a device it would keep its memory
        outputs = [one if with_lse else (one, None) for one in found.values()]
        for output, lse in outputs[1:]:
            assert torch.equal(output, outputs[0][0]), "ranks have other bits"
            assert lse is None or torch.equal(lse, outputs[0][1])
        back = torch.tensor(order, device=run.query.device).argsort()
        output, lse = outputs[0]
        return output[back], None if lse is None else lse[back]

    def _in_threads(self, attend: Callable[[int], Any]) -> dict[int, Any]:
        """What each rank's thread gives; the first error of one."""
        found: dict[int, Any] = {}

        def of_rank(rank: int) -> None:
            try:
                with self.groups[rank].running:
                    found[rank] = attend(rank)
            except BaseException as error:
                found[rank] = error
                self.groups[rank].barrier.abort()

        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(len(self.groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in sorted(found.values(), key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            if isinstance(one, BaseException):
                self.groups[0].barrier.reset()
                raise one
        return found

    def _replayed(
        self, calls: list[Any], builders: list[Any], counts: dict[str, int], *, with_lse: bool
    ) -> dict[int, Any]:
        """Decodes in a captured size of each rank: the builds of ``calls`` are taken back."""
        size = self.draw.randint(len(counts), MAX_REQS)
        empty, graphs = [], [new_graph("cpu") for _ in calls]
        for builder in builders:
            builder.batch.rollback_many(counts)
            empty.append(builder.capture(size))
        inputs = [
            [None if one is None else one.new_zeros((size, *one.shape[1:])) for one in given] for *_, given in calls
        ]

        def capture(rank: int) -> Any:
            impl, _, cache, _ = calls[rank]
            with capturing(graphs[rank]):
                empty[rank].record()
                return launch(impl.forward_with_lse if with_lse else impl.forward, *inputs[rank], cache, empty[rank])

        outputs = self._in_threads(capture)
        built = [builder.build(counts, bucket=size) for builder in builders]
        for held, (*_, given) in zip(inputs, calls, strict=True):
            for one, new in zip(held, given, strict=True):
                if one is not None:
                    one.fill_(float("nan"))
                    one[: len(new)] = new
        self._in_threads(lambda rank: built[rank].replay(graphs[rank]))
        count = len(counts)
        return {rank: tuple(part[:count] for part in one) if with_lse else one[:count] for rank, one in outputs.items()}

    def _holding(self, run: Run, backend: Any, ranks: ContextParallel, counts: dict[str, int]) -> tuple[Any, Any]:
        """A rank's builder, and a cache with the keys of the contexts that it keeps."""
        held, virtual, longest = self.parts.requests.held, ranks.virtual_block_size, self.settings.sizes.model_len
        each = -(-longest // virtual)
        batch = InputBatch(max_num_reqs=MAX_REQS, max_model_len=longest, block_size=virtual)
        cache = backend.allocate_kv_cache(1 + each * len(counts))
        views = backend.kv_cache_views(cache)
        for view in views:
            nobodys(view, finite=self.tested.finite)
        for row, name in enumerate(counts):
            table = [1 + each * row + k for k in range(each)]
            batch.add_request(name, table, held[name].computed)
            if held[name].computed:
                slots = torch.from_numpy(ranks.slot_mapping([table], [0], [held[name].computed])).to(views[0].device)
                mine = slots >= 0
                index = slots[mine] // ranks.block_size, slots[mine] % ranks.block_size
                written = held[name].written[run.layer.group, run.layer.cache]
                for view, rows in zip(views, written, strict=True):
                    kept = rows.to(view.device)[mine].to(view.dtype)
                    if view.element_size() == 1:  # torch indexes no fp8
                        view, kept = view.view(torch.uint8), kept.view(torch.uint8)
                    view[index] = kept
        transport = "copy" if views[0].is_cuda or self.tested.on_device else "auto"
        builder = MetadataBuilder(
            batch, backend, max_num_batched_tokens=2 * longest, context_parallel=ranks, transport=transport
        )
        return builder, cache
