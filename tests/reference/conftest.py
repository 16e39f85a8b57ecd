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


@dataclass(kw_only=True)
class Options:
    """How a case is made.

    ``dead`` fills every slot that no live token owns, block 0 too. ``null_passed`` puts block 0 where a
    window has passed. Padding is that of the builder: query_start_loc plateaus, or (list builder) leaves the padded
    rows out. ``beyond`` is the number of tokens that the tensors have and the metadata does not know.
    """

    block_size: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 8
    head_size_v: int | None = None
    use_mla: bool = False
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: object = None
    sinks: object = None
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    list_builder: bool = False
    null_passed: bool = False
    padded_tokens: int = 0
    padded_rows: int = 0
    beyond: int = 0
    device: str = "cpu"
    seed: int = 0
    dead: float = float("nan")

    @property
    def size_v(self):
        return self.head_size_v or self.head_size

    def config(self):
        names = ("num_heads", "num_kv_heads", "head_size", "head_size_v", "use_mla", "dtype", "kv_cache_dtype")
        names += ("block_size", "device")
        return BackendConfig(**{name: getattr(self, name) for name in names}, kv_cache_layout="NHD")

    def features(self):
        names = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")
        return {"scale": self.head_size**-0.5} | {name: getattr(self, name) for name in names}


@dataclass
class MadeRow:
    """What one row adds to a step: its new tokens' tensors and slots, the answer, and its table and length."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    expected: torch.Tensor
    slots: list[int]
    table: list[int]
    length: int


def make_case(rows, **options) -> Case:
    """``rows`` are Row or (context, query_len), ``options`` those of ``Options``.

    Blocks are dealt in random order from a pool with none to spare.
    """
    options = Options(**options)
    rows = [row if isinstance(row, Row) else Row(*row) for row in rows]
    random = np.random.default_rng(options.seed)
    torch.manual_seed(options.seed)
    backend = ReferenceBackend(options.config())
    needs = [0 if row.profiling else -(-(row.context + row.query_len) // options.block_size) for row in rows]
    num_blocks = 1 + sum(needs)
    ids = list(1 + random.permutation(num_blocks - 1))
    cache = backend.allocate_kv_cache(num_blocks).cpu()
    cache.fill_(options.dead)
    parts = parts_of(cache, backend.config)
    made = [
        make_row(row, [int(ids.pop()) for _ in range(need)], parts, options)
        for row, need in zip(rows, needs, strict=True)
    ]
    padding = options.padded_tokens + (options.padded_rows if options.list_builder else 0)
    *tensors, expected = padded_tensors(made, padding + options.beyond, options)
    metadata = make_metadata(rows, made, padding, options)
    return Case(backend, options.features(), metadata, cache.to(options.device), *tensors, expected=expected, rows=rows)


def make_row(row, table, parts, options) -> MadeRow:
    """Draw a row's tensors and write its context to the cache's ``parts``, at the blocks of ``table``."""
    window, dtype, total = options.sliding_window, getattr(torch, options.dtype), row.context + row.query_len
    sizes = (options.head_size, options.size_v)
    query = torch.randn(row.query_len, options.num_heads, options.head_size).mul(2).to(dtype)
    key, value = (torch.randn(total, options.num_kv_heads, size).to(dtype) for size in sizes)
    value = key[..., : options.size_v] if options.use_mla else value
    visible = 0 if window is None else max(0, row.context - window + 1)
    write_context(parts, (key, value), table, range(visible, 0 if row.profiling else row.context))
    slots = slots_of(row, table, options)
    expected = answer(row, query, key, value, options)
    if options.null_passed:
        table = [0 if (i + 1) * options.block_size <= visible else block for i, block in enumerate(table)]
    if options.list_builder:
        table, total = list_builders(row, table, total, options)
    return MadeRow(query, key[row.context :], value[row.context :], expected, slots, table, total)


def write_context(parts, tensors, table, tokens):
    """Write the given tokens of keys and values to the cache."""
    block_size = parts[0].shape[1]
    for token in tokens:
        for part, new in zip(parts, tensors, strict=False):
            part[table[token // block_size], token % block_size] = new[token]


def slots_of(row, table, options):
    """Where the row's new tokens go: -1 in a profiling run, and where a prompt's window has passed."""
    window, block_size = options.sliding_window, options.block_size
    masked = max(0, row.query_len - window) if row.prompt and window else 0
    slots = []
    for token in range(row.context, row.context + row.query_len):
        hidden = row.profiling or token < masked
        slots.append(-1 if hidden else table[token // block_size] * block_size + token % block_size)
    return slots


def answer(row, query, key, value, options):
    """The dense answer, from keys and values as the cache would hold them."""
    if row.profiling:
        key, value = key[row.context :], value[row.context :]
    if options.kv_cache_dtype != "auto":
        key, value = (x.to(getattr(torch, options.kv_cache_dtype)) for x in (key, value))
    return dense_attention(query, key, value, **options.features())


def list_builders(row, table, total, options):
    """The table and length that the list builder gives a row: none to a new prompt, a decode's cut to its window."""
    window, block_size = options.sliding_window, options.block_size
    if row.prompt and row.context == 0:
        return [], total
    if not row.prompt and window is not None and not row.profiling:
        kept = -(-window // block_size) + (total % block_size != 0)
        return table[-kept:], min(total, -(-window // block_size) * block_size + total % block_size)
    return table, total


def padded_tensors(made, padding, options):
    """Query, key, value and expected output of all rows, and ``padding`` dead tokens, whose answer is 0."""
    heads = {"query": options.num_heads, "key": options.num_kv_heads, "value": options.num_kv_heads}
    tensors = []
    for name, num_heads in heads.items():
        size = options.size_v if name == "value" else options.head_size
        dead = torch.full((padding, num_heads, size), options.dead, dtype=getattr(torch, options.dtype))
        tensors.append(torch.cat([*(getattr(row, name) for row in made), dead]).to(options.device))
    zeros = torch.zeros(padding, options.num_heads, options.size_v)
    return *tensors, torch.cat([*(row.expected for row in made), zeros]).to(options.device)


def make_metadata(rows, made, padding, options):
    """The step's metadata, with ``padding`` tokens, on the host and on the device."""
    starts = np.concatenate(([0], np.cumsum([row.query_len for row in rows])))
    if not options.list_builder:
        starts = np.concatenate((starts, [starts[-1]] * options.padded_rows))
    width = max((len(row.table) for row in made), default=0)
    block_table = np.zeros((len(rows) + options.padded_rows, width), dtype=np.int32)
    for i, row in enumerate(made):
        block_table[i, : len(row.table)] = row.table
    host = SimpleNamespace(
        slot_mapping=np.array([slot for row in made for slot in row.slots] + [-1] * padding, dtype=np.int64),
        query_start_loc=starts.astype(np.int32),
        seq_lens=np.array([row.length for row in made] + [1] * options.padded_rows, dtype=np.int32),
        block_table=block_table,
    )
    metadata = SimpleNamespace(host=host, num_reqs=len(rows), num_tokens=int(starts[-1]))
    for name, kind in DEVICE_FIELDS.items():
        array = getattr(host, name)
        assert array.dtype == kind
        setattr(metadata, name, torch.from_numpy(array).to(options.device))
    return metadata


@pytest.fixture(scope="session")
def paged_case():
    """The function ``make_case``."""
    return make_case


@pytest.fixture(scope="session")
def row():
    """The class ``Row``."""
    return Row
