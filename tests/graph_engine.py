"""A small engine that decodes through captured graphs: stand-ins on a CPU, CUDA's own on a GPU. Checked densely."""

import random

import oracles
import torch

from attncore import BackendConfig
from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.builder.lists.capture_state import CommonAttentionState
from attncore.dense import dense_attention
from attncore.graphs import capturing, launch, new_graph
from attncore.reference import ReferenceBackend

HEADS, HEAD_SIZE, SCALE = 2, 8, 0.35
NUM_BLOCKS = 200


class Request:
    """One sequence: its blocks, its history on the host, and its encoder's where it has one."""

    def __init__(self, target):
        self.target, self.length = target, 0
        self.table, self.cross_table = [], []
        self.keys = self.values = torch.zeros(0, HEADS, HEAD_SIZE)
        self.encoder = None


class GraphEngine:
    """Requests that join, grow, pause and leave; ``step`` decodes some of them through a captured graph."""

    def __init__(
        self, seed=0, *, device="cpu", layout="common", block_size=4, window=None, encoder=False, capture=40,
        sizes=(1, 2, 4, 8), kernels=None,
    ):  # fmt: skip
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.device, self.layout, self.block_size, self.window = device, layout, block_size, window
        self.longest, self.sizes = capture, sizes
        self.backend = ReferenceBackend(BackendConfig(HEADS, HEADS, HEAD_SIZE, "float32", block_size, device=device))
        self.builder = CommonMetadataBuilder(
            block_size, layout, sliding_window=window, max_seq_len_to_capture=capture, encoder_decoder=encoder,
            backend=self.backend, kernels=kernels,
        )  # fmt: skip
        self.state = CommonAttentionState(self.backend, self.builder)
        self.encoder = encoder
        slots = (NUM_BLOCKS + 1) * block_size  # the last block is for what this engine writes of padding
        self.cache = torch.zeros(4, slots, HEADS, HEAD_SIZE, device=device)  # keys, values; those of encoders
        self.given = torch.zeros(3, max(sizes), HEADS, HEAD_SIZE, device=device)
        self.graphs, self.results, self.captured = {}, {}, {}
        self.free = list(range(NUM_BLOCKS))
        self.random.shuffle(self.free)
        self.requests = []

    def capture(self):
        """Graphs of all sizes, the largest first."""
        with self.state.graph_capture(max(self.sizes)):
            for size in sorted(self.sizes, reverse=True):
                metadata = self.captured[size] = self.state.metadata_for_capture(size)
                self.state.begin_forward(metadata)
                self._model(size, metadata)  # a warm-up
                graph = self.graphs[size] = new_graph(self.device)
                with capturing(graph):
                    self.results[size] = launch(self._model, size, metadata)
        self.addresses = self._addresses()

    def step(self, in_place=False):
        """One step of some requests: the output is the dense one's, the graph read what the rules say."""
        chosen = self._chosen()
        groups, pad = self._groups(chosen), self.state.pad_size(len(chosen))
        if in_place:
            metadata = self.state.build(groups, pad)
        else:
            metadata = self.builder.build(groups, pad)
            assert self.state.prepare(metadata) is self.captured[metadata.num_reqs]
        assert metadata.num_reqs == min(size for size in self.sizes if size >= len(chosen))
        self.state.begin_forward(metadata)
        self._replay(chosen, metadata.num_reqs)

    def advanced_steps(self, count):
        """``count`` steps of some requests that are advanced, not built, but for the first."""
        chosen = self._chosen()
        chosen = [one for one in chosen if one.length + count <= self.longest] or [self._arrived_short()]
        for request in chosen:
            while len(request.table) * self.block_size < request.length + count:
                request.table.append(self.free.pop())
        metadata = self.builder.build(self._groups(chosen), self.state.pad_size(len(chosen)))
        for step in range(count):
            if step:
                metadata.advance_step()
            self.state.prepare(metadata)
            self.state.begin_forward(metadata)
            self._replay(chosen, metadata.num_reqs)

    def _replay(self, chosen, size):
        """Replays the graph of ``size`` over the prepared step of ``chosen``, and compares."""
        n = len(chosen)
        tokens = torch.randn(3, n, HEADS, HEAD_SIZE)
        self.given[:, :n].copy_(tokens)
        self.graphs[size].replay()
        output, *read = self.results[size]
        expected = [self._dense(request, *tokens[:, i]) for i, request in enumerate(chosen)]
        torch.testing.assert_close(output[:n].cpu(), torch.stack(expected), atol=1e-4, rtol=1e-4)
        buffers = expected_buffers(self._oracle_rows(chosen), self, size)
        captured = self.captured[size]
        for name, values in zip(self._names(captured), read, strict=True):
            assert values.tolist() == buffers[name], name
        for name, values in buffers.items():
            assert getattr(captured.host, name).tolist() == values, name
        for request in chosen:
            request.length += 1
        assert self._addresses() == self.addresses

    def check_cache(self):
        """Every request's keys and values are where its table says, as it wrote them."""
        found = self.cache.cpu()
        for request in self.requests:
            slots = oracles.slots_of(request.table, 0, request.length, self.block_size)
            torch.testing.assert_close(found[:2, slots], torch.stack((request.keys, request.values)))

    # ---- what runs in the graph

    def _model(self, size, metadata):
        """Attention of one layer, and copies of every buffer that the graph reads."""
        query, key, value = self.given[:, :size]
        self.cache[0][metadata.slot_mapping] = key
        self.cache[1][metadata.slot_mapping] = value
        if self.layout == "flashinfer":
            output = self._attend(query, self.cache[:2], *self._pages(metadata))
        else:
            output = self._attend(query, self.cache[:2], metadata.block_table, metadata.seq_lens)
        if self.encoder:
            assert metadata.decode_metadata is metadata
            lens = metadata.encoder_seq_lens
            output = output + self._attend(query, self.cache[2:], metadata.cross_block_table, lens, windowed=False)
        return (output, *(getattr(metadata, name).clone() for name in self._names(metadata)))

    def _attend(self, query, caches, table, lengths, windowed=True):
        size, lengths = self.block_size, lengths.unsqueeze(1)
        offsets = torch.arange(size, device=self.device)
        slots = (table.long().unsqueeze(2) * size + offsets).flatten(1)
        keys, values = caches[0][slots], caches[1][slots]
        position = torch.arange(slots.shape[1], device=self.device)
        seen = position < lengths
        if windowed and self.window is not None:
            seen = seen & (position >= lengths - self.window)
        scores = torch.einsum("bhd,bkhd->bhk", query, keys) * SCALE
        weights = scores.masked_fill(~seen.unsqueeze(1), -1e9).softmax(2)
        return torch.einsum("bhk,bkhd->bhd", weights, values)

    def _pages(self, metadata):
        """(table, lengths) from the page lists alone."""
        indptr, indices = metadata.paged_kv_indptr.long(), metadata.paged_kv_indices
        columns = torch.arange(oracles.cdiv(self.longest, self.block_size), device=self.device)
        at = (indptr[:-1].unsqueeze(1) + columns).clamp(max=len(indices) - 1)
        counts = indptr[1:] - indptr[:-1]
        return indices[at], (counts - 1) * self.block_size + metadata.paged_kv_last_page_len

    def _names(self, metadata):
        return list(self.state.graph_input_buffers(metadata))

    def _addresses(self):
        return {
            (size, name): getattr(metadata, name).data_ptr()
            for size, metadata in self.captured.items()
            for name in self._names(metadata)
        }

    # ---- requests

    def _chosen(self):
        for request in [one for one in self.requests if one.length >= one.target]:
            self.requests.remove(request)
            self.free += request.table + request.cross_table
            self.random.shuffle(self.free)
        while len(self.requests) < max(self.sizes):
            self.requests.append(self._arrived())
        chosen = self.random.sample(self.requests, self.random.randint(1, len(self.requests)))
        for request in chosen:
            while len(request.table) * self.block_size <= request.length:
                request.table.append(self.free.pop())
        return chosen

    def _arrived(self):
        """A request whose prompt is in the cache already."""
        request = Request(self.random.randint(2, self.longest))
        return self._filled(request, self.random.randint(1, request.target - 1))

    def _arrived_short(self):
        self.requests.append(self._filled(Request(self.longest), 1))
        return self.requests[-1]

    def _filled(self, request, length):
        lookahead = self.random.randint(0, 1) if self.layout.startswith("flash") else 0
        request.table = [self.free.pop() for _ in range(oracles.cdiv(length, self.block_size) + lookahead)]
        request.keys, request.values = torch.randn(2, length, HEADS, HEAD_SIZE)
        request.length = length
        slots = oracles.slots_of(request.table, 0, length, self.block_size)
        self.cache[0, slots], self.cache[1, slots] = request.keys.to(self.device), request.values.to(self.device)
        if self.encoder:
            tokens = self.random.randint(1, self.longest)
            request.cross_table = [self.free.pop() for _ in range(oracles.cdiv(tokens, self.block_size))]
            request.encoder = torch.randn(2, tokens, HEADS, HEAD_SIZE)
            self.cache[2:, oracles.slots_of(request.cross_table, 0, tokens, self.block_size)] = request.encoder.to(
                self.device
            )
        return request

    def _groups(self, chosen):
        groups = []
        for i, request in enumerate(chosen):
            encoder = (len(request.encoder[0]), request.cross_table) if self.encoder else ()
            groups.append(SequenceGroup(False, [Sequence(i, 1, request.length, list(request.table))], False, *encoder))
        return groups

    def _oracle_rows(self, chosen):
        return [
            (request.length, request.table, (len(request.encoder[0]), request.cross_table) if self.encoder else None)
            for request in chosen
        ]

    def _dense(self, request, query, key, value):
        request.keys = torch.cat((request.keys, key.unsqueeze(0)))
        request.values = torch.cat((request.values, value.unsqueeze(0)))
        output = dense_attention(
            query.unsqueeze(0), request.keys, request.values, scale=SCALE, sliding_window=self.window
        )[0]
        if self.encoder:
            output = output + dense_attention(query.unsqueeze(0), *request.encoder, scale=SCALE, causal=False)[0]
        return output


