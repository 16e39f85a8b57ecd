"""The likely cause of a wrong output or log-sum-exp: the mistake with which dense attention gives what was given."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from attncore.dense import dense_attention
from attncore.testing.engines.compare import Compared, StepRequest, close, lse_is
from attncore.testing.engines.random_tensors import scale_of
from attncore.testing.engines.requests import History


class Layer(Compared, Protocol):
    """What is read of an engine beside what a comparison reads."""

    history: dict[Hashable, History]
    causal: bool
    cache_dtype: torch.dtype
    siblings: list[tuple[str, Mapping[str, Any]]]
    """Other layers of the same steps: their names and features."""
    earlier_scales: Mapping[str, Any]
    """Scales of the layer before `set_scales`, where that was called."""
    suspects: list[tuple[str, Mapping[Hashable, History]]]
    """Keys that requests may have read in place of their own: what it would be as if, and the keys of each."""


NOT_OF_DENSE = ("k_scale", "v_scale", "attn_type")
"""Features of a layer that dense attention does not take."""
OPTIONAL = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")

Answers = tuple[Tensor, Tensor]
"""The output and the log-sum-exp of a request."""
Mistake = tuple[str, Answers]


def likely_cause(
    engine: Layer,
    query: Tensor,
    answer: Tensor,
    lse: Tensor | None,
    expected: list[Answers],
    requests: list[StepRequest],
) -> str:
    """What the first wrong request looks like, as the end of a sentence; empty where no known mistake gives that.

    Outputs are looked at first, then ``lse`` where there is one.
    """
    for part, given in enumerate((answer,) if lse is None else (answer, lse)):
        start = 0
        for index, one in enumerate(requests):
            tokens = slice(start, start + one.tokens)
            start += one.tokens
            found, wanted = given[tokens].float(), expected[index][part]
            fits = _lse_fits if part else _fits
            if fits(found, wanted, engine):
                continue
            if part and (words := _of_a_logarithm(found, wanted, engine)):
                return words
            for words, mistaken in _mistakes(engine, query[tokens], index, expected, requests):
                if fits(found, mistaken[part], engine):
                    return f"; it is as if {words}"
            return ""
    return ""


def _fits(found: Tensor, wanted: Tensor, engine: Layer) -> bool:
    """Whether numbers are those wanted; an infinite one of either sign."""
    if found.shape != wanted.shape or not bool((found.isinf() == wanted.isinf()).all()):
        return False
    finite = ~wanted.isinf()
    return close(found[finite], wanted[finite], engine.tolerance)


def _lse_fits(found: Tensor, wanted: Tensor, engine: Layer) -> bool:
    return found.shape == wanted.shape and bool(lse_is(found, wanted, engine).all())


def _of_a_logarithm(found: Tensor, wanted: Tensor, engine: Layer) -> str:
    """What is wrong with a log-sum-exp alone, whatever the layer."""
    for base in (2, 10):
        if _lse_fits(found, wanted / math.log(base), engine):
            return f"; it is as if the logarithm were to base {base}, not natural"
    for dtype in (torch.bfloat16, torch.float16):
        if _lse_fits(found, wanted.to(dtype).float(), engine) and torch.equal(found, found.to(dtype).float()):
            return f"; it is as if it were rounded to {dtype}: it is made and kept in float32"
    nothing = wanted.isinf() & ~found.isinf()
    if nothing.any():
        return f"; it is {found[nothing][0]:g} where a token sees no key: infinite there, the part has no weight"
    return ""


def _mistakes(
    engine: Layer, query: Tensor, index: int, expected: list[Answers], requests: list[StepRequest]
) -> Iterator[Mistake]:
    keys, values = engine.history[requests[index].name]

    def dense(key: Tensor = keys, value: Tensor = values, **changes: Any) -> Answers:
        given = {name: it for name, it in (engine.features | changes).items() if name not in NOT_OF_DENSE}
        answers: Answers = dense_attention(query, key, value, causal=engine.causal, return_lse=True, **given)
        return answers

    name = requests[index].name
    for words, histories in engine.suspects:
        if name in histories:
            yield words, dense(*histories[name])
    for words, features in engine.siblings:
        theirs: dict[str, Any] = dict.fromkeys(OPTIONAL) | dict(features)
        if theirs["scale"] != engine.features["scale"]:
            yield f"the scale were that of {words}, {theirs['scale']:g}", dense(scale=theirs["scale"])
        yield f"its features were those of {words}", dense(**theirs)
    for words, scales in _other_scales(engine):
        yield from _scales(engine, scales, words, len(query), keys, values, dense)
    yield from _features(engine, dense)
    yield from _heads(query.shape[1], keys, values, dense)
    if keys.shape == values.shape:
        yield "keys and values were exchanged", dense(values, keys)
    if len(query) == 1 and len(keys) > 1:
        yield "the request's newest key were not seen", dense(keys[:-1], values[:-1])
        yield "the request's first key were not seen", dense(keys[1:], values[1:])
    for other, answers in zip(requests, expected, strict=True):
        if other.name != name:
            yield f"it were the output of request {other.name}: rows or tokens exchanged", answers
            history = engine.history[other.name]
            if len(history.keys) >= len(query):
                yield f"request {name} read the keys of request {other.name}", dense(*history)


def _features(engine: Layer, dense: Any) -> Iterator[Mistake]:
    features = engine.features
    window, scale = features.get("sliding_window"), features["scale"]
    if window is not None:
        yield f"the window were W + 1, {window + 1}", dense(sliding_window=window + 1)
        if window > 1:
            yield f"the window were W - 1, {window - 1}", dense(sliding_window=window - 1)
    usual = engine.config.head_size**-0.5
    for other, words in (
        (usual, "1 / sqrt(head_size)"),
        (1.0, "1"),
        (scale * usual, "multiplied by 1 / sqrt(head_size)"),
    ):
        if other != scale:
            yield f"the scale were {words}, not the layer's own, {scale:g}", dense(scale=other)
    for name in OPTIONAL:
        if features.get(name) is not None:
            yield f"the layer had no {name}", dense(**{name: None})


def _other_scales(engine: Layer) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Scales of the cache that a layer with scales may have taken for its own."""
    if engine.earlier_scales:
        yield "those before set_scales", engine.earlier_scales
    own = {name: torch.as_tensor(engine.features.get(name, 1.0)) for name in ("k_scale", "v_scale")}
    if all(bool((scale == 1).all()) for scale in own.values()):
        return
    yield "1", {}
    yield "exchanged", {"k_scale": own["v_scale"], "v_scale": own["k_scale"]}
    if any(scale.numel() > 1 for scale in own.values()):
        yield "those of head 0", {name: scale.flatten()[:1] for name, scale in own.items()}


