"""Paged batches made token by token in plain Python, each with the dense answer: the oracle of these tests."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attncore.abstract import BackendConfig
from attncore.dense import dense_attention
from attncore.reference import ReferenceBackend

DEVICE_FIELDS = {"slot_mapping": np.int64, "block_table": np.int32, "seq_lens": np.int32, "query_start_loc": np.int32}


@dataclass
class Row:
    """One request of a step: ``context`` cached tokens and ``query_len`` new ones."""

    context: int
    query_len: int
    prompt: bool = False  # list builder: masked early slots under a window, no table when context is 0
    profiling: bool = False


@dataclass
class Case:
    """A step, with everything that forward wants and what it should answer."""

    backend: ReferenceBackend
    features: dict
    metadata: SimpleNamespace
    cache: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    expected: torch.Tensor
    rows: list[Row]

    def given(self, **changes):
        given = {name: getattr(self, name) for name in ("query", "key", "value", "metadata")} | {"kv_cache": self.cache}
        if self.backend.config.use_mla:
            given["value"] = None
        return given | changes

    def forward(self, **changes):
        return self.backend.impl("layer", **self.features).forward(**self.given(**changes))

    def check(self, tolerance=2e-5):
        before = self.cache.cpu().clone()
        output = self.forward()
        assert output.dtype == self.query.dtype
        torch.testing.assert_close(output.float(), self.expected, atol=tolerance, rtol=tolerance)
        slots = torch.from_numpy(self.metadata.host.slot_mapping)
        touched = torch.zeros(parts_of(self.cache, self.backend.config)[0].shape[:2], dtype=torch.bool)
        touched.view(-1)[slots[slots >= 0]] = True
        touched[-1] = True  # the sink
        after, before = (parts_of(cache, self.backend.config) for cache in (self.cache.cpu(), before))
        for part, old, new in zip(after, before, (self.key.cpu(), self.value.cpu()), strict=False):
            exactly = {"equal_nan": True, "rtol": 0, "atol": 0}
            torch.testing.assert_close(part[~touched], old[~touched], **exactly)
            flat = part.flatten(0, 1)
            new = new[: len(slots)][slots >= 0].to(flat.dtype)
            torch.testing.assert_close(flat[slots[slots >= 0]], new, **exactly)


def parts_of(cache, config):
    """Views (blocks, block size, heads, size) of what a cache holds: keys and values, or latent rows."""
    if config.use_mla:
        return [cache[:, :, None]]
    if config.head_size_v in (None, config.head_size):
        return [cache[0], cache[1]]
    return [cache[..., : config.head_size], cache[..., config.head_size :]]


def make_case(
    rows,
    *,
    block_size=4,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    head_size_v=None,
    use_mla=False,
    sliding_window=None,
    logits_soft_cap=None,
    alibi_slopes=None,
    sinks=None,
    dtype="float32",
    kv_cache_dtype="auto",
    list_builder=False,
    null_passed=False,
    padded_tokens=0,
    padded_rows=0,
    beyond=0,
    device="cpu",
    seed=0,
    dead=float("nan"),
) -> Case:
    """``rows`` are Row or (context, query_len). Blocks are dealt in random order from a pool with none to spare.

    ``dead`` fills every slot that no live token owns, block 0 and the sink too. ``null_passed`` puts block 0 where a
    window has passed. Padding is that of the builder: query_start_loc plateaus, or (list builder) leaves the padded
    rows out. ``beyond`` is the number of tokens that the tensors have and the metadata does not know.
    """
    rows = [row if isinstance(row, Row) else Row(*row) for row in rows]
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    config = BackendConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=head_size_v,
        use_mla=use_mla,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        kv_cache_layout="NHD",
        device=device,
    )
    backend = ReferenceBackend(config)
    features = {
        "scale": head_size**-0.5,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }
    torch_dtype = getattr(torch, dtype)
    needs = [0 if row.profiling else -(-(row.context + row.query_len) // block_size) for row in rows]
    num_blocks = 1 + sum(needs)
    ids = list(1 + random.permutation(num_blocks - 1))
    cache = backend.allocate_kv_cache(num_blocks).cpu()
    cache.fill_(dead)
    parts, size_v = parts_of(cache, config), head_size_v or head_size

    queries, keys, values, expected, slots = [], [], [], [], []
    tables, lengths = [], []
    for row, need in zip(rows, needs, strict=True):
        total = row.context + row.query_len
        query = torch.randn(row.query_len, num_heads, head_size).mul(2).to(torch_dtype)
        key, value = (torch.randn(total, num_kv_heads, size).to(torch_dtype) for size in (head_size, size_v))
        value = key[..., :size_v] if use_mla else value
        table = [int(ids.pop()) for _ in range(need)]
        visible = 0 if sliding_window is None else max(0, row.context - sliding_window + 1)
        masked = max(0, row.query_len - sliding_window) if row.prompt and sliding_window else 0
        for token in range(row.context if not row.profiling else 0):
            if token >= visible:
                for part, new in zip(parts, (key, value), strict=False):
                    part[table[token // block_size], token % block_size] = new[token]
        for token in range(row.context, total):
            hidden = row.profiling or token < masked
            slots.append(-1 if hidden else table[token // block_size] * block_size + token % block_size)
        answer_key, answer_value = (key[row.context :], value[row.context :]) if row.profiling else (key, value)
        if kv_cache_dtype != "auto":
            answer_key, answer_value = (x.to(getattr(torch, kv_cache_dtype)) for x in (answer_key, answer_value))
        expected.append(dense_attention(query, answer_key, answer_value, **features))
        if null_passed:
            table = [0 if (i + 1) * block_size <= visible else block for i, block in enumerate(table)]
        if list_builder and row.prompt and row.context == 0:
            table = []
        elif list_builder and not row.prompt and sliding_window is not None and not row.profiling:
            kept = -(-sliding_window // block_size) + (total % block_size != 0)
            table = table[-kept:]
            total = min(total, -(-sliding_window // block_size) * block_size + total % block_size)
        queries.append(query)
        keys.append(key[row.context :])
        values.append(value[row.context :])
        tables.append(table)
        lengths.append(total)

    padding = padded_tokens + (padded_rows if list_builder else 0)
    slots += [-1] * padding
    padding += beyond
    sizes = ((num_heads, head_size), (num_kv_heads, head_size), (num_kv_heads, size_v))
    for group, shape in zip((queries, keys, values), sizes, strict=True):
        group.append(torch.full((padding, *shape), dead, dtype=torch_dtype))
    expected.append(torch.zeros(padding, num_heads, size_v))
    starts = np.concatenate(([0], np.cumsum([row.query_len for row in rows])))
    if not list_builder:
        starts = np.concatenate((starts, [starts[-1]] * padded_rows))
    block_table = np.zeros((len(rows) + padded_rows, max(map(len, tables), default=0)), dtype=np.int32)
    for i, table in enumerate(tables):
        block_table[i, : len(table)] = table
    host = SimpleNamespace(
        slot_mapping=np.array(slots, dtype=np.int64),
        query_start_loc=starts.astype(np.int32),
        seq_lens=np.array(lengths + [1] * padded_rows, dtype=np.int32),
        block_table=block_table,
    )
    metadata = SimpleNamespace(host=host, num_reqs=len(rows), num_tokens=int(starts[-1]))
    for name, kind in DEVICE_FIELDS.items():
        array = getattr(host, name)
        assert array.dtype == kind
        setattr(metadata, name, torch.from_numpy(array).to(device))
    return Case(
        backend,
        features,
        metadata,
        cache.to(device),
        *(torch.cat(group).to(device) for group in (queries, keys, values)),
        torch.cat(expected).to(device),
        rows,
    )


@pytest.fixture(scope="session")
def paged_case():
    """The function ``make_case``."""
    return make_case


@pytest.fixture(scope="session")
def row():
    """The class ``Row``."""
    return Row
