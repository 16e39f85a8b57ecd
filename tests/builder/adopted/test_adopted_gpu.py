"""Adopted steps on a CUDA device: thousands race ahead of it, eager and through graphs; no step synchronises."""

import warnings
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from builder.plain_backend import Impl, Least

import attncore
from attncore import ATTNCORE_API, AdoptedSteps, AttncoreError, BackendConfig, BackendSpec, MultipleOf
from attncore.graphs import capturing, new_graph
from attncore.testing.engines.adopting_builder import AdoptingBuilder
from attncore.testing.engines.captured_engine import CapturedEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # of FlashAttention 4 while it compiles
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
]
ROWS, MODEL_LEN, STEPS, SIZES = 32, 600, 1000, (4, 16, 32)
READ = ("paged_kv_indptr", "paged_kv_last_page_len", "seq_start_loc", "context_lens", "positions", "seq_lens")


@contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class OnCuda(Least):
    impl_class = Impl


def least(block_size=16):
    spec = BackendSpec(
        name="on-cuda", api=ATTNCORE_API, factory="nowhere:OnCuda", devices={"cuda": 1}, dtypes={"float32"},
        head_sizes={8}, block_sizes=MultipleOf(1), device_needs={"paged_kv_indices"}, cuda_graph="always",
    )  # fmt: skip
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_size": 8, "dtype": "float32", "block_size": block_size}
    return OnCuda(BackendConfig(**sizes, device="cuda", spec=spec))


def of_library(name, **more):
    asked = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"} | more
    try:
        return attncore.select(**asked, backend=name).create()
    except AttncoreError as error:
        pytest.skip(f"{name} cannot be used here: {str(error).splitlines()[0]}")


