"""Compares the output, log-sum-exp and cache of a step with what is expected; errors name request, token and head."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from attncore.show import counted
from attncore.testing.engines.random_tensors import scale_of
from attncore.testing.engines.tolerances import allowed_of_lse
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    import numpy.typing as npt

    from attncore.abstract import BackendConfig
    from attncore.testing.engines.cache_view import CacheView

MOST_NAMED = 64  # requests of a step


class Compared(Protocol):
    """What the comparison reads of an engine: its backend's configuration, the layer's features, how far an output may
    be off, what stands in the slots that no request owns, and whether tensors of the step had rows of padding.
    """

    config: BackendConfig
    features: dict[str, Any]
    tolerance: float
    junk: float
    has_padding: bool


class StepRequest(NamedTuple):
    """One request of a step: its name, its tokens of the step, its tokens before the step."""

    name: Hashable
    tokens: int
    context: int

    def __str__(self) -> str:
        phase = "decode" if self.tokens == 1 and self.context else "prefill"
        return f"{phase} of {self.tokens} after {self.context}"


class EncoderStepRequest(StepRequest):
    """One request of a step that is not causal: its tokens, and as context the encoder tokens that they see."""

    def __str__(self) -> str:
        return f"{counted(self.tokens, 'query', 'queries')} over {counted(self.context, 'encoder token')}"


def compare(answer: Tensor, expected: list[Tensor], requests: list[StepRequest], engine: Compared) -> float:
    """The largest error of all requests; ConformanceError naming the first request, token and head beyond tolerance."""
    worst, start = 0.0, 0
    # A kernel rounds what it weighs before it multiplies by v_scale: errors are of the scale's size, as values are.
    scales = scale_of(engine.features, "k_scale" if engine.config.use_mla else "v_scale").clamp(min=1.0)
    unit = scales.repeat_interleave(engine.config.num_heads // len(scales), dim=0)  # of each query head
    for request, wanted in zip(requests, expected, strict=True):
        found = answer[start : start + request.tokens].float()
        start += request.tokens
        error = (found - wanted).abs()
        if not close(found / unit, wanted / unit, engine.tolerance):
            raise ConformanceError(_sentence(found, wanted, request, requests, engine), _largest(error))
        worst = max(worst, float(error.max())) if error.numel() else worst
    return worst


def _largest(error: Tensor) -> float:
    """The largest error; infinite where one is no number."""
    return float(error.nan_to_num(nan=float("inf")).max())


def compare_lse(found: Tensor, expected: list[Tensor], requests: list[StepRequest], engine: Compared) -> None:
    """ConformanceError unless ``found`` is float32 (tokens, heads), the natural logarithms that were expected, or
    infinite of either sign where a token sees no key."""
    tokens = sum(request.tokens for request in requests)
    if (
        found.dtype != torch.float32
        or found.dim() != 2
        or len(found) < tokens
        or found.shape[1] != engine.config.num_heads
    ):
        raise ConformanceError(
            f"forward_with_lse gave a log-sum-exp {found.dtype} {tuple(found.shape)}, not float32 (tokens, num_heads)"
        )
    wanted = torch.cat(expected) if expected else torch.empty(0, engine.config.num_heads)
    there = found[:tokens].cpu()
    wrong = ~lse_is(there, wanted, engine)
    if wrong.any():
        token, head = (int(i) for i in wrong.nonzero()[0])
        kind = "natural, a sink included" if engine.features.get("sinks") is not None else "natural"
        raise ConformanceError(
            f"forward_with_lse gave a log-sum-exp of {there[token, head]:.6g}, not {wanted[token, head]:.6g} ({kind}), "
            f"for token {token} of the step, head {head} [{_batch(requests)}]"
        )


def lse_is(found: Tensor, wanted: Tensor, engine: Compared) -> Tensor:
    """Where log-sum-exps are those wanted: within what is allowed, or infinite of either sign."""
    allowed = allowed_of_lse(wanted, engine.config.dtype, engine.config.kv_cache_dtype)
    return torch.where(wanted.isinf(), found.isinf(), (found - wanted).abs() <= allowed)


def close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Whether every number of ``found`` is one, and within ``tolerance * (1 + abs(wanted))`` of that."""
    return bool(((found.float() - wanted.float()).abs() <= tolerance * (1 + wanted.float().abs())).all())