def expected_buffers(rows, engine, size):
    """What a graph of ``size`` reads of decodes: rows are (context, table, (encoder length, cross table) or None)."""
    n, block_size, capture = len(rows), engine.block_size, engine.longest
    groups = [(False, False, [(1, context, table)]) for context, table, _ in rows]
    out = oracles.list_step(groups, block_size, engine.layout, engine.window, pad=size - n, capture=capture)
    width = oracles.cdiv(capture, block_size)
    fields = {name: out[name] for name in ("slot_mapping", "positions", "seq_lens", "seq_start_loc")}
    fields |= {name: out[name] + [0] * (size - n) for name in ("context_lens", "query_lens", "logits_indices")}
    fields["token_to_req_indices"] = list(range(size))
    fields["query_start_loc"] = out["query_start_loc"] + [n] * (size - n)
    fields["block_table"] = out["block_tables"]
    if "paged_kv_indptr" in out:
        fields |= {name: out[name] for name in ("paged_kv_indptr", "paged_kv_last_page_len")}
        room = max(engine.sizes) * width
        fields["paged_kv_indices"] = (out["paged_kv_indices"] + [0] * room)[:room]
    if engine.encoder:
        encoders = oracles.encoder_step(groups, [encoder for _, _, encoder in rows], block_size, size - n, capture)
        names = ("encoder_seq_lens", "encoder_seq_start_loc", "encoder_query_lens", "encoder_query_start_loc")
        fields |= {name: encoders[name] for name in (*names, "cross_block_table")}
        fields["cross_slot_mapping"] = []  # decodes run no encoder tokens
    return fields
