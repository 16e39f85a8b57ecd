"""Stands in for a serving engine's own runner: its tensors lie in one set of buffers, and its steps are adopted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attncore.builder import InputBatch, MetadataBuilder
from attncore.builder.adopted.steps import AdoptedSteps
from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import Engine

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend
    from attncore.builder.adopted.step import AdoptedStep

_ALL_REQUESTS: Mapping[Any, int] = {}


class AdoptingBuilder:
    """Steps of ``batch`` for ``backend`` as ``MetadataBuilder`` builds them, but adopted from an engine's tensors.

    The engine pads a captured size as serving engines do: length 0, slot -1, row 0 of the table. Its table is the left
    part of a wider one. Copies to its buffers do not wait for the device.
    """

    def __init__(
        self, batch: InputBatch, backend: AttentionBackend, *, max_num_batched_tokens: int, decode_threshold: int = 1,
        transport: str = "auto",
    ) -> None:  # fmt: skip
        self.batch, self._device = batch, torch.device(backend.config.device)
        self._cuda = self._device.type == "cuda"
        self._host = MetadataBuilder(
            batch, max_num_batched_tokens=max_num_batched_tokens, decode_threshold=decode_threshold
        )
        self.steps = AdoptedSteps(
            backend, max_num_reqs=batch.max_num_reqs, max_num_tokens=max_num_batched_tokens,
            max_model_len=batch.max_model_len, num_blocks=batch.groups[0].num_blocks,
            decode_threshold=decode_threshold, kernels=batch.kernels,  # type: ignore[arg-type]
        )  # fmt: skip
        rows = batch.max_num_reqs
        width = -(-batch.max_model_len // batch.groups[0].tokens_per_column)
        with torch.inference_mode(False):
            self._starts = torch.zeros(rows + 1, dtype=torch.int32, device=self._device)
            self._lengths = torch.zeros(rows, dtype=torch.int32, device=self._device)
            # Rows may have any stride: behind each stand blocks that are none of its request's.
            self._table = torch.ones((rows, width + 3), dtype=torch.int32, device=self._device)[:, :width]
            self._slots = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=self._device)
        self._query_lens: dict[int, int] = {}

    def capture(self, num_reqs: int, query_len: int = 1) -> AdoptedStep:
        """The metadata to capture a graph over: rows of padding alone."""
        self._query_lens[num_reqs] = query_len
        return self._adopted(np.zeros(1, np.int32), np.zeros(0, np.int32), num_reqs, capturing=True)

    def build_empty(self, bucket: int) -> AdoptedStep:
        """A step of a captured size without requests."""
        return self._adopted(np.zeros(1, np.int32), np.zeros(0, np.int32), bucket)

    def build(
        self, scheduled: Mapping[Any, int] = _ALL_REQUESTS, *, query_len: int = 1, bucket: int | None = None,
        turned: bool = False, idle: bool = False,
    ) -> AdoptedStep:  # fmt: skip
        """The metadata of the next step; see ``MetadataBuilder.build``. ``turned``: its rows in the reverse order.
        ``idle``: before each row stands another of that request without tokens.
        """
        step = self._host.build(scheduled, query_len=query_len)
        host, rows = step.host, np.arange(step.num_reqs)[:: -1 if turned else 1]
        tokens = [np.arange(*host.query_start_loc[row : row + 2]) for row in rows]
        slots = host.slot_mapping[np.concatenate(tokens)] if tokens else np.array(host.slot_mapping)
        counts, lengths, table = np.array([*map(len, tokens)], np.int32), host.seq_lens[rows], host.block_table[rows]
        if idle:
            lengths = np.stack((lengths - counts, lengths), axis=1).ravel()
            counts, table = np.stack((0 * counts, counts), axis=1).ravel(), table.repeat(2, axis=0)
        starts = np.cumsum([0, *counts], dtype=np.int32)
        size = len(counts) if bucket is None else bucket
        metadata = self._adopted(starts, lengths, size, table, slots, in_graph=bucket is not None)
        metadata.req_ids = tuple(step.req_ids[row] for row in rows)
        if not self.steps._on_cpu:
            metadata.host.slot_mapping = slots  # for who checks the cache; the plan has been made without
        return metadata

    def _adopted(
        self, starts: Any, lengths: Any, size: int, table: Any = None, slots: Any = None, *, capturing: bool = False,
        in_graph: bool = True,
    ) -> AdoptedStep:  # fmt: skip
        count = len(lengths)
        num_tokens = size * self._query_lens[size] if in_graph else int(starts[-1])
        own_starts, own_lengths = np.full(size + 1, starts[-1], np.int32), np.zeros(size, np.int32)
        own_starts[: count + 1], own_lengths[:count] = starts, lengths
        own_table = np.zeros((size, self._table.shape[1]), np.int32)
        own_slots = np.full(num_tokens, -1, np.int64)
        if count:
            own_table[:count, : table.shape[1]] = table[:, : self._table.shape[1]]
            own_slots[: len(slots)] = slots
        return self.steps.build(
            query_start_loc=self._sent(self._starts, own_starts),
            seq_lens=self._sent(self._lengths, own_lengths),
            block_table=self._sent(self._table, own_table),
            slot_mapping=self._sent(self._slots, own_slots),
            host_query_start_loc=own_starts,
            host_seq_lens=own_lengths,
            capturing=capturing,
        )

    def _sent(self, buffer: torch.Tensor, array: Any) -> torch.Tensor:
        """The beginning of a buffer, after the array was copied there."""
        view, staged = buffer[: len(array)], torch.from_numpy(array)
        if self._cuda:  # torch keeps pinned memory until the copy out of it is complete
            staged = staged.pin_memory()
        view.copy_(staged, non_blocking=self._cuda)
        return view


class AdoptingEngine(Engine):
    """Steps are adopted from an engine's own tensors."""

    def __init__(self, backend: AttentionBackend, **given: Any) -> None:
        super().__init__(backend, **given)
        self.adopting = AdoptingBuilder(
            self.batch, backend, max_num_batched_tokens=self.builder.max_num_batched_tokens,
            decode_threshold=self.builder.decode_threshold,
        )  # fmt: skip

    def step(
        self, scheduled: Mapping[Any, int], *, turned: bool = False, idle: bool = False, **padding: int
    ) -> torch.Tensor:
        """Run a step for ``scheduled`` alone; without padding. Returns the output on the host."""
        if padding:
            raise TypeError(f"AdoptingEngine.step: {sorted(padding)} are of engines that pad a copy of the step")
        metadata = self.adopting.build(self.scheduled(dict(scheduled)), turned=turned, idle=idle)
        requests = [StepRequest(name, scheduled[name], self.context(name)) for name in metadata.req_ids]
        return self.run_step(metadata, requests)
