"""Ways to a layer's results other than one ``forward`` over the step: parts of the keys, merged by log-sum-exp."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from fuzz.layers.parts import Part, Parts, Run
from fuzz.layers.settings import MAX_REQS, Tested
from torch import Tensor

from attncore import AdoptedSteps
from attncore.builder import (
    CascadeRule,
    context_chunk_metadata,
    context_chunks,
    find_shared_prefix,
    new_tokens_metadata,
    plan_cascade,
)
from attncore.dense import dense_attention
from attncore.merge import merge_attention


def planned(backend: Any, metadata: Any) -> Any:
    if backend.has_plan:
        backend.plan(metadata)
    return metadata


def is_plain(run: Run) -> bool:
    """Whether a layer sees keys wherever they stand: parts of them have no distance from a query."""
    return not run.layer.features.keys() & {"sliding_window", "alibi_slopes", "attn_type"}


def held(run: Run, slots: Any) -> list[Tensor]:
    """Keys and values of a cache's slots, times their scales, in the model's dtype."""
    found, places = [], torch.as_tensor(slots, device=run.query.device)
    scales = run.impl.k_scale, run.impl.v_scale
    for view, scale in zip(run.impl.backend.kv_cache_views(run.cache), scales, strict=True):
        size = view.shape[1]
        index = torch.div(places, size, rounding_mode="floor"), places % size
        if view.element_size() == 1:  # torch indexes no fp8
            rows = view.view(torch.uint8)[index].view(view.dtype).float()
        else:
            rows = view[index].float()
        times = scale if isinstance(scale, float) else scale.to(rows.device).reshape(1, -1, 1)
        found.append((rows * times).to(run.query.dtype))
    return found


class Compositions:
    def __init__(self, parts: Parts, tested: Tested, builder: Any) -> None:
        self.parts, self.draw, self.settings, self.builder = parts, parts.draw, parts.settings, builder
        self.suffixes: dict[str, AdoptedSteps] = {}
        self.across: dict[int, Any] = {}
        """By layer: one that sees a chunk of a context without a mask."""
        self.tested = tested
        cross = self.settings.groups[-1].cross
        parts.more += [] if cross else [self.profiled]
        if "lse" in tested.features and not cross:
            parts.more += [self.cascaded, self.cascaded_by_the_layer]
            parts.deeper.append(self.cascaded_by_the_layer)
            if "encoder_decoder" in tested.features and not self.settings.latent:
                parts.more.append(self.in_chunks)
                parts.deeper.append(self.in_chunks)

    def profiled(self, part: Part, counts: dict[str, int]) -> list[Part] | None:
        """A step without a cache, whose tokens see one another."""
        if not counts:
            return None
        profile = self.builder.build_profile(list(counts.values()))

        def attend(run: Run) -> tuple[Tensor, Tensor | None]:
            if run.layer.writes:
                run.impl.write_cache(run.keys, run.values, run.cache, run.metadata)
            planned(run.impl.backend, profile)
            cache = None if self.draw.random() < 0.7 else run.cache
            return run.impl.forward(run.query, run.keys, run.values, cache, profile), None

        return [replace(part, attend=attend, new=True, how=(*part.how, "profiled"))]

    def in_chunks(self, part: Part, counts: dict[str, int]) -> list[Part] | None:
        """Prefills over their own tokens, and over what is gathered of their contexts."""
        if {"adopted", "bare"} & {*part.how}:
            return None  # without a table on the host, maybe
        return [
            replace(one, attend=self._attend_in_chunks, how=(*one.how, "chunks")) if one.how[-1] == "prefill" else one
            for one in self.parts.views(part)
        ]

    def _attend_in_chunks(self, run: Run) -> tuple[Tensor, Tensor] | None:
        if not is_plain(run):
            return None
        if run.layer.writes:
            run.impl.write_cache(run.keys, run.values, run.cache, run.metadata)
        new = planned(run.impl.backend, new_tokens_metadata(run.metadata))
        parts = [run.impl.forward_with_lse(run.query, run.keys, run.values, None, new)]
        host, size = run.metadata.host, self.settings.of(run.layer.group).block_size
        workspace = size * len(host.context_lens) * self.draw.randint(1, 4)
        chunks = context_chunks(host.block_table, host.context_lens, size, workspace)
        if run.number not in self.across:
            features = {name: run.layer.features[name] for name in ("scale", "logits_soft_cap") if name in
                        run.layer.features}  # fmt: skip
            backend = self.tested.make(self.settings.of(run.layer.group))
            self.across[run.number] = backend.impl("across", **features, attn_type="encoder_decoder")
        across = self.across[run.number]
        for index, slots in enumerate(chunks.chunk_slots):
            step = planned(across.backend, context_chunk_metadata(run.metadata, chunks, index))
            parts.append(across.forward_with_lse(run.query, *held(run, slots), None, step))
        return merge_attention(*zip(*parts, strict=True))

    def cascaded(self, part: Part, counts: dict[str, int]) -> list[Part] | None:
        """A prefix that requests share, read once, and an adopted step of what is behind it."""
        plans = {}
        for group, metadata in part.metadata.items():
            host, size = metadata.host, self.settings.of(group).block_size
            rule = CascadeRule(min_requests=2, min_prefix_tokens=1, min_saving=0.0)
            shared = find_shared_prefix(host.block_table, host.context_lens, size, rule, null_block=0)
            if shared is not None:
                plans[group] = plan_cascade(shared, host.block_table, host.query_lens, host.seq_lens)
        if not plans:
            return None

        def attend(run: Run) -> tuple[Tensor, Tensor] | None:
            cascade = plans.get(run.layer.group)
            return None if cascade is None or not is_plain(run) else self._attend_in_two_passes(run, cascade)

        return [replace(part, attend=attend, how=(*part.how, "cascade"))]

    def cascaded_by_the_layer(self, part: Part, counts: dict[str, int]) -> list[Part] | None:
        """The same where a layer has both passes."""
        rule = CascadeRule(min_requests=2, min_prefix_tokens=1, min_saving=0.0)
        write = self.draw.random() < 0.5

        def attend(run: Run) -> tuple[Tensor, None] | None:
            if not is_plain(run) or not hasattr(run.impl, "forward_cascade"):
                return None
            cascade = run.impl.backend.cascade(run.metadata, rule)
            if cascade is None:
                return None
            if run.layer.writes and not write:
                run.impl.write_cache(run.keys, run.values, run.cache, run.metadata)
            output = self.parts.numbers.room(
                *run.query.shape[:2], self.settings.of(run.layer.group).value_size, fill=7.0
            )
            given = run.query, run.keys, run.values, run.cache, run.metadata, cascade
            return run.impl.forward_cascade(*given, output, write=run.layer.writes and write), None

        return [replace(part, attend=attend, how=(*part.how, "cascade of the layer"))]

    def _attend_in_two_passes(self, run: Run, cascade: Any) -> tuple[Tensor, Tensor]:
        group, backend = run.layer.group, run.impl.backend
        settings = self.settings.of(group)
        if group not in self.suffixes:
            of_group = next(one for one in self.settings.groups if one.name == group)
            longest = self.settings.sizes.model_len
            self.suffixes[group] = AdoptedSteps(
                backend, max_num_reqs=MAX_REQS, max_num_tokens=2 * longest, max_model_len=longest,
                num_blocks=settings.num_blocks * (of_group.block_size // settings.block_size),
                decode_threshold=self.settings.threshold,
            )  # fmt: skip
        device, suffix = run.query.device, cascade.suffix
        step = self.suffixes[group].build(
            query_start_loc=torch.tensor(suffix.query_start_loc).to(device),
            seq_lens=torch.tensor(suffix.seq_lens).to(device),
            block_table=torch.tensor(suffix.block_table).to(device),
            slot_mapping=run.metadata.slot_mapping.clone(),
            host_query_start_loc=suffix.query_start_loc,
            host_seq_lens=suffix.seq_lens,
        )
        output, lse = run.impl.forward_with_lse(
            run.query, run.keys, run.values, run.cache, step, write=run.layer.writes
        )
        size, tokens = settings.block_size, int(cascade.prefix.seq_lens[0])
        slots = list(itertools.chain.from_iterable(
            range(block * size, (block + 1) * size) for block in cascade.prefix.block_table[0].tolist()
        ))[:tokens]  # fmt: skip
        mine = torch.from_numpy(cascade.token_indices).to(device)
        first, of_first = dense_attention(
            run.query[mine], *held(run, slots), scale=run.layer.features["scale"], causal=False,
            logits_soft_cap=run.layer.features.get("logits_soft_cap"), return_lse=True,
        )  # fmt: skip
        prefix, of_prefix = torch.zeros_like(output), torch.full_like(lse, -torch.inf)
        prefix[mine], of_prefix[mine] = first.to(output.dtype), of_first
        return merge_attention([prefix, output], [of_prefix, lse])
