"""What is made of a step: views, slices, cuts, chunks, ranks, and steps as another process or an engine has them."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from builder.adopted.adopted_engine import as_on_a_device
from fuzz.steps import rows as of_rows
from fuzz.steps.compared import Part
from fuzz.steps.rows import Rank, Row
from fuzz.steps.settings import MAX_REQS, MAX_TOKENS, MODEL_LEN, NUM_BLOCKS, Settings

from attncore import AdoptedSteps
from attncore.builder import (
    BatchSlice,
    ContextParallel,
    context_chunk_metadata,
    context_chunks,
    local_attention_metadata,
    metadata_from_fields,
    new_tokens_metadata,
    slice_by_requests,
    slice_by_tokens,
    slice_metadata,
)
from attncore.builder.fields import ARRAYS, DERIVED


class Parts:
    def __init__(self, draw: random.Random, settings: Settings, backends: dict[str, Any] | None) -> None:
        self.draw, self.settings, self.backends = draw, settings, backends
        self.groups = settings.kernel_groups
        self.adopting: dict[str, AdoptedSteps] = {}
        self.on_device = draw.random() < 0.4 or settings.lags
        """Whether the numbers of tensors that are adopted are read by nobody on the host."""
        self.adopts = True
        """Whether no step was adopted yet of the one that is looked at: what is on the device is the last one's."""

    def of(self, part: Part) -> list[Part]:
        """Parts of a part, perhaps none."""
        ways = [self.views, self.slices, self.received, self.copied]
        if not part.tableless:
            ways += [self.cuts, self.local, self.of_rank, self.adopted, self.new_tokens]
        return self.draw.choice(ways)(part)

    def views(self, part: Part) -> list[Part]:
        found = []
        parts = zip(("decode", "prefill"), of_rows.views(part.rows), of_rows.views(part.host_rows), strict=True)
        for name, rows, host_rows in parts:
            if part.padded is not None:
                rows, host_rows = (part.rows, part.host_rows) if name == "decode" else ([], [])
            of_groups = {group: getattr(one, f"{name}_metadata") for group, one in part.metadata.items()}
            tokens = sum(row.count for row in rows) or (part.padded is not None and name == "decode")
            assert all((view is not None) == bool(tokens) for view in of_groups.values()), (*part.how, name)
            if tokens:
                whole = part.whole and part.padded is not None
                found.append(replace(part, metadata=of_groups, rows=rows, host_rows=host_rows, how=(*part.how, name),
                                     whole=whole))  # fmt: skip
        return found

    def slices(self, part: Part) -> list[Part]:
        count = len(part.rows)
        if not count:
            return []
        if self.draw.random() < 0.5:
            slices = slice_by_requests([row.count for row in part.rows], self.draw.randint(1, min(3, count)))
        else:
            first = self.draw.randrange(count)
            last = self.draw.randint(first + 1, count)
            starts = of_rows.sums([row.count for row in part.rows])
            slices = (BatchSlice(first, last, starts[first], starts[last]),)
        return self._sliced(part, slices)

    def cuts(self, part: Part) -> list[Part]:
        tokens = sum(row.count for row in part.rows)
        if not tokens:
            return []
        if self.draw.random() < 0.5:
            slices = slice_by_tokens([row.count for row in part.rows], self.draw.randint(1, min(3, tokens)))
        else:
            start = self.draw.randrange(tokens)
            stop = self.draw.randint(start + 1, tokens)
            starts = of_rows.sums([row.count for row in part.rows])
            rows = [i for i in range(len(part.rows)) if starts[i] < stop and starts[i + 1] > start]
            slices = (BatchSlice(rows[0], rows[-1] + 1, start, stop),)
        return self._sliced(part, slices)

    def _sliced(self, part: Part, slices: Any) -> list[Part]:
        found: list[Part] = []
        starts = of_rows.sums([row.count for row in part.rows])
        for one in slices:
            cut = one.token_start != starts[one.req_start] or one.token_stop != starts[one.req_stop]
            refused = part.padded is not None or (cut and self._uncut(part, one))
            if (
                refused
                and {"tree_mask", "span_ends"} & part.missing
                and any(any(row.masks + row.ends) for row in part.rows)
            ):
                return found  # trees and spans that were skipped are not known
            of_groups = {}
            for name, metadata in part.metadata.items():
                size = self.groups[name].size // (part.rank.world if part.rank else 1)
                needs = bool({"query_start_loc", "query_lens", "seq_lens"} & part.missing)
                needs = needs or (cut and "context_lens" in part.missing)
                if refused or needs:
                    with pytest.raises(ValueError, match=r"^(metadata|batch_slice): "):
                        slice_metadata(metadata, one, block_size=size)
                    continue
                of_groups[name] = slice_metadata(metadata, one, block_size=size)
            if not of_groups:
                return found
            rows, host_rows = (of_rows.cut(some, *one[2:]) for some in (part.rows, part.host_rows))
            how = (*part.how, f"slice {one}")
            found.append(replace(part, metadata=of_groups, rows=rows, host_rows=host_rows, how=how, whole=False))
        return found

    def _uncut(self, part: Part, one: BatchSlice) -> bool:
        """Whether a slice is refused that cuts a request."""
        if part.rank is not None or any(mask for row in part.rows for mask in row.masks):
            return True
        if any(row.start for row in part.rows) and not self._all_cross(part):
            return True
        ends = [end for row in part.rows for end in row.ends]
        starts = of_rows.sums([row.count for row in part.rows])
        borders = {one.token_start, one.token_stop}.difference((starts[one.req_start], starts[one.req_stop]))
        return any(ends[at] and ends[at] == ends[at - 1] for at in borders)

    def _all_cross(self, part: Part) -> bool:
        return all(self.groups[name].cross for name in part.metadata)

    def received(self, part: Part) -> list[Part]:
        """As another process has it: the device's numbers, with some fields skipped."""
        skipped: set[str] = set()
        if part.bounded:
            skipped.add("paged_kv_indices")
        if self.draw.random() < 0.3:
            skipped |= set(self.draw.sample(sorted(ARRAYS - DERIVED), self.draw.randint(1, 4)))
        arrived = {}
        backends = self.backends if self.backends and self.draw.random() < 0.5 else None
        needs = frozenset().union(*self.settings.device_needs.values()) if backends else frozenset()
        if {"paged_kv_num_pages"} & needs:
            needs |= {"paged_kv_indptr"}
        drafts = part.rank is not None and any(row.decode and row.count > 1 for row in part.rows)
        if part.missing & needs or drafts or (part.bounded and "paged_kv_indices" in needs):
            backends, needs = None, frozenset()
        skipped -= needs
        for name, metadata in part.metadata.items():
            fields = metadata.asdict_zerocopy(skip_fields=skipped or None)
            if self.draw.random() < 0.5:
                fields = pickle.loads(pickle.dumps(fields))
            else:
                fields = {key: value if not hasattr(value, "shape") else
                          value.clone() if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())
                          for key, value in fields.items()}  # fmt: skip
            arrived[name] = metadata_from_fields(fields, backends and backends[name])
        missing = part.missing | skipped | {"span_ends"}  # None is not sent
        if "paged_kv_indptr" in missing:
            missing |= {"paged_kv_num_pages", "paged_kv_indices"}
        if "encoder_query_start_loc" in missing:
            missing |= {"cross_slot_mapping"}  # whose tokens these are is not known
        return [replace(part, metadata=arrived, host_rows=part.rows, how=(*part.how, f"received without {skipped}"),
                        missing=frozenset(missing), names=False, whole=part.whole, loose=part.loose or part.bounded,
                        bounded=False)]  # fmt: skip

    def copied(self, part: Part) -> list[Part]:
        """``copy.copy``: a second view of the same."""
        return [replace(part, metadata={name: copy.copy(one) for name, one in part.metadata.items()},
                        how=(*part.how, "copy"))]  # fmt: skip

    def _divided(self, part: Part) -> bool:
        """Whether what needs whole requests and exact lengths refuses the part."""
        return (
            part.padded is not None or part.rank is not None or part.bounded or any(row.start for row in part.rows)
            or any(mask for row in part.rows for mask in row.masks)
            or any(end for row in part.rows for end in row.ends)
        )  # fmt: skip

    def local(self, part: Part) -> list[Part]:
        found, rows = {}, part.rows
        if part.missing:
            return []
        lcm = 1
        for name in part.metadata:
            size = self.groups[name].size
            lcm = lcm * size // _gcd(lcm, size)
        chunk = lcm * self.draw.randint(1, 3)
        for name, metadata in part.metadata.items():
            group = self.groups[name]
            if group.cross or self._divided(part):
                with pytest.raises(ValueError, match=r"^metadata: "):
                    local_attention_metadata(metadata, chunk, group.size)
                continue
            found[name] = local_attention_metadata(metadata, chunk, group.size)
        if not found or not rows:
            return []
        rows = of_rows.chunks(rows, chunk)
        return [replace(part, metadata=found, rows=rows, host_rows=rows, how=(*part.how, f"local {chunk}"), whole=False,
                        encoder=False, names=part.names and not self.settings.states,
                        missing=part.missing | ({"tree_mask", "span_ends"}))]  # fmt: skip

    def of_rank(self, part: Part) -> list[Part]:
        name = self.draw.choice(list(part.metadata))
        group, metadata = self.groups[name], part.metadata[name]
        worlds = [world for world in (2, 3) if group.size % world == 0]
        if not worlds or part.missing:
            return []
        world = self.draw.choice(worlds)
        size = group.size // world
        rank = Rank(world, self.draw.randrange(world), self.draw.choice([n for n in (1, 2, 4) if size % n == 0]))
        mine = ContextParallel(rank.world, rank.rank, size, rank.interleave)
        if group.cross or self._divided(part):
            with pytest.raises(ValueError, match=r"^metadata: "):
                mine.metadata(metadata)
            return []
        found = mine.metadata(metadata)
        return [replace(part, metadata={name: found}, rank=rank, how=(*part.how, f"rank {rank}"), whole=False,
                        names=part.names and not self.settings.states, encoder=False,
                        missing=part.missing | {"tree_mask", "span_ends"})]  # fmt: skip

    def adopted(self, part: Part) -> list[Part]:
        """The rows out of an engine's tensors; perhaps with bounds of lengths on the host."""
        rows, draw, settings, device = part.rows, self.draw, self.settings, self.settings.device
        special = part.rank or part.padded or any(row.start or any(row.masks) or any(row.ends) for row in rows)
        if not self.backends or special or not rows or not self.adopts:
            return []
        self.adopts = False
        threshold, first = self.settings.threshold, 0
        while first < len(rows) and rows[first].count <= threshold:
            first += 1
        room = {name: [0] * MODEL_LEN for name in self.groups}
        rows = [replace(row, decode=index < first, encoder=0, fresh=0, columns={},
                        blocks={name: [*ids, *room[name]] for name, ids in row.blocks.items()})
                for index, row in enumerate(rows)]  # fmt: skip
        host_rows = rows
        if bounded := draw.random() < 0.4:
            host_rows = [row.moved_by(draw.randint(0, min(3, MODEL_LEN - row.stop))) for row in rows]
        found = {}
        for name, group in self.groups.items():
            if name not in part.metadata or group.cross:
                continue
            if name not in self.adopting:
                self.adopting[name] = AdoptedSteps(
                    self.backends[name], max_num_reqs=MAX_REQS, max_num_tokens=MAX_TOKENS, max_model_len=MODEL_LEN,
                    num_blocks=4 * NUM_BLOCKS, decode_threshold=threshold, kernels=self.settings.kernels,
                )  # fmt: skip
                if self.on_device and not settings.lags:
                    as_on_a_device(self.adopting[name])
            columns = -(-MODEL_LEN // group.size)
            wide = torch.full((len(rows), columns + 3), -1, dtype=torch.int32, device=device)
            table = wide[:, :columns].zero_()
            for index, row in enumerate(rows):
                held = row.blocks[name][:columns]
                table[index, : len(held)] = torch.tensor(held, dtype=torch.int32)
            wanted = of_rows.fields_of(rows, group)
            starts = torch.tensor(wanted["query_start_loc"], dtype=torch.int32)
            lengths = torch.tensor(wanted["seq_lens"], dtype=torch.int32)
            slots = torch.tensor(wanted["slot_mapping"], dtype=torch.int64)
            found[name] = self.adopting[name].build(
                query_start_loc=starts.to(device), seq_lens=lengths.to(device),
                block_table=table, slot_mapping=slots.to(device),
                host_query_start_loc=starts.numpy(),
                host_seq_lens=np.array(of_rows.fields_of(host_rows, group)["seq_lens"], np.int32), bounded=bounded,
            )  # fmt: skip
        if not found:
            return []
        missing = {"tree_mask", "span_ends"}
        if self.on_device:
            missing |= {"slot_mapping", "block_table", "paged_kv_indices"}
        return [Part(found, rows, host_rows, (*part.how, "adopted"), bounded=bounded, names=False, encoder=False,
                     missing=frozenset(missing), exact_on_host=frozenset({"slot_mapping"}))]  # fmt: skip

    def new_tokens(self, part: Part) -> list[Part]:
        """The step's own tokens beside chunks of their contexts, which hold each token of these once."""
        rows = part.rows
        found = {name: one for name, one in part.metadata.items() if not self.groups[name].cross}
        unfit = part.padded or part.rank or part.missing or any(row.start for row in rows)
        if unfit or not rows or not found:
            return []
        if any(row.decode for row in rows):
            for metadata in found.values():
                with pytest.raises(ValueError, match=r"^metadata: .* take its prefill_metadata"):
                    new_tokens_metadata(metadata)
            return []
        if not part.bounded:
            for name, metadata in found.items():
                self._contexts(name, metadata, rows)
        rows = [replace(row, first=0, positions=tuple(range(row.count)), encoder=0, fresh=0,
                        ends=tuple(end and end - row.first for end in row.ends)) for row in rows]  # fmt: skip
        metadata = {name: new_tokens_metadata(one) for name, one in found.items()}
        how = (*part.how, "new tokens")
        return [replace(part, metadata=metadata, rows=rows, host_rows=rows, how=how, bounded=False,
                        whole=False, encoder=False, tableless=True, names=part.names and not self.settings.states,
                        missing=frozenset({"tree_mask", "span_ends"}), exact_on_host=frozenset())]  # fmt: skip

    def _contexts(self, name: str, metadata: Any, rows: list[Row]) -> None:
        size = self.groups[name].size
        workspace = self.draw.choice([1, 2, 5]) * size * len(rows)
        chunks = context_chunks(metadata.host.block_table, metadata.host.context_lens, size, workspace)
        slots: list[list[int]] = [[] for _ in rows]
        for index in range(chunks.num_chunks):
            step = context_chunk_metadata(metadata, chunks, index)
            lengths = step.encoder_seq_lens.tolist()
            assert sum(lengths) <= workspace
            assert lengths == step.encoder_query_lens.tolist()
            starts = of_rows.sums(lengths)
            assert step.encoder_seq_start_loc.tolist() == step.encoder_query_start_loc.tolist() == starts
            assert step.cross_slot_mapping.tolist() == [-1] * starts[-1]
            assert (step.num_encoder_tokens, step.max_encoder_seq_len) == (starts[-1], max(lengths))
            assert step.query_lens.tolist() == [row.count for row in rows]
            given = chunks.chunk_slots[index].tolist()
            for row, (start, stop) in enumerate(pairwise(starts)):
                slots[row] += given[start:stop]
        for row, found in zip(rows, slots, strict=True):
            blocks = row.blocks[name]
            assert found == [blocks[i // size] * size + i % size for i in range(row.first)]


def _gcd(one: int, other: int) -> int:
    while other:
        one, other = other, one % other
    return one
