"""The ways in which an engine hands over a step: whole, in views and slices, from another process, adopted, in chunks.

A part is metadata of each group for some of the step's tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from builder.adopted.adopted_engine import as_on_a_device
from fuzz.layers.caches import Numbers
from fuzz.layers.requests import Requests
from fuzz.layers.settings import MAX_REQS, Layer, Settings
from torch import Tensor

from attncore import AdoptedSteps
from attncore.builder import (
    local_attention_metadata,
    metadata_from_fields,
    slice_by_requests,
    slice_by_tokens,
    slice_metadata,
)
from attncore.builder.fields import ARRAYS


class Run(NamedTuple):
    """What one layer computes over a part: on the device, without scales, and no rows but those of tokens."""

    number: int
    layer: Layer
    impl: Any
    metadata: Any
    query: Tensor
    keys: Tensor
    values: Tensor | None
    cache: Any


Attend = Callable[[Run], tuple[Tensor, Tensor | None] | None]
"""Output and log-sum-exp; None for a layer that it is not for."""


@dataclass
class Part:
    metadata: dict[str, Any]
    """By group."""
    tokens: list[int]
    """Which of the step's, in order."""
    how: tuple[str, ...] = ()
    chunk: int | None = None
    """Of local attention: tokens see those of their own chunk."""
    new: bool = False
    """Tokens see those of the step alone, and there is no cache: a profiling run."""
    encodes: frozenset[str] = frozenset()
    """Requests whose encoder runs again in this part."""
    attend: Attend | None = None
    """Another way than a layer's ``forward`` to the same results."""

    @property
    def any(self) -> Any:
        return next(iter(self.metadata.values()))


