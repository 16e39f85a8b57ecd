"""The likely cause of a wrong output: the mistake under which dense attention gives what the backend gave."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from attncore.dense import dense_attention
from attncore.testing.engines.compare import Compared, StepRequest, close
from attncore.testing.engines.requests import History


class Layer(Compared, Protocol):
    """What is read of an engine beside what a comparison reads."""

    history: dict[Hashable, History]
    causal: bool
    siblings: list[tuple[str, Mapping[str, Any]]]
    """Other layers of the same steps: their names and features."""


NOT_OF_DENSE = ("k_scale", "v_scale", "attn_type")
"""Features of a layer that dense attention does not take."""
OPTIONAL = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")

Mistake = tuple[str, Tensor]


def likely_cause(
    engine: Layer, query: Tensor, answer: Tensor, expected: list[tuple[Tensor, Tensor]], requests: list[StepRequest]
) -> str:
    """What the first wrong request looks like, as the end of a sentence; empty where no known mistake gives that."""
    start = 0
    for index, (one, (wanted, _)) in enumerate(zip(requests, expected, strict=True)):
        tokens = slice(start, start + one.tokens)
        start += one.tokens
        found = answer[tokens].float()
        if close(found, wanted, engine.tolerance):
            continue
        for words, output in _mistakes(engine, query[tokens], index, expected, requests):
            if output.shape == found.shape and close(found, output, engine.tolerance):
                return f"; it is as if {words}"
        return ""
    return ""


def _mistakes(
    engine: Layer, query: Tensor, index: int, expected: list[tuple[Tensor, Tensor]], requests: list[StepRequest]
) -> Iterator[Mistake]:
    keys, values = engine.history[requests[index].name]

    def dense(key: Tensor = keys, value: Tensor = values, **changes: Any) -> Tensor:
        given = {name: it for name, it in (engine.features | changes).items() if name not in NOT_OF_DENSE}
        output: Tensor = dense_attention(query, key, value, causal=engine.causal, **given)
        return output

    for words, features in engine.siblings:
        theirs: dict[str, Any] = dict.fromkeys(OPTIONAL) | dict(features)
        yield f"its features were those of {words}", dense(**theirs)
    yield from _features(engine, dense)
    heads, kv_heads = query.shape[1], keys.shape[1]
    if 1 < kv_heads < heads:
        modulo = [head % kv_heads for head in range(heads)]
        yield (
            "query head h read key/value head h % num_kv_heads, not h // (num_heads // num_kv_heads)",
            dense(keys[:, modulo], values[:, modulo]),
        )
    if keys.shape == values.shape:
        yield "keys and values were exchanged", dense(values, keys)
    if len(query) == 1 and len(keys) > 1:
        yield "the request's newest key were not seen", dense(keys[:-1], values[:-1])
        yield "the request's first key were not seen", dense(keys[1:], values[1:])
    name = requests[index].name
    for other, (output, _) in zip(requests, expected, strict=True):
        if other.name != name:
            yield f"it were the output of request {other.name}: rows or tokens exchanged", output
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
