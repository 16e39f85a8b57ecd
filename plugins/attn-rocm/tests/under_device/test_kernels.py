"""The kernels against dense float32 attention: tiles smaller than sequences, split keys, raw keys, padding."""

import dataclasses
import math
import os
import sys

import pytest
import torch
from attn_rocm import base, launch, tiles

from attncore.dense import dense_attention

ON_GPU = os.environ["ATTNCORE_ROCM_DEV_DEVICE"] == "cuda"
DEVICE = "cuda" if ON_GPU else "cpu"
ARCH, _ = base.architecture(DEVICE)
PAGE, KV_HEADS = 4, 2
SMALL = tiles.Tile(16, 16, 4, 1)


class Case:
    """Sequences of (keys, queries) in a shuffled cache whose unused slots are NaN."""

    def __init__(
        self, rows, *, group=2, size=16, dtype=torch.float32, cache_dtype=None, seed=0, page=PAGE, extra=0, trees=None,
        spans=None,
    ):  # fmt: skip
        random = torch.Generator().manual_seed(seed)
        self.rows, self.group, self.size, self.dtype = rows, group, size, dtype
        tokens = sum(queries for _, queries in rows)
        heads = group * KV_HEADS
        self.query = torch.randn(tokens + extra, heads, size, generator=random).to(dtype)
        self.keys = [torch.randn(2, keys, KV_HEADS, size, generator=random).to(dtype) for keys, _ in rows]
        pages = [-(-keys // page) for keys, _ in rows]
        ids = torch.randperm(sum(pages) + 2, generator=random)
        self.table = torch.zeros(len(rows), max(pages) + 3, dtype=torch.int32)
        shape = (2, sum(pages) + 2, page, KV_HEADS, size)
        cache = torch.full(shape, math.nan).to(cache_dtype or dtype)
        taken = 0
        for row, (count, (keys, _)) in enumerate(zip(pages, rows, strict=True)):
            mine = ids[taken : taken + count]
            taken += count
            self.table[row, :count] = mine
            if cache_dtype is not None:
                self.keys[row] = self.keys[row].to(cache_dtype).to(dtype)
            for token in range(keys):
                block, slot = mine[token // page], token % page
                cache.view(torch.uint8)[:, block, slot] = (
                    self.keys[row][:, token].to(cache.dtype).contiguous().view(torch.uint8)
                )
        self.cache = cache
        starts = [0]
        for _, queries in rows:
            starts.append(starts[-1] + queries)
        self.starts = torch.tensor(starts, dtype=torch.int32)
        self.lengths = torch.tensor([keys for keys, _ in rows], dtype=torch.int32)
        self.paths = {row: paths(parents) for row, parents in (trees or {}).items()}
        masks = torch.zeros(tokens + extra, dtype=torch.int64)
        for row, of_tokens in self.paths.items():
            for token, path in enumerate(of_tokens):
                bits = sum(1 << one for one in path)
                masks[starts[row] + token] = bits - (1 << 64) * (bits >> 63)
        self.tree_mask = None if trees is None else masks
        self.spans = spans or {}  # of a row: pairs of positions among its keys, of this step's tokens
        ends = torch.zeros(tokens + extra, dtype=torch.int32)
        for row, (keys, queries) in enumerate(rows):
            for first, stop in self.spans.get(row, []):
                ends[starts[row] + first - keys + queries : starts[row] + stop - keys + queries] = stop
        self.span_ends = None if spans is None else ends

    def place(self, cache):
        """A cache (blocks, page, heads, size) on the device."""
        return cache.to(DEVICE)

    def run(self, scoring, *, tile=SMALL, splits=None, raw_rows=0, decode=False, cache=True, monkeypatch=None):
        """Output and log-sum-exp on the host, from outputs that were poisoned."""
        launcher = launch.Launcher(self.group * KV_HEADS, KV_HEADS, self.size, ARCH)
        launcher._tile = lambda *_: tile
        if splits is not None:
            monkeypatch.setattr(tiles, "num_splits", lambda *_: splits)
        output = torch.full(self.query.shape, math.nan, dtype=self.dtype, device=DEVICE)
        lse = torch.full(self.query.shape[:2], math.nan, dtype=torch.float32, device=DEVICE)
        on = {name: getattr(self, name).to(DEVICE) for name in ("query", "table", "starts", "lengths")}
        on["cache"] = [self.place(part) for part in self.cache]
        fresh = [
            torch.cat([part[side, -n:] for part, (_, n) in zip(self.keys, self.rows, strict=True)]) for side in (0, 1)
        ]
        keys = launch.Keys(on["lengths"], max(keys for keys, _ in self.rows))
        if cache:
            keys = dataclasses.replace(keys, key_cache=on["cache"][0], value_cache=on["cache"][1], table=on["table"])
        if self.tree_mask is not None:
            keys = dataclasses.replace(keys, tree_mask=self.tree_mask.to(DEVICE))
        if self.span_ends is not None:
            keys = dataclasses.replace(keys, span_ends=self.span_ends.to(DEVICE))
        if raw_rows:
            for part in fresh:  # of the other rows they must not be read
                part[int(self.starts[raw_rows]) :] = math.nan
            raw = [part.to(DEVICE) for part in fresh]
            keys = dataclasses.replace(keys, key=raw[0], value=raw[1], raw_starts=on["starts"], raw_rows=raw_rows)
        most = max(queries for _, queries in self.rows)
        launcher(
            on["query"], output, lse, on["starts"], keys, scoring, most_queries=most, one_token_each=decode
        )  # fmt: skip
        return output.cpu(), lse.cpu()

    def expected(self, scoring):
        """What dense attention gives, token by token of all rows."""
        outputs, lses, start = [], [], 0
        for row, ((keys, queries), said) in enumerate(zip(self.rows, self.keys, strict=True)):
            tokens = self.query[start : start + queries].float()
            start += queries
            if not keys:
                sinks = -math.inf if scoring.sinks is None else scoring.sinks.cpu()
                outputs.append(torch.zeros_like(tokens))
                lses.append(torch.zeros(tokens.shape[:2]) + sinks)
                continue
            features = {
                "scale": scoring.scale, "causal": scoring.causal, "sliding_window": scoring.window,
                "logits_soft_cap": scoring.soft_cap,
                "alibi_slopes": None if scoring.slopes is None else scoring.slopes.cpu() / launch.LOG2E,
                "sinks": None if scoring.sinks is None else scoring.sinks.cpu(), "return_lse": True,
            }  # fmt: skip
            key, value = said[0].float() * scoring.k_scale, said[1].float() * scoring.v_scale
            if row in self.paths:  # each token over its path alone
                context = list(range(keys - queries))
                for token, path in enumerate(self.paths[row]):
                    seen = torch.tensor([*context, *(keys - queries + one for one in path)])
                    output, lse = dense_attention(tokens[token, None], key[seen], value[seen], **features)
                    outputs.append(output)
                    lses.append(lse)
                continue
            output, lse = dense_attention(tokens, key, value, spans=self.spans.get(row, ()), **features)
            outputs.append(output)
            lses.append(lse)
        return torch.cat(outputs), torch.cat(lses)

    def check(self, scoring, tolerance=2e-5, **how):
        output, lse = self.run(scoring, **how)
        wanted, wanted_lse = self.expected(scoring)
        torch.testing.assert_close(output[: len(wanted)].float(), wanted, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[: len(wanted)], wanted_lse, rtol=tolerance, atol=10 * tolerance)
        assert not output[len(wanted) :].any(), "padding gives zeros"
        assert (lse[len(wanted) :] == -math.inf).all() or scoring.sinks is not None


def paths(parents):
    """For each token of a draft tree, whose root is token 0, the tokens from the root to it."""
    found = [[0]]
    for draft, parent in enumerate(parents):
        found.append([*found[parent + 1], draft + 1])
    return found


def scoring(**given):
    heads = given.pop("heads", 2 * KV_HEADS)
    if given.pop("alibi", False):
        given["slopes"] = torch.tensor([0.5, 0.0625, 0.25, 0.125])[:heads].to(DEVICE) * launch.LOG2E
    if given.pop("sinks", False):
        given["sinks"] = torch.tensor([0.5, -1.0, 2.0, 0.0])[:heads].to(DEVICE)
    return launch.Scoring(**{"scale": 0.3, **given})


MIXED = [(37, 1), (21, 21), (34, 9), (1, 1), (16, 3)]
DECODES = [(37, 1), (1, 1), (16, 1)]
LAYERS = {
    "plain": {},
    "window": {"window": 18},
    "window of one": {"window": 1},
    "largest window": {"window": 2**31 - 1},
    "soft cap": {"soft_cap": 1.5},
    "soft cap far above the scores": {"soft_cap": 1e6},
    "largest soft cap of the cheap formula": {"soft_cap": launch.LARGE_CAP},
    "largest soft cap": {"soft_cap": 3.4e38},
    "slopes": {"alibi": True},
    "sinks": {"sinks": True},
    "all": {"window": 19, "soft_cap": 2.0, "alibi": True, "sinks": True},
}


@pytest.mark.parametrize("layer", LAYERS)
def test_several_tiles(layer):
    """Prompts, chunks and decodes in one launch, over more tiles than one; five tokens of padding behind them."""
    Case(MIXED, extra=5).check(scoring(**LAYERS[layer]))


TREES = {1: [-1, 0, -1, 1, 3, 2, 4, 6, 5, 7, 9, 8, 11, 10], 2: [-1] * 8, 4: [-1, -1], 5: [*range(-1, 60), 60, 60]}
"""By sequence: two branches that take turns, siblings, and 64 tokens of which the last two are siblings."""
TREE_ROWS = [(37, 1), (51, 15), (34, 9), (21, 21), (16, 3), (70, 64)]


@pytest.mark.parametrize("layer", LAYERS)
def test_draft_trees(layer):
    """Trees beside a decode and a prompt: tokens see their paths, and are as far apart as these are long."""
    Case(TREE_ROWS, trees=TREES, extra=3).check(scoring(**LAYERS[layer]))


@pytest.mark.parametrize("layer", ["plain", "all"])
def test_draft_trees_over_split_keys(layer, monkeypatch):
    rows, trees = [(37, 1), (90, 6), (64, 8)], {1: [-1, 0, -1, 1, 3], 2: [-1, -1, 0, 1, 2, 3, 4]}
    Case(rows, trees=trees).check(scoring(**LAYERS[layer]), splits=4, monkeypatch=monkeypatch)


SPAN_ROWS = [(37, 1), (60, 60), (70, 40), (9, 9), (50, 20), (33, 33)]
SPANS = {1: [(0, 20), (20, 21), (24, 57)], 2: [(31, 69)], 3: [(2, 9)], 4: [(30, 34), (35, 49)]}
"""Beside a decode and a prompt without: over several tiles, behind a context, at both ends."""


@pytest.mark.parametrize("layer", LAYERS)
def test_spans(layer):
    """Tokens of a span see each other, also behind a window of which its first ones have passed."""
    Case(SPAN_ROWS, spans=SPANS, extra=3).check(scoring(**LAYERS[layer]))


@pytest.mark.parametrize("layer", ["plain", "window", "all"])
def test_spans_of_step_keys_as_they_came(layer):
    Case([(60, 60), (33, 33)], spans={0: SPANS[1]}).check(scoring(**LAYERS[layer]), cache=False, raw_rows=2)


@pytest.mark.parametrize("layer", ["plain", "window", "all"])
def test_spans_over_split_keys(layer, monkeypatch):
    """In few queries of a sequence, whose keys several programs take."""
    rows, spans = [(37, 1), (90, 8), (64, 6)], {1: [(83, 90)], 2: [(58, 60), (60, 64)]}
    Case(rows, spans=spans).check(scoring(**LAYERS[layer]), splits=4, monkeypatch=monkeypatch)


def test_spans_beside_draft_trees():
    rows, trees = [(37, 1), (34, 9), (60, 60)], {1: [-1, -1, 0, 1, 1, 3, 0, 6]}
    for layer in ("plain", "all"):
        Case(rows, trees=trees, spans={2: SPANS[1]}).check(scoring(**LAYERS[layer]))


def test_a_step_without_spans_in_a_captured_size_for_them():
    Case(SPAN_ROWS, spans={}).check(scoring(window=18))


def test_roots_alone_are_decodes():
    Case(DECODES, trees={0: [], 2: []}).check(scoring(window=18), decode=True)


@pytest.mark.parametrize("layer", ["plain", "window", "largest window", "all"])
def test_not_causal(layer):
    """Every query sees every key, or those fewer than a window away on either side."""
    rows = [(21, 21), (5, 5)]
    Case(rows).check(scoring(causal=False, **LAYERS[layer]))
    Case(rows).check(scoring(causal=False, **LAYERS[layer]), cache=False, raw_rows=2)


@pytest.mark.parametrize(("layer", "splits"), [("plain", 2), ("plain", 8), ("window", 2), ("sinks", 4), ("all", 8)])
def test_split_keys(layer, splits, monkeypatch):
    """More parts than some sequences have tiles; a sequence without keys; padding."""
    Case([*DECODES, (0, 1), (70, 1)], extra=2).check(
        scoring(**LAYERS[layer]), splits=splits, decode=True, monkeypatch=monkeypatch
    )


def test_split_keys_of_drafts(monkeypatch):
    """Several queries a sequence, keys split."""
    Case([(60, 3), (5, 3), (33, 2)]).check(scoring(window=30), splits=4, monkeypatch=monkeypatch)


@pytest.mark.parametrize("layer", ["plain", "all"])
def test_own_keys_as_they_came(layer):
    """Of the first rows the last keys are this step's: their slots in the cache are made unreadable."""
    case = Case(MIXED)
    for row, (keys, queries) in enumerate(MIXED[:4]):
        for token in range(keys - queries, keys):
            case.cache[:, case.table[row, token // PAGE].long(), token % PAGE] = math.nan
    case.check(scoring(**LAYERS[layer]), raw_rows=4)


def test_without_a_cache():
    """A profiling run."""
    Case([(9, 9), (40, 40), (1, 1)]).check(scoring(), cache=False, raw_rows=3)


@pytest.mark.parametrize("group", [1, 3, 6, 21])
def test_groups(group):
    """Heads that share keys, in numbers that are no powers of two, and more than a tile's rows, in uneven parts."""
    Case([(37, 1), (21, 3), (5, 5)], group=group).check(scoring(heads=group * KV_HEADS))


def test_split_keys_of_a_large_group(monkeypatch):
    """Parts of the keys, and of the heads that share them."""
    Case(DECODES, group=19).check(scoring(), splits=2, decode=True, monkeypatch=monkeypatch)


def test_slices_of_a_head():
    """The product with keys in slices, as RDNA's tiles of wide heads have it."""
    sliced = SMALL._replace(slice=16)
    Case([(21, 9), (5, 1)], size=48).check(scoring(**LAYERS["all"]), tile=sliced)
    Case([(5, 1), (9, 9)], size=64, dtype=torch.float16).check(scoring(), tile=sliced, raw_rows=2, tolerance=4e-3)


@pytest.mark.parametrize("size", [8, 24, 80])
def test_head_sizes(size):
    """Sizes that are padded to a power of two."""
    Case([(37, 1), (21, 9)], size=size).check(scoring())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_cache(dtype):
    """Bytes of both formats, scales of keys and values, beside keys as they came."""
    given = scoring(k_scale=0.5, v_scale=2.0)
    Case(MIXED, cache_dtype=dtype).check(given)
    plain = scoring()
    Case(MIXED, cache_dtype=dtype).check(plain, raw_rows=3)


@pytest.mark.parametrize("raw_rows", [0, 3])
@pytest.mark.parametrize("heads", [1, 2])
def test_scales_on_the_device(heads, raw_rows):
    """One for all heads, or one for each, read by the kernel; keys as they came have none."""
    k_scale, v_scale = torch.tensor([0.5, 2.0])[:heads], torch.tensor([4.0, 0.25])[:heads]
    case = Case(MIXED, cache_dtype=torch.float8_e5m2)
    given = scoring(k_scale=k_scale.to(DEVICE), v_scale=v_scale.to(DEVICE), soft_cap=3.0)
    on_host = dataclasses.replace(given, k_scale=k_scale.view(-1, 1), v_scale=v_scale.view(-1, 1))
    output, _ = case.run(given)
    wanted, _ = case.expected(on_host)
    torch.testing.assert_close(output.float(), wanted, rtol=2e-5, atol=2e-5)
    if raw_rows:
        ones = dataclasses.replace(given, k_scale=torch.ones(2, device=DEVICE), v_scale=torch.ones(1, device=DEVICE))
        found, _ = case.run(ones, raw_rows=raw_rows)
        torch.testing.assert_close(found.float(), case.expected(scoring(soft_cap=3.0))[0], rtol=2e-5, atol=2e-5)


def test_every_byte_of_fp8():
    """All finite numbers of both formats, small ones too, are read as torch reads them."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        finite = numbers[numbers.isfinite()]
        case = Case([(1, 1)], size=256, cache_dtype=dtype)
        values = torch.zeros(256)
        values[: len(finite)] = finite
        block = case.table[0, 0].long()
        case.cache.view(torch.uint8)[:, block, 0] = values.to(dtype).view(torch.uint8)
        output, _ = case.run(scoring())
        assert torch.equal(output[0], values.expand_as(output[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves(dtype):
    """Model dtypes of two bytes."""
    Case(MIXED, dtype=dtype).check(scoring(), tolerance=3e-2 if dtype is torch.bfloat16 else 4e-3)


@pytest.mark.parametrize("far", ["tokens", "heads"])
def test_strides_whose_products_are_beyond_int32(far, monkeypatch):
    """Views of a pool in which a block's tokens, or its heads, are outermost. Little of its memory is touched."""
    monkeypatch.setattr(sys.modules[__name__], "KV_HEADS", 4)
    stride = -(-(2**31) // 48) * 16
    strides = {"tokens": (64, stride, 16, 1), "heads": (64, 16, stride, 1)}[far]

    def place(cache):
        reach = 1 + sum((count - 1) * step for count, step in zip(cache.shape, strides, strict=True))
        view = torch.empty(reach, dtype=cache.dtype, device=DEVICE).as_strided(cache.shape, strides)
        view.view(torch.uint8).copy_(cache.view(torch.uint8))
        return view

    case = Case(MIXED, cache_dtype=torch.float8_e5m2)
    monkeypatch.setattr(case, "place", place)
    case.check(scoring())
    case.check(scoring(), raw_rows=3)


def test_no_tokens():
    """An empty step launches nothing."""
    launcher = launch.Launcher(4, 2, 16, ARCH)
    nothing = torch.empty(0, 4, 16, device=DEVICE)
    starts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    launcher(nothing, nothing, None, starts, launch.Keys(starts, 0), scoring(), most_queries=0)


def test_padding_alone():
    """A step without a sequence, whose tensors are longer than it."""
    launcher = launch.Launcher(4, 2, 16, ARCH)
    query, starts = torch.randn(3, 4, 16, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    output, lse = torch.full_like(query, math.nan), torch.full((3, 4), math.nan, device=DEVICE)
    launcher(query, output, lse, starts, launch.Keys(starts[:0], 0), scoring(), most_queries=0)
    assert not output.any()
    assert (lse == -math.inf).all()
