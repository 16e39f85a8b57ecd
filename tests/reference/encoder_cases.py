"""Steps of layers that are not causal, made row by row in plain Python, each with the dense answer."""

import itertools
from types import SimpleNamespace

import numpy as np
import torch

from attncore import BackendConfig
from attncore.dense import dense_attention
from attncore.reference import ReferenceBackend

FIELDS = {
    "query_start_loc": np.int32,
    "seq_lens": np.int32,
    "slot_mapping": np.int64,
    "encoder_seq_lens": np.int32,
    "encoder_query_lens": np.int32,
    "encoder_seq_start_loc": np.int32,
    "encoder_query_start_loc": np.int32,
    "cross_slot_mapping": np.int64,
    "cross_block_table": np.int32,
}


def make_backend(**fields):
    base = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "block_size": 4}
    return ReferenceBackend(BackendConfig(**(base | fields)))


def metadata_of(device="cpu", **fields):
    """Host arrays, and the same on the device, with the dtypes that the fields have."""
    host = SimpleNamespace(**{name: np.array(value, dtype=FIELDS[name]) for name, value in fields.items()})
    arrays = {name: torch.from_numpy(array).to(device) for name, array in vars(host).items()}
    bounds = fields.get("query_start_loc", [0])
    return SimpleNamespace(host=host, num_reqs=len(fields.get("encoder_seq_lens", bounds[1:])), **arrays)


def changed(case, **fields):
    """The case's metadata with other arrays."""
    arrays = {name: fields.get(name, value) for name, value in vars(case.metadata.host).items()}
    return metadata_of(case.query.device, **{name: value for name, value in arrays.items() if value is not None})


def sums(lengths):
    return [0, *np.cumsum(lengths, dtype=np.int64)]


class Case(SimpleNamespace):
    """``backend``, ``kind``, ``features``, ``metadata``, ``cache``, ``query``, ``key``, ``value``, the answer expected
    (output, log-sum-exp), and which slots are to hold which key."""

    def given(self, **changes):
        names = ("query", "key", "value", "metadata")
        return {name: getattr(self, name) for name in names} | {"kv_cache": self.cache} | changes

    def impl(self):
        return self.backend.impl("layer", attn_type=self.kind, **self.features)

    def forward(self, **changes):
        return self.impl().forward(**self.given(**changes))

    def check(self, tolerance=2e-5, **changes):
        before = None if self.cache is None else self.cache.clone()
        output = self.forward(**changes)
        close = {"atol": tolerance, "rtol": tolerance}
        assert output.dtype == self.query.dtype
        torch.testing.assert_close(output.float(), self.expected[0], **close)
        answer, lse = self.impl().forward_with_lse(**self.given(**changes))
        torch.testing.assert_close(answer.float(), self.expected[0], **close)
        torch.testing.assert_close(lse, self.expected[1], **close)
        if before is not None:
            for slot, token in self.slots:
                before[0].flatten(0, 1)[slot], before[1].flatten(0, 1)[slot] = self.key[token], self.value[token]
            torch.testing.assert_close(self.cache, before, rtol=0, atol=0, equal_nan=True)


def random_tensors(backend, num_queries, num_keys, device):
    config = backend.config
    size_v = config.head_size_v or config.head_size
    shapes = (
        (num_queries, config.num_heads, config.head_size),
        (num_keys, config.num_kv_heads, config.head_size),
        (num_keys, config.num_kv_heads, size_v),
    )
    return [torch.randn(shape).to(device, getattr(torch, config.dtype)) for shape in shapes]


def answers(backend, total, parts, features, device="cpu"):
    """Output and log-sum-exp of ``total`` tokens: of each (tokens, query, key, value) dense, of others nothing."""
    config = backend.config
    output = torch.zeros(total, config.num_heads, config.head_size_v or config.head_size, device=device)
    lse = torch.full(output.shape[:2], -torch.inf, device=device)
    for tokens, query, key, value in parts:
        output[tokens], lse[tokens] = dense_attention(query, key, value, causal=False, return_lse=True, **features)
    return output, lse


