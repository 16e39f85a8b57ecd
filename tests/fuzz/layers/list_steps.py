"""A step of the persistent builder as the list builder makes it: prompts first, and prompts without tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fuzz.layers.parts import Part, Parts

from attncore import CommonMetadataBuilder, Sequence, SequenceGroup


class ListSteps:
    def __init__(self, parts: Parts) -> None:
        self.parts, self.draw = parts, parts.draw

    def of(self, part: Part, counts: dict[str, int]) -> list[Part] | None:
        """None where a window of a group excludes what the step has."""
        settings, held, draw = self.parts.settings, self.parts.requests.held, self.draw
        layouts = {name: backend.list_layout for name, backend in self.parts.backends.items()}
        cross = settings.groups[-1].cross
        if not counts or (cross and "flashinfer" in layouts.values()):
            return None
        several = all(layout == "flash" for layout in layouts.values())
        windowed = any(group.sliding_window is not None for group in settings.decoders)
        decoding = settings.threshold if several and not windowed else 1  # else the builder may refuse them
        decodes = [
            name for name, count in counts.items()
            if held[name].computed and count <= decoding and (held[name].encoded or not held[name].encoder)
        ]  # fmt: skip
        order = [*(name for name in counts if name not in decodes), *decodes]
        behind = [name for name in counts if name not in decodes and held[name].computed]
        names = {backend.name for backend in self.parts.backends.values()}
        windows = [group.sliding_window for group in settings.decoders if group.sliding_window is not None]
        prompts = [name for name in counts if name not in decodes]
        unwritten = any(counts[name] > window for name in prompts for window in windows)
        if unwritten and names & {"flash", "flashinfer"}:
            windows = []  # these refuse tokens without a slot, or read what lies there; their layers have the windows
        elif unwritten:  # slots of tokens that no window will show are -1
            for name in prompts:
                held[name].sparse = True
        chunked = draw.random() < 0.5 or bool(windows and behind)
        metadata: dict[str, Any] = {}
        for group in settings.decoders:
            size = settings.of(group.name).block_size
            each = group.block_size // size
            builder = CommonMetadataBuilder(
                size, layouts[group.name], sliding_window=group.sliding_window if windows else None,
                chunked_prefill=chunked, encoder_decoder=cross and group.name == "g0",
                backend=self.parts.backends[group.name],
            )  # fmt: skip
            groups = []
            for name in order:
                request = held[name]
                table = [block * each + k for block in request.blocks[group.name] for k in range(each)]
                encoder = (
                    {"encoder_seq_len": request.encoder, "cross_block_table": request.blocks["cross"]}
                    if cross and group.name == "g0"
                    else {}
                )
                hit = not chunked and name in behind
                sequence = Sequence(0, counts[name], request.computed, table)
                groups.append(SequenceGroup(name not in decodes, [sequence], hit, **encoder))
            metadata[group.name] = builder.build(groups)
        if cross:
            metadata["cross"] = metadata["g0"]
        firsts, at = {}, 0
        for name, count in counts.items():
            firsts[name], at = at, at + count
        tokens = [part.tokens[firsts[name] + k] for name in order for k in range(counts[name])]
        again = frozenset(name for name in behind if held[name].encoder) if cross else frozenset()
        how = (*part.how, "listed", *(("masked",) if windows and unwritten else ()))
        listed = replace(part, metadata=metadata, tokens=tokens, how=how, encodes=again)
        if self.parts.deeper and draw.random() < 0.5:
            return draw.choice(self.parts.deeper)(listed, counts)
        return [listed]