def _sentence(
    found: Tensor, wanted: Tensor, request: StepRequest, requests: list[StepRequest], engine: Compared
) -> str:
    config = engine.config
    what = ", ".join(f"{name} {value}" for name, value in engine.features.items() if name != "scale")
    setting = (
        f"{counted(config.num_heads, 'head')} over {config.num_kv_heads}, head size {config.head_size}, block size "
        f"{config.block_size}, {config.dtype}, cache {config.kv_cache_dtype}" + (f", {what}" if what else "")
    )
    if found.isnan().any():
        token, head = (int(i) for i in found.isnan().any(dim=2).nonzero()[0])
        why = "the output holds NaN"
        if np.isnan(engine.junk):
            why += (
                ": it read a slot that holds no token of the request: a block without an owner, an unused row of a "
                "last page (a kernel that multiplies it by 0 declares finite_tail), or a block that a window has "
                "passed (finite_passed_blocks)"
            )
        elif engine.has_padding:
            why += ", as rows of padding do in query, key and value: they must not reach a request's"
    else:
        excess = (found - wanted).abs().amax(dim=2)
        token, head = (int(i) for i in (excess == excess.max()).nonzero()[0])
        why = f"the output differs from dense float32 attention by {excess.max():.3g} ({engine.tolerance:g} allowed)"
    where = f"in the {request} (request {request.name}), token {request.context + token}, head {head}"
    return f"{why} {where} [{setting}] [{_batch(requests)}]"


def _batch(requests: list[StepRequest]) -> str:
    """The requests of a step; of many the first, so that what is said after them is not cut off."""
    said = [str(one) for one in requests[:MOST_NAMED]]
    return "; ".join(said + [f"and {len(requests) - MOST_NAMED} more"] * (len(requests) > MOST_NAMED))


def check_output(returned: Any, output: Tensor, method: str = "forward") -> None:
    """ConformanceError unless a layer returned the ``output``, NaN before, that it was given, and filled it."""
    if not isinstance(returned, Tensor) or (returned.data_ptr(), returned.stride()) != (
        output.data_ptr(),
        output.stride(),
    ):
        raise ConformanceError(
            f"{method} was given an output and returned another tensor: it ignores its argument output, which is to be "
            "filled where it lies, and returned"
        )
    if output.numel() and bool(output.isnan().all()):
        raise ConformanceError(f"{method} returned the output that it was given, and wrote nothing to it")


def compare_cache(view: CacheView, before: list[Tensor], slots: npt.NDArray[np.int64], *, masked: bool = False) -> None:
    """ConformanceError unless the step changed the tokens of ``slots`` (none is -1) and no other. ``masked``: it has
    tokens of padding, or slots of -1."""
    changed, stray = view.changed(before)
    allowed = np.zeros_like(changed)
    allowed[slots // view.block_size, slots % view.block_size] = True
    missed = np.argwhere(allowed & ~changed)
    if len(missed):
        block, offset = (int(i) for i in missed[0])
        raise ConformanceError(
            f"forward wrote nothing to slot {block * view.block_size + offset} (block {block}, offset {offset}), "
            "which slot_mapping names"
        )
    wrong = np.argwhere(changed & ~allowed)
    if len(wrong):
        block, offset = (int(i) for i in wrong[0])
        why = ": a slot of -1, or a token of padding, writes nothing" if masked else ""
        raise ConformanceError(
            f"forward changed block {block}, offset {offset} (slot {block * view.block_size + offset}), which is not "
            f"in slot_mapping{why}"
        )
    if stray:
        raise ConformanceError("forward changed elements of the cache that belong to no slot")


def differs(first: Tensor, second: Tensor) -> float:
    """The largest difference of two outputs; infinite where only one is a number."""
    if not torch.equal(first.isnan(), second.isnan()):
        return float("inf")
    return float((first.float() - second.float()).nan_to_num().abs().max()) if first.numel() else 0.0