def make_encoder(lengths, *, kind="encoder", padding=0, features=None, seed=0, device="cpu", **config):
    """Rows of ``lengths`` tokens that see one another; ``padding`` tokens that the metadata does not know."""
    torch.manual_seed(seed)
    backend, features = make_backend(device=device, **config), {"scale": 0.3, **(features or {})}
    starts = sums(lengths)
    query, key, value = random_tensors(backend, starts[-1] + padding, starts[-1] + padding, device)
    for tensor in (query, key, value):
        tensor[starts[-1] :] = torch.nan
    parts = []
    for start, end in itertools.pairwise(starts):
        tokens = slice(start, end)
        parts.append((tokens, query[tokens], key[tokens], value[tokens]))
    prefix = "encoder_" if kind == "encoder" else ""
    fields = {f"{prefix}query_start_loc": starts, f"{prefix}seq_lens": lengths}
    return Case(
        backend=backend, kind=kind, features=features, metadata=metadata_of(device, **fields), cache=None, query=query,
        key=key, value=value, expected=answers(backend, len(query), parts, features, device),
    )  # fmt: skip


def make_cross(rows, *, padded_rows=0, padding=0, profiling=False, features=None, seed=0, device="cpu", **config):
    """Rows of (encoder tokens, whether they are computed in this step, query tokens). ``padded_rows`` as under a graph
    of the list builder. Every slot that no encoder token owns holds NaN."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    backend, features = make_backend(device=device, **config), {"scale": 0.3, **(features or {})}
    size = backend.config.block_size
    needs = [-(-length // size) for length, _, _ in rows]
    ids = (1 + random.permutation(sum(needs))).tolist()
    cache = None if profiling else backend.allocate_kv_cache(sum(needs) + 1).fill_(torch.nan)
    starts, fresh_lens = sums([count for _, _, count in rows]), [length * fresh for length, fresh, _ in rows]
    fresh_starts = sums(fresh_lens)
    query, key, value = random_tensors(backend, starts[-1] + padded_rows + padding, fresh_starts[-1] + padding, device)
    parts, slots, tables, kept = [], [], [], []
    for row, ((length, fresh, _), need) in enumerate(zip(rows, needs, strict=True)):
        table = [ids.pop() for _ in range(need)]
        places = [table[i // size] * size + i % size for i in range(length)]
        tokens = slice(starts[row], starts[row + 1])
        if fresh:
            new = slice(fresh_starts[row], fresh_starts[row + 1])
            keys, values = key[new], value[new]
            slots += [-1] * length if profiling else places
            kept += [] if profiling else [(slot, new.start + i) for i, slot in enumerate(places)]
        else:
            keys, values = random_tensors(backend, 0, length, device)[1:]
            cache[0].flatten(0, 1)[places], cache[1].flatten(0, 1)[places] = keys, values
        tables.append([] if fresh else table)  # the list builder gives prompts a row of zeros
        parts.append((tokens, query[tokens], keys, values))
    table = np.zeros((len(rows) + padded_rows, max(map(len, tables), default=0)), np.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    lengths = [length for length, _, _ in rows] + [1] * padded_rows
    fields = {
        "query_start_loc": starts,
        "encoder_seq_lens": lengths,
        "encoder_seq_start_loc": sums(lengths),
        "encoder_query_lens": fresh_lens + [0] * padded_rows,
        "encoder_query_start_loc": fresh_starts + [fresh_starts[-1]] * padded_rows,
        "cross_slot_mapping": slots,
        "cross_block_table": table,
    }
    return Case(
        backend=backend, kind="encoder_decoder", features=features, metadata=metadata_of(device, **fields), cache=cache,
        query=query, key=key, value=value, slots=kept,
        expected=answers(backend, len(query), parts, features, device),
    )  # fmt: skip