def _scales(
    engine: Layer, scales: Mapping[str, Any], which: str, fresh: int, keys: Tensor, values: Tensor, dense: Any
) -> Iterator[Mistake]:
    """What reads a cache, what writes it, or both, with other ``scales``. The ``fresh`` last keys, of the step, may be
    read where they are given."""
    largest = torch.finfo(engine.cache_dtype).max
    read_old, write_old, all_old = [], [], []
    for name, numbers in (("k_scale", keys), ("v_scale", values)):
        new, old = (scale_of(given, name) for given in (engine.features, scales))
        read_old.append(numbers / new * old)
        all_old.append((numbers / old).clamp(-largest, largest) * old)
        write_old.append((numbers / old).clamp(-largest, largest) * new)
    for words, (k, v) in (("read", read_old), ("written", write_old), ("kept", all_old)):
        for of_keys, of_values in ((k, v), (k, values), (keys, v)):
            mixed = [torch.cat((old[:-fresh], new[-fresh:])) for old, new in ((of_keys, keys), (of_values, values))]
            for changed in ((of_keys, of_values), mixed):
                yield f"the scales were {which}, by which the cache is {words}", dense(*changed)


def _heads(heads: int, keys: Tensor, values: Tensor, dense: Any) -> Iterator[Mistake]:
    """Query heads that read another key/value head than ``h // (num_heads // num_kv_heads)``."""
    kv_heads = keys.shape[1]
    if kv_heads == 1:
        return
    right = [head // (heads // kv_heads) for head in range(heads)]
    for words, read in (
        ("h % num_kv_heads", [head % kv_heads for head in range(heads)]),
        ("0", [0] * heads),
        ("h // num_kv_heads", [min(head // kv_heads, kv_heads - 1) for head in range(heads)]),
        ("num_kv_heads - 1 - h // (num_heads // num_kv_heads)", [kv_heads - 1 - one for one in right]),
    ):
        if read != right:
            yield (
                f"query head h read key/value head {words}, not h // (num_heads // num_kv_heads)",
                dense(keys[:, read], values[:, read]),
            )
