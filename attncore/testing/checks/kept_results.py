"""What a layer returns is the caller's: no later call writes to it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from attncore.builder import CommonAttentionMetadata
from attncore.testing.engines.cross_engine import CrossEngine
from attncore.testing.engines.encoder_engine import EncoderEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.reading_engine import ReadingEngine
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import ConformanceError, UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = ["test_results_stay_as_they_were_returned"]
KINDS = ("forward", "forward_with_lse", "write=False", "latent cache", "encoder", "encoder_decoder")


@covers("output")
@pytest.mark.parametrize("kind", KINDS)
def test_results_stay_as_they_were_returned(attncore_subject: Subject, kind: str) -> None:
    """Where ``output`` is None, outputs and log-sum-exps of steps of one shape lie apart, and later calls change none:
    an engine merges parts, or keeps what a layer gave."""
    subject = attncore_subject
    if kind == "latent cache":
        subject = subject.latent
        if subject is attncore_subject:
            raise UnsupportedError("its other rows run with latent caches")
    elif kind in ("encoder", "encoder_decoder"):
        subject.require(kind)
    elif kind == "forward_with_lse":
        subject.require("lse")
    with_lse = kind == "forward_with_lse" or (kind not in ("forward", "write=False") and "lse" in subject.form.features)
    backend = subject.backend(use_mla=True) if kind == "latent cache" else subject.backend()
    if kind == "encoder":
        encoder = EncoderEngine(backend, "encoder_only", with_lse=with_lse)
        _keep_results(encoder)
        for _ in range(3):
            encoder.encode([3, 5])
        return
    if kind == "encoder_decoder":
        subject.require_phase("prefill", "decode")
        cross = CrossEngine(backend, with_lse=with_lse)
        _keep_results(cross)
        cross.add("a", 5)
        cross.add("b", cross.block_size + 1)
        for tokens in (3, 3, 1, 1, 1):
            cross.cross_step({"a": tokens, "b": 1})
        return
    if kind == "write=False":
        engine: Engine = ReadingEngine(backend, written_by="another layer")
    else:
        engine = Engine(backend, with_lse=with_lse)
    _keep_results(engine)
    _steps(engine)
    if engine.with_lse:  # forward alone may keep its log-sum-exp where forward_with_lse does
        engine.with_lse, engine.lse = False, None
        engine.step({"a": 1, "b": 1} if "decode" in engine.phases else {"a": 2, "b": 2})


def _steps(engine: Engine) -> None:
    """Prompts, chunks, decodes and mixed steps, of each some of one shape."""
    for name in ("a", "b"):
        engine.add(name, 20)
    if "prefill" in engine.phases:
        for step in ({"a": 3}, {"b": 3}, *[{"a": 2, "b": 2}] * 2):
            engine.step(step)
    else:
        engine.fill({"a": 2, "b": 2})
    if "decode" in engine.phases:
        for _ in range(3):
            engine.step({"a": 1, "b": 1})
    if {"prefill", "decode"} <= {*engine.phases}:
        for _ in range(2):
            engine.step({"a": 1, "b": 3})


def _keep_results(engine: Engine) -> None:
    """From now on each call of the engine's layer raises ConformanceError where it writes to what an earlier one
    returned, or returns memory of it: an engine may keep both.
    """
    forward = engine.forward
    kept: list[tuple[str, Tensor, Tensor]] = []

    def keeping(tensors: Iterable[Tensor], metadata: CommonAttentionMetadata) -> Tensor:
        output = forward(tensors, metadata)
        new = {"output": output} | ({} if engine.lse is None else {"log-sum-exp": engine.lse})
        for name, earlier, before in kept:
            again = [other for other, result in new.items() if _ends_meet(earlier, result)]
            if again or not torch.equal(_as_bytes(earlier), before):
                raise ConformanceError(
                    f"a call wrote to the {name} that an earlier call had returned"
                    + (f", and returned its memory as its {again[0]}" if again else "")
                    + ": it is the caller's, who may keep it; where output is None, give each call memory of its own"
                )
        kept.extend((name, result, _as_bytes(result)) for name, result in new.items())
        return output

    engine.forward = keeping  # type: ignore[method-assign]


def _as_bytes(tensor: Tensor) -> Tensor:
    """A copy whose NaN equals itself."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _ends_meet(one: Tensor, other: Tensor) -> bool:
    """Whether the memory of a tensor begins before that of another ends, and the other way round."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    spans = []
    for tensor in (one, other):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize))
    return max(spans)[0] < min(spans)[1]