class Racing:
    """An engine that never waits: its buffers, pinned memory for each step, and random decodes."""

    def __init__(self, backend, seed=0):
        self.size = backend.config.block_size
        self.columns, self.blocks = -(-MODEL_LEN // self.size), 400
        self.steps = AdoptedSteps(
            backend, max_num_reqs=ROWS, max_num_tokens=ROWS, max_model_len=MODEL_LEN, num_blocks=self.blocks
        )
        self.generator = torch.Generator().manual_seed(seed)
        int32 = {"dtype": torch.int32, "device": "cuda"}
        self.starts, self.lengths = torch.zeros(ROWS + 1, **int32), torch.zeros(ROWS, **int32)
        self.table = torch.zeros((ROWS, self.columns + 5), **int32)[:, : self.columns]
        self.slots = torch.full((ROWS,), -1, dtype=torch.int64, device="cuda")
        self.sent = []

    def send(self, buffer, values):
        pinned = values.pin_memory()
        self.sent.append(pinned)  # until the end: nothing is read too late
        view = buffer[: len(values)]
        view.copy_(pinned, non_blocking=True)
        return view

    def given(self, count, size):
        """The tensors of a step of ``count`` decodes, padded to ``size`` rows, and what the host knows of it."""
        lengths, table = torch.zeros(size, dtype=torch.int32), torch.zeros((size, self.columns), dtype=torch.int32)
        lengths[:count] = torch.randint(1, MODEL_LEN + 1, (count,), generator=self.generator)
        table[:count] = torch.randint(1, self.blocks, (count, self.columns), generator=self.generator)
        starts = torch.arange(size + 1, dtype=torch.int32).clamp(max=count)
        self.now = lengths, table
        return {
            "query_start_loc": self.send(self.starts, starts), "seq_lens": self.send(self.lengths, lengths),
            "block_table": self.send(self.table, table), "slot_mapping": self.slots[:size],
            "host_query_start_loc": starts, "host_seq_lens": lengths,
        }  # fmt: skip

    def counts(self):
        return torch.randint(1, ROWS + 1, (STEPS,), generator=self.generator).tolist()


def size_of(count, captured):
    return next(size for size in SIZES if size >= count) if captured else count


@pytest.mark.parametrize("captured", [False, True])
def test_fields_of_a_thousand_racing_steps(captured):
    engine, seen, known, graphs = Racing(least()), [], [], {}
    names = (*READ, "page_buffer")
    if captured:
        for size in SIZES:
            metadata = engine.steps.build(**engine.given(size, size), capturing=True)
            [getattr(metadata, name) for name in READ]
            torch.cuda.synchronize()
            graphs[size] = graph, out = new_graph("cuda"), []
            with capturing(graph):
                out += [getattr(metadata, name).clone() for name in names]
    else:
        metadata = engine.steps.build(**engine.given(1, 1))
        [getattr(metadata, name) for name in READ]  # from now on each step makes them
    with no_synchronisation():
        for count in engine.counts():
            size = size_of(count, captured)
            metadata = engine.steps.build(**engine.given(count, size))
            assert metadata.use_cuda_graph is captured
            if captured:
                graph, out = graphs[size]
                graph.replay()
            else:
                out = [getattr(metadata, name) for name in names]
            seen.append([tensor.clone() for tensor in out])
            host = [torch.from_numpy(getattr(metadata.host, name).copy()) for name in READ]
            known.append((host, metadata.host.paged_kv_indptr.copy(), engine.now[1]))
    torch.cuda.synchronize()
    for found, (host, indptr, table) in zip(seen, known, strict=True):
        for name, left, right in zip(READ, found, host, strict=False):
            assert left.tolist() == right.tolist(), name
        pages = found[-1].cpu()
        for row, (start, stop) in enumerate(pairwise(indptr)):
            assert pages[start:stop].tolist() == table[row, : stop - start].tolist()


def attended(query, cache, table, lengths, scale):
    """Decodes in float32: query (n, heads, size), cache a pair of (blocks, block, kv heads, size)."""
    slots = torch.arange(int(lengths.max()), device="cuda")
    size = cache[0].shape[1]
    blocks = table[:, slots // size].long()
    keys, values = (
        part[blocks, slots % size].float().repeat_interleave(query.shape[1] // part.shape[2], dim=2) for part in cache
    )
    scores = torch.einsum("nhd,nkhd->nhk", query.float(), keys) * scale
    scores = scores.masked_fill(slots >= lengths[:, None, None], -torch.inf)
    return torch.einsum("nhk,nkhd->nhd", scores.softmax(-1), values)


@pytest.mark.parametrize("name", ["flashinfer", "flash"])
@pytest.mark.parametrize("captured", [False, True])
def test_outputs_of_a_thousand_racing_steps(name, captured):
    """Plans, page lists and graphs of one step stay apart from those of the next, however far the host is ahead."""
    backend = of_library(name, block_size=16) if name == "flashinfer" else of_library(name)
    engine, impl = Racing(backend), backend.impl("layers.0", scale=0.125)
    # Every slot is -1, which writes nothing: the cache stays what it is.
    cache = tuple(torch.randn(engine.blocks, engine.size, 2, 64, device="cuda").bfloat16() for _ in range(2))
    query, key, value = (torch.randn(ROWS, heads, 64, device="cuda").bfloat16() for heads in (8, 2, 2))
    graphs, seen = {}, []

    def layer(size, metadata):
        return impl.forward(query[:size], key[:size], value[:size], cache, metadata)

    for size in SIZES if captured else (ROWS,):
        metadata = engine.steps.build(**engine.given(size, size), capturing=captured)
        layer(size, metadata)
        torch.cuda.synchronize()
        if captured:
            graph = new_graph("cuda")
            with capturing(graph):
                metadata.record()
                output = layer(size, metadata)
            graphs[size] = graph, output
    with no_synchronisation():
        for count in engine.counts():
            size = size_of(count, captured)
            metadata = engine.steps.build(**engine.given(count, size))
            if captured:
                graph, output = graphs[size]
                metadata.replay(graph)
            else:
                output = layer(size, metadata)
            seen.append((output[:count].clone(), engine.now, count))
    torch.cuda.synchronize()
    for found, (lengths, table), count in seen:
        wanted = attended(query[:count], cache, table[:count].cuda(), lengths[:count].cuda(), 0.125)
        torch.testing.assert_close(found.float(), wanted, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", ["flashinfer", "flash"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_random_batches_eager_and_captured(name, tokens):
    """Prompts, chunks, decodes and drafts against dense attention; every element of the cache is looked at."""
    engine = CapturedEngine(of_library(name, head_size=64), tokens, make_builder=AdoptingBuilder)
    for _ in range(200):
        engine.change()
        engine.replayed()


def test_upper_bounds_on_the_host():
    engine = Racing(least())
    given = engine.given(5, 5)
    given["host_seq_lens"] = given["host_seq_lens"].clone().add_(7).clamp_(max=MODEL_LEN)
    metadata = engine.steps.build(**given, bounded=True)
    lengths, table = engine.now
    pages = -(-lengths // 16)
    assert metadata.paged_kv_indptr.tolist() == [0, *pages.cumsum(0).tolist()]
    wanted = torch.cat([table[row, :count] for row, count in enumerate(pages.tolist())])
    assert metadata.page_buffer[: int(pages.sum())].tolist() == wanted.tolist()
    assert metadata.host.seq_lens.tolist() == given["host_seq_lens"].tolist()
    assert engine.steps.host_lengths(metadata) == "bounded"


def test_a_step_is_refused_inside_a_capture_and_for_another_device():
    engine = Racing(least())
    given = engine.given(2, 2)
    torch.cuda.synchronize()
    with capturing(new_graph("cuda")):
        given["seq_lens"].clone()  # torch warns of an empty graph
        with pytest.raises(attncore.CaptureError, match="build: a stream is capturing"):
            engine.steps.build(**given)
    with pytest.raises(ValueError, match=r"seq_lens: int32\[2\] on cpu found; give int32\[n\] on cuda:0"):
        engine.steps.build(**(given | {"seq_lens": given["seq_lens"].cpu()}))
    with pytest.raises(ValueError, match="host_query_start_loc: not given; the device's is not read"):
        engine.steps.build(**(given | {"host_query_start_loc": None}))