class Parts:
    """``more``: other ways, of a step without trees and spans: (part, counts) -> parts, or None where it is none."""

    def __init__(
        self, draw: random.Random, settings: Settings, requests: Requests, backends: dict[str, Any], numbers: Numbers
    ) -> None:
        self.draw, self.settings, self.requests, self.backends, self.numbers = (
            draw,
            settings,
            requests,
            backends,
            numbers,
        )
        self.adopting: dict[str, AdoptedSteps] = {}
        self.more: list[Callable[[Part, dict[str, int]], list[Part] | None]] = []
        self.deeper: list[Callable[[Part, dict[str, int]], list[Part] | None]] = []
        """Those that are of parts too."""

    def of(self, step: Part, counts: dict[str, int], *, trees: bool, bounded: bool = False) -> list[Part]:
        """The parts of a step, whose planned metadata ``step`` has; ``counts`` has its rows, in order. ``bounded``: the
        host has bounds of lengths alone."""
        again = [self.whole, self.views, self.slices, self.received]
        ways = [self.whole, *again]
        if bounded:
            again.remove(self.received)  # its host would not say so
            ways = again
        elif not trees and not self.settings.spans:
            again += [self.cuts, self.local]
            again += [lambda part, way=way: way(part, counts) or [part] for way in self.deeper]
            ways += [self.cuts, self.local]
            ways += [lambda part, way=way: way(part, counts) or [part] for way in (self.adopted, *self.more)]
        first = self.draw.choice(ways)(step)
        return [deeper for part in first for deeper in (self.draw.choice(again)(part) if not part.attend else [part])]

    def whole(self, part: Part) -> list[Part]:
        return [part]

    def views(self, part: Part) -> list[Part]:
        if "listed" in part.how and "cross" in part.metadata:
            return [part]  # each view has the encoder fields of all rows
        found, at = [], 0
        both = [("decode", part.any.num_decode_tokens), ("prefill", part.any.num_prefill_tokens)]
        for name, count in both if part.any.decodes_first else reversed(both):
            views = {group: getattr(one, f"{name}_metadata") for group, one in part.metadata.items()}
            assert all((view is not None) == bool(count) for view in views.values())
            if count:
                assert all(view.num_tokens == count for view in views.values())
                found.append(replace(part, metadata=views, tokens=part.tokens[at : at + count], how=(*part.how, name)))
            at += count
        return found

    def slices(self, part: Part) -> list[Part]:
        if "bare" in part.how:
            return [part]  # slices are made by fields that it may lack
        most = min(3, part.any.num_reqs)
        return self._sliced(part, slice_by_requests(part.any.host.query_lens, self.draw.randint(1, most)))

    def cuts(self, part: Part) -> list[Part]:
        if part.chunk is not None or {"listed", "bare"} & {*part.how} or part.metadata.keys() - {"g0", "g1", "g2"}:
            return self.slices(part)  # through a request of a chunk or a list, or with encoder tokens: not cut
        most = min(3, len(part.tokens))
        return self._sliced(part, slice_by_tokens(part.any.host.query_lens, self.draw.randint(1, most)))

    def _sliced(self, part: Part, slices: Any) -> list[Part]:
        found, at = [], 0
        for one in slices:
            metadata = {
                name: slice_metadata(of_group, one, block_size=self.settings.of(name).block_size)
                for name, of_group in part.metadata.items()
            }
            count = one.token_stop - one.token_start
            if count:
                found.append(
                    replace(part, metadata=metadata, tokens=part.tokens[at : at + count], how=(*part.how, "slice"))
                )
            at += count
        return found

    def received(self, part: Part) -> list[Part]:
        """With a copy of each array, as another process has it; sometimes of those alone that its backend declares."""
        arrived, bare = {}, self.draw.random() < 0.5
        for name, metadata in part.metadata.items():
            spec, skipped = self.backends[name].spec, set()
            if spec is not None and bare:
                skipped = {field for field in sorted(ARRAYS - spec.host_needs - spec.device_needs) if
                           self.draw.random() < 0.8} - {"tree_mask", "span_ends"}  # fmt: skip
            sent = {
                key: torch.as_tensor(value).clone() if hasattr(value, "shape") else value
                for key, value in metadata.asdict_zerocopy(skip_fields=skipped).items()
            }
            arrived[name] = metadata_from_fields(sent, self.backends[name])
        return [replace(part, metadata=arrived, how=(*part.how, "received", *(("bare",) if bare else ())))]

    def local(self, part: Part) -> list[Part]:
        of_groups = part.metadata.keys() <= {"g0", "g1", "g2"}
        if not of_groups or part.chunk is not None or part.new or {"adopted", "bare", "masked"} & {*part.how}:
            return [part]
        if "listed" in part.how and any(group.sliding_window is not None for group in self.settings.groups):
            return [part]  # lengths of decodes that its window has capped
        sizes = {name: self.settings.of(name).block_size for name in part.metadata}
        chunk = math.lcm(*sizes.values()) * self.draw.randint(1, 3)
        metadata = {name: local_attention_metadata(one, chunk, sizes[name]) for name, one in part.metadata.items()}
        return [replace(part, metadata=metadata, how=(*part.how, "local"), chunk=chunk)]

    def adopted(self, part: Part, counts: dict[str, int]) -> list[Part]:
        """The same step out of an engine's tensors, whose table is a part of a wider one."""
        if not counts or self.settings.groups[-1].cross:
            return [part]
        held, found = self.requests.held, {}
        for group in self.settings.groups:
            size = self.settings.of(group.name).block_size
            each, columns = group.block_size // size, -(-self.settings.sizes.model_len // size)
            wide = torch.full((len(counts), columns + 3), -1, dtype=torch.int32)
            table = wide[:, :columns].zero_()
            for row, name in enumerate(counts):
                ids = [block * each + k for block in held[name].blocks[group.name] for k in range(each)][:columns]
                table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            spans = [range(held[name].computed, held[name].computed + count) for name, count in counts.items()]
            slots = [int(table[row, at // size]) * size + at % size for row, span in enumerate(spans) for at in span]
            starts = torch.tensor([0, *(len(span) for span in spans)]).cumsum(0).int()
            if group.name not in self.adopting:
                longest = self.settings.sizes.model_len
                self.adopting[group.name] = AdoptedSteps(
                    self.backends[group.name],
                    max_num_reqs=MAX_REQS,
                    max_num_tokens=2 * longest,
                    max_model_len=longest,
                    num_blocks=self.settings.of(group.name).num_blocks * each,
                    decode_threshold=self.settings.threshold,
                )
                spec = self.backends[group.name].spec  # reference made by hand has none, and asks for host slots
                if spec is not None and "slot_mapping" not in spec.host_needs and self.draw.random() < 0.5:
                    as_on_a_device(self.adopting[group.name])
            lengths = torch.tensor([span.stop for span in spans]).int()
            given = {
                "query_start_loc": starts,
                "seq_lens": lengths,
                "slot_mapping": torch.tensor(slots, dtype=torch.int64),
            }
            found[group.name] = self.adopting[group.name].build(
                **{name: self.numbers.sent(one) for name, one in given.items()},
                block_table=self.numbers.sent(wide)[:, :columns],
                host_query_start_loc=starts.numpy(),
                host_seq_lens=lengths.numpy(),
            )
        return [replace(part, metadata=found, how=(*part.how, "adopted"))]
