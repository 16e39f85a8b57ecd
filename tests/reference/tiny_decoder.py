"""A decoder of a few layers over `reference`, with rotary positions: what tests of whole models decode with."""

from __future__ import annotations

import torch

from attncore import BackendConfig
from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder
from attncore.reference import ReferenceBackend

VOCABULARY, HEADS, KV_HEADS, SIZE, BLOCKS = 24, 4, 2, 8, 256
WIDTH = HEADS * SIZE
GROUPS = (KVCacheGroup("full", 8, kernel_block_size=4), KVCacheGroup("window", 2, sliding_window=5))


class TinyDecoder:
    """Weights alone: two decoders of one seed are equal. Layers take turns in attending all tokens, and a window."""

    def __init__(self, seed, layers=2):
        random = torch.Generator().manual_seed(seed)

        def weights(*shape, scale=0.3):
            return torch.randn(*shape, generator=random) * scale

        self.embedding = weights(VOCABULARY, WIDTH, scale=1.0)
        self.head = weights(WIDTH, VOCABULARY)
        self.layers = [
            [weights(WIDTH, heads * SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)] + [weights(WIDTH, WIDTH)]
            for _ in range(layers)
        ]


class Runner:
    """Runs a decoder: a batch of one or two KV-cache groups, a builder, the layers' caches, and a pool of blocks."""

    def __init__(self, decoder, *, max_drafts=31, trees=True, groups=GROUPS, transport="auto"):
        self.decoder = decoder
        self.batch = InputBatch(max_num_reqs=4, max_model_len=128, groups=groups)
        configs = {
            group.name: BackendConfig(
                HEADS, KV_HEADS, SIZE, "float32", group.tokens_per_column, sliding_window=group.sliding_window
            )
            for group in groups
        }
        self.backends = {name: ReferenceBackend(config) for name, config in configs.items()}
        self.builder = MetadataBuilder(
            self.batch, self.backends, max_num_batched_tokens=128, decode_threshold=1 + max_drafts, draft_trees=trees,
            transport=transport,
        )  # fmt: skip
        self.layers = []
        for index in range(len(decoder.layers)):
            group = groups[index % len(groups)]
            backend = self.backends[group.name]
            impl = backend.impl(f"layers.{index}", scale=SIZE**-0.5, sliding_window=group.sliding_window)
            self.layers.append((group.name, impl, backend.allocate_kv_cache(BLOCKS * group.kernel_blocks)))
        self.free = {group.name: list(range(1, BLOCKS)) for group in groups}

    def add(self, name, tokens):
        """Adds a request with blocks for ``tokens`` tokens."""
        ids = {}
        for group in self.batch.groups:
            ids[group.name] = [self.free[group.name].pop() for _ in range(-(-tokens // group.block_size))]
        self.batch.add_request(name, ids)

    def run(self, tokens, trees=None):
        """Runs a step of ``tokens`` (request: token ids), whose drafts may form ``trees``; logits by request."""
        scheduled = {name: len(tokens.get(name, ())) for name in self.batch.req_ids}
        metadata = self.builder.build(scheduled, trees=trees)
        ids = torch.tensor([one for name in metadata.req_ids for one in tokens[name]])
        logits = self.forward(ids, metadata)
        starts = metadata.host.query_start_loc.tolist()
        return {name: logits[starts[row] : starts[row + 1]] for row, name in enumerate(metadata.req_ids)}

    def forward(self, ids, metadata):
        hidden = self.decoder.embedding[ids]
        for (*projections, out), (group, impl, cache) in zip(self.decoder.layers, self.layers, strict=True):
            query, key, value = (
                (normed(hidden) @ weight).view(len(ids), -1, SIZE) for weight in projections
            )  # fmt: skip
            query, key = (rotated(tensor, metadata.positions) for tensor in (query, key))
            attended = impl.forward(query, key, value, cache, metadata.groups[group])
            hidden = hidden + attended.flatten(1) @ out
        return normed(hidden) @ self.decoder.head

    def keep(self, paths):
        """Keeps these paths of the last step's trees; returns the moves by group, which were made."""
        moves = self.builder.keep_paths(paths)
        for name, pairs in moves.items():
            self.backends[name].move_slots([cache for group, _, cache in self.layers if group == name], pairs)
        return moves

    def cached(self, name):
        """The keys and values of a request's computed tokens in each layer, which its group's window sees."""
        found, row = [], self.batch.req_ids.index(name)
        tokens = torch.arange(self.batch.num_computed_tokens(name))
        for group, _, cache in self.layers:
            table, backend = self.batch._core.tables[group], self.backends[group]
            blocks = torch.tensor(table.array[row].tolist())[tokens // backend.config.block_size]
            for part in backend.kv_cache_views(cache):
                found.append(part[blocks, tokens % backend.config.block_size])
        return found


def normed(hidden):
    return hidden / hidden.pow(2).mean(-1, keepdim=True).sqrt()


def rotated(tensor, positions):
    """Rotary embeddings: a token that stands elsewhere has another key."""
    half = tensor.shape[-1] // 2
    angle = positions[:, None, None].float() / 20 ** (torch.arange(half) / half)
    low, high = tensor.split(half, -1)
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)
