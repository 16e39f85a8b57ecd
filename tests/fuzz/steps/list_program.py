"""A program of the list builder: random steps, and what is made of each, beside what ``oracles`` says of the groups."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import oracles
import pytest
import torch
from fuzz.steps.compared import as_list
from interrupted_calls import AtOpcode

from attncore import BackendConfig, CommonAttentionState
from attncore.builder import (
    CommonMetadataBuilder,
    Sequence,
    SequenceGroup,
    local_attention_metadata,
    metadata_from_fields,
    slice_by_requests,
    slice_metadata,
    token_counts,
)
from attncore.builder.blocks.microbatches import BatchSlice
from attncore.builder.fields import ARRAYS, DERIVED, ENCODER_ARRAYS
from attncore.errors import CaptureError
from attncore.reference import ReferenceBackend

OF_TOKENS = ("slot_mapping", "positions")
OF_ROWS = ("seq_lens", "context_lens", "query_lens", "block_table", "paged_kv_last_page_len", "paged_kv_num_pages")
STARTS = ("query_start_loc", "seq_start_loc", "paged_kv_indptr")
LONGEST = 60


@dataclass
class Listed:
    """Metadata of a part, and what each of its fields is."""

    metadata: Any
    fields: dict[str, Any]
    how: tuple[str, ...] = ()
    missing: frozenset[str] = frozenset()
    deeper: bool = True
    """Whether others are made of it."""


def part_of(fields: dict[str, Any], first: int, last: int, *, view: str = "") -> dict[str, Any]:
    """Rows first:last of a step, whose padded rows have a token each; a ``view`` keeps all fields of encoders."""
    starts = fields["query_start_loc"]
    bounds = starts + [starts[-1] + 1 + row for row in range(fields["num_reqs"] + 1 - len(starts))]
    start, stop = bounds[first], bounds[last]
    found = {name: fields[name][start:stop] for name in OF_TOKENS}
    found["token_to_req_indices"] = [row - first for row in fields["token_to_req_indices"][start:stop]]
    found |= {name: fields[name][first:last] for name in OF_ROWS if name in fields}
    found["logits_indices"] = [at - start for at in fields["logits_indices"][first:last]]
    for name in STARTS:
        if name in fields:
            some = fields[name][min(first, len(fields[name]) - 1) : last + 1]
            found[name] = [one - some[0] for one in some]
    if "paged_kv_indices" in fields:
        pages = fields["paged_kv_indptr"]
        found["paged_kv_indices"] = fields["paged_kv_indices"][pages[first] : pages[last]]
    if view:
        found |= {name: value for name, value in fields.items() if "encoder" in name or "cross" in name}
    elif "encoder_seq_lens" in fields:
        found |= _encoders(fields, first, last)
    prefills = max(min(last, fields["num_prefills"]) - first, 0)
    decodes = max(min(last, fields["num_prefills"] + fields["num_decodes"]) - max(first, fields["num_prefills"]), 0)
    queries = found["query_lens"]
    prompts, others = queries[:prefills], queries[prefills : prefills + decodes]
    lengths = found["seq_lens"]
    found |= {
        "num_reqs": last - first, "num_tokens": stop - start, "num_prefills": prefills, "num_decodes": decodes,
        "num_prefill_tokens": sum(prompts), "num_decode_tokens": stop - start - sum(prompts),
        "max_query_len": max(queries, default=0), "max_prefill_seq_len": max(lengths[:prefills], default=0),
        "max_decode_seq_len": max(lengths[prefills : prefills + decodes], default=0),
    }  # fmt: skip
    if "max_decode_query_len" in fields:
        found["max_decode_query_len"] = max(others, default=1)
    found["max_seq_len"] = max(found["max_prefill_seq_len"], found["max_decode_seq_len"])
    return found


def _encoders(fields: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    fresh = fields["encoder_query_start_loc"]
    found = {name: fields[name][first:last] for name in ("encoder_seq_lens", "encoder_query_lens", "cross_block_table")}
    for name in ("encoder_seq_start_loc", "encoder_query_start_loc"):
        found[name] = [one - fields[name][first] for one in fields[name][first : last + 1]]
    found["cross_slot_mapping"] = fields["cross_slot_mapping"][fresh[first] : fresh[last]]
    unpadded = found["encoder_seq_lens"][: max(len(fields["query_lens"]) - first, 0)]
    lengths = found["encoder_seq_lens"]
    return found | {"num_encoder_tokens": sum(unpadded), "max_encoder_seq_len": max(lengths, default=0)}


class ListProgram:
    def __init__(self, draw: random.Random, kernels: str) -> None:
        self.draw, self.size = draw, draw.choice([1, 2, 3, 4, 16])
        self.layout = draw.choice(["common", "flash", "flashinfer", "rocm"])
        self.window = draw.choice([None, None, 1, 3, 6, 20])
        self.chunked = draw.random() < 0.5
        self.encoders = self.layout != "flashinfer" and draw.random() < 0.4
        backend = None
        if draw.random() < 0.5:
            backend = ReferenceBackend(BackendConfig(2, 2, 8, "float32", block_size=self.size))
        self.backend = backend
        self.builder = CommonMetadataBuilder(
            self.size, self.layout, sliding_window=self.window, chunked_prefill=self.chunked,
            max_seq_len_to_capture=LONGEST + 3 * self.size, encoder_decoder=self.encoders, backend=backend,
            kernels=kernels,
        )  # fmt: skip
        self.state = CommonAttentionState(backend, self.builder)
        with self.state.graph_capture(8):
            self.captured = {size: self.state.metadata_for_capture(size) for size in draw.sample(range(1, 9), 3)}
        self.steps: list[Listed] = []
        self.profile = False
        """Whether the step's tables are null."""

    def step(self) -> None:
        draw = self.draw
        groups, encoders, pad = self._drawn()
        given = []
        for (is_prompt, hit, rows), (encoder, cross) in zip(groups, encoders, strict=True):
            sequences = [Sequence(index, *row) for index, row in enumerate(rows)]
            more = {"encoder_seq_len": encoder, "cross_block_table": cross} if self.encoders else {}
            given.append(SequenceGroup(is_prompt, sequences, hit, **more))
        decodes = [row for is_prompt, _, rows in groups for row in rows if not is_prompt and row[0] == 1 and row[2]]
        captured = None
        if pad >= 0 and len(decodes) == sum(len(rows) for *_, rows in groups) and draw.random() < 0.7:
            pad = self.state.pad_size(len(decodes))
            if pad >= 0 and draw.random() < 0.5:
                fields = self._expected(groups, encoders, pad)
                self._interrupt(lambda: self.state.build(given, pad))
                metadata = self.state.build(given, pad)
                self._look(Listed(metadata, fields, ("in place",)))
                self._look_at_captured(self.captured[metadata.num_reqs], fields)
                return
        self._interrupt(lambda: self.builder.build(given, pad))
        metadata = self.builder.build(given, pad)
        if pad >= 0 and metadata.num_reqs in self.state.captured and metadata.max_query_len == 1:
            if self._interrupt(lambda: self.state.prepare(metadata)):
                with pytest.raises(CaptureError):  # also where all was written but the last line
                    self.state.begin_forward(metadata)
            captured = self.state.prepare(metadata)
            assert captured is self.captured[metadata.num_reqs]
            self._look_at_captured(captured, self._expected(groups, encoders, pad))
        whole = Listed(metadata, self._expected(groups, encoders, pad), ("step",))
        self._look(whole)
        for _ in range(draw.choice([0, 1, 3])):
            if not self._advance(metadata, groups):
                break
            fields = self._expected(groups, encoders, pad)
            if captured is not None and draw.random() < 0.7:
                assert self.state.prepare(metadata) is captured
                self._look_at_captured(captured, fields)
            if self.draw.random() < 0.7:
                self._look(Listed(metadata, fields, ("advanced",)))
            else:
                self.compare(Listed(metadata, fields, ("advanced",)))
        self.steps = [*self.steps[-2:], Listed(metadata, self._expected(groups, encoders, pad), ("earlier",))]
        for one in self.steps:  # arrays of each step are its own
            self.compare(one)

    def _look_at_captured(self, metadata: Any, fields: dict[str, Any]) -> None:
        """What a graph of the size reads: every field has all rows, and counts are those of the capture."""
        rows, count = len(fields["context_lens"]), fields["num_reqs"]
        found = {name: value for name, value in fields.items() if not name.startswith(("num_", "max_"))}
        for name in ("context_lens", "query_lens", "logits_indices"):
            found[name] = found[name] + [0] * (count - rows)
        found["query_start_loc"] = found["query_start_loc"] + [rows] * (count - rows)
        found |= {"num_reqs": count, "num_tokens": count, "num_decode_tokens": count, "max_query_len": 1}
        self.compare(Listed(metadata, found, ("captured",)))
        self.state.begin_forward(metadata)

    def _interrupt(self, call: Any) -> bool:
        """Sometimes makes a call that is interrupted from outside; whether it was."""
        if self.draw.random() < 0.85:
            return False
        with AtOpcode(self.draw.choice([100, 400, self.draw.randrange(1500)])) as interrupt:
            call()
        return bool(interrupt.fired)

    def _drawn(self) -> tuple[list[Any], list[Any], int]:
        draw, groups, encoders = self.draw, [], []
        kinds = sorted((draw.random() < 0.5 for _ in range(draw.randint(1, 5))), reverse=True)
        graph = draw.random() < 0.3
        if graph or draw.random() < 0.3:
            kinds = [False] * len(kinds)
        self.profile = profile = not graph and draw.random() < 0.1
        # With a window and a backend, tokens that see more than their row of the table shows are refused.
        drafts = self.layout == "flash" and (self.window is None or self.backend is None)
        for is_prompt in kinds:
            hit = is_prompt and self.window is None and draw.random() < 0.4
            rows = []
            for _ in range(draw.choice([1, 1, 2])):
                query = draw.randint(1, 12) if is_prompt else draw.choice([1, 1, 3]) if drafts else 1
                context = draw.randint(0, 30) if not is_prompt or self.chunked or hit else 0
                count = -(-(query + context) // self.size) + draw.randint(0, 2)
                rows.append([query, context, None if profile else [draw.randrange(1, 900) for _ in range(count)]])
            groups.append((is_prompt, hit, rows))
            encoder = draw.choice([0, 3, 7])
            cross = [draw.randrange(1, 900) for _ in range(-(-encoder // self.size))]
            encoders.append((encoder, None if profile else cross) if self.encoders else (None, None))
        return groups, encoders, draw.randint(0, 3) if graph else -1

    def _expected(self, groups: list[Any], encoders: list[Any], pad: int) -> dict[str, Any]:
        capture = LONGEST + 3 * self.size
        found = oracles.list_step(groups, self.size, self.layout, self.window, self.chunked, pad, capture)
        found["block_table"] = found.pop("block_tables")
        del found["use_cuda_graph"]
        if self.encoders:
            found |= oracles.encoder_step(groups, encoders, self.size, pad, capture)
        if "paged_kv_indptr" in found:
            starts = found["paged_kv_indptr"]
            found["paged_kv_num_pages"] = [stop - start for start, stop in pairwise(starts)]
        return found

    def _advance(self, metadata: Any, groups: list[Any]) -> bool:
        """Moves a step of decodes of one token on, in place; the tables of its groups grow."""
        rows = [row for is_prompt, _, some in groups for row in some]
        able = all(not is_prompt for is_prompt, *_ in groups) and all(row[0] == 1 for row in rows)
        if not able or any(row[2] is None or row[1] + 2 > LONGEST for row in rows):
            return False
        for row in rows:
            row[1] += 1
            if -(-(row[1] + 1) // self.size) > len(row[2]):
                row[2].append(self.draw.randrange(1, 900))  # the list that the Sequence holds
        tokens = torch.zeros(metadata.num_reqs, dtype=torch.int64)
        sampled = torch.tensor([self.draw.randrange(99) for _ in rows])
        before = metadata.advanced
        self._interrupt(lambda: metadata.advance_step(tokens, sampled))
        if metadata.advanced == before:
            metadata.advance_step(tokens, sampled)
        assert metadata.advanced == before + 1
        assert tokens.tolist() == sampled.tolist() + [0] * (metadata.num_reqs - len(rows))
        return True

    def _look(self, whole: Listed) -> None:
        parts = [whole]
        for _ in range(self.draw.choice([1, 2, 3])):
            made = [deeper for part in parts if part.deeper for deeper in self._made_of(part)]
            for part in made:
                self.compare(part)
            parts = made + parts[:1]
        self.compare(whole)

    def _made_of(self, part: Listed) -> list[Listed]:
        return self.draw.choice([self._views, self._slices, self._received, self._copied, self._local])(part)

    def _views(self, part: Listed) -> list[Listed]:
        found, fields = [], part.fields
        border = fields["num_prefills"]
        for name, first, last in (("prefill", 0, border), ("decode", border, fields["num_reqs"])):
            view = getattr(part.metadata, f"{name}_metadata")
            assert (view is not None) == (last > first), (*part.how, name)
            if view is None:
                continue
            own = part_of(fields, first, last, view=name)
            own["max_seq_len"] = own[f"max_{name}_seq_len"] = fields[f"max_{name}_seq_len"]
            found.append(replace(part, metadata=view, fields=own, how=(*part.how, name)))
        return found

    def _slices(self, part: Listed) -> list[Listed]:
        count, found = part.fields["num_reqs"], []
        if part.missing & {"query_start_loc", "query_lens", "seq_lens"}:
            return []
        of_views = "encoder_seq_lens" in part.fields and len(part.fields["encoder_seq_lens"]) != count
        if of_views or (self.encoders and {"prefill", "decode"} & set(part.how)):
            return []  # whose fields of encoders are those of the whole step
        starts = part.fields["query_start_loc"]
        starts = starts + [starts[-1] + 1 + row for row in range(count + 1 - len(starts))]
        first = self.draw.randrange(count)
        last = self.draw.randint(first + 1, count)
        slices = [BatchSlice(first, last, starts[first], starts[last])]
        if len(part.fields["query_lens"]) == count and self.draw.random() < 0.5:
            slices = list(slice_by_requests(part.fields["query_lens"], self.draw.randint(1, min(count, 3))))
        for one in slices:
            metadata = slice_metadata(part.metadata, one, block_size=self.size)
            fields = part_of(part.fields, one.req_start, one.req_stop)
            found.append(replace(part, metadata=metadata, fields=fields, how=(*part.how, f"slice {one}")))
            if one.token_stop - one.token_start > 1 and one.req_start < len(part.fields["query_lens"]):
                count_of_first = part.fields["query_lens"][one.req_start]
                if count_of_first > 1:
                    inside = one._replace(token_start=one.token_start + 1)
                    with pytest.raises(ValueError, match=r"^(batch_slice|metadata): "):
                        slice_metadata(part.metadata, inside, block_size=self.size)
        return found

    def _received(self, part: Listed) -> list[Listed]:
        skipped = set(self.draw.sample(sorted(ARRAYS - DERIVED), self.draw.choice([0, 0, 1, 3])))
        fields = part.metadata.asdict_zerocopy(skip_fields=skipped)
        if self.draw.random() < 0.5:
            fields = pickle.loads(pickle.dumps(fields))
        backend = self.backend if self.draw.random() < 0.5 else None
        missing = part.missing | skipped
        if "paged_kv_indptr" in missing:
            missing |= {"paged_kv_num_pages", "paged_kv_indices"}
        if "encoder_query_start_loc" in missing:
            missing |= {"cross_slot_mapping"}
        how = (*part.how, f"received without {sorted(skipped)}")
        return [replace(part, metadata=metadata_from_fields(fields, backend), missing=frozenset(missing), how=how)]

    def _copied(self, part: Listed) -> list[Listed]:
        return [replace(part, metadata=copy.copy(part.metadata), how=(*part.how, "copy"))]

    def _local(self, part: Listed) -> list[Listed]:
        """Chunks of local attention, where all rows have their whole lengths."""
        fields, chunk = part.fields, self.size * self.draw.randint(1, 3)
        if part.missing or (self.profile and any(part.fields["context_lens"])):  # what has no table
            return []
        contexts, queries, lengths = (fields[name] for name in ("context_lens", "query_lens", "seq_lens"))
        capped = any(sum(one[:2]) != one[2] for one in zip(contexts, queries, lengths, strict=False))
        if len(queries) != fields["num_reqs"] or part.metadata.use_cuda_graph or capped:
            with pytest.raises(ValueError, match=r"^metadata: "):
                local_attention_metadata(part.metadata, chunk, self.size)
            return []
        metadata = local_attention_metadata(part.metadata, chunk, self.size)
        rows = []  # of each chunk: its row, its keys and its tokens
        for row, (context, query) in enumerate(zip(contexts, queries, strict=True)):
            for at in range(context // chunk, (context + query - 1) // chunk + 1):
                stop = min(context + query, (at + 1) * chunk)
                rows.append((row, at, stop - at * chunk, stop - max(context, at * chunk)))
        each, keys = [one[3] for one in rows], [one[2] for one in rows]
        starts, prefills = oracles.sums(each), sum(row < fields["num_prefills"] for row, *_ in rows)
        found = {name: fields[name] for name in (*OF_TOKENS, "num_tokens", "num_prefill_tokens", "num_decode_tokens")}
        found |= {
            "query_lens": each, "seq_lens": keys, "context_lens": [k - q for k, q in zip(keys, each, strict=True)],
            "query_start_loc": starts, "seq_start_loc": oracles.sums(keys),
            "logits_indices": [stop - 1 for stop in starts[1:]],
            "token_to_req_indices": [index for index, count in enumerate(each) for _ in range(count)],
            "num_reqs": len(rows), "num_prefills": prefills, "num_decodes": len(rows) - prefills,
            "max_query_len": max(each), "max_seq_len": max(keys), "num_encoder_tokens": 0, "max_encoder_seq_len": 0,
        }  # fmt: skip
        if "paged_kv_indices" in fields:
            pages, indptr = fields["paged_kv_indices"], fields["paged_kv_indptr"]
            of_chunks = []
            for row, at, count, _ in rows:
                first = indptr[row] + at * chunk // self.size
                held = indptr[row + 1] > indptr[row]
                of_chunks.append(pages[first : first - (-count // self.size)] if held else [])
            found["paged_kv_indptr"] = oracles.sums(map(len, of_chunks))
            found["paged_kv_indices"] = [block for some in of_chunks for block in some]
        how, missing = (*part.how, f"local {chunk}"), frozenset({"block_table"})
        return [Listed(metadata, found, how, missing, deeper=False)]

    def compare(self, part: Listed) -> None:
        metadata, names = part.metadata, [*part.fields, *sorted(ENCODER_ARRAYS - part.fields.keys())]
        self.draw.shuffle(names)
        unsaid = {"encoder_seq_lens", "encoder_seq_start_loc"} <= part.missing
        for name in names:
            unknown = name == "max_query_len" and {"query_lens", "query_start_loc"} <= part.missing
            if name in part.missing or unknown or (unsaid and name.endswith(("encoder_tokens", "encoder_seq_len"))):
                continue
            where = (*part.how, name)
            if name not in part.fields:
                assert not hasattr(metadata, name), where
                continue
            both = (metadata, metadata.host) if name in ARRAYS else (metadata,)
            for of in both:
                assert hasattr(of, name), where
                found = as_list(getattr(of, name))
                if name == "paged_kv_indices" and "captured" in part.how:
                    assert not any(found[len(part.fields[name]) :]), where
                    found = found[: len(part.fields[name])]
                assert found == part.fields[name], (*where, found, part.fields[name])
        assert (metadata.decodes_first, metadata.from_groups, metadata.of_rank) == (False, True, False), part.how
        if not part.missing and metadata.source is not None and "num_prefill_tokens" in part.fields:
            prompts, decodes = part.fields["num_prefill_tokens"], part.fields["num_decode_tokens"]
            assert token_counts(metadata, "decoder") == (prompts, prompts, decodes), part.how
