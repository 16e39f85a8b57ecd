"""What a call of the backend leaves as it was: torch's settings, and results of earlier calls; and what it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncore.array_arguments import why_not_plain
from attncore.quoted import type_name
from attncore.registry.plugins.torch_settings import TorchSettings
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.builder import CommonAttentionMetadata
    from attncore.testing.engines.engine import Engine


@contextlib.contextmanager
def same_torch_settings(who: str) -> Iterator[None]:
    """ConformanceError where ``who`` leaves a setting of torch changed, which is then set back."""
    settings = TorchSettings(who)
    yield
    if changed := settings.changed():
        settings.restore()
        said = "; ".join(f"{setting.name}: {now} found, {was} before" for setting, was, now in changed)
        raise ConformanceError(f"{who} left settings of torch changed, which are the engine's: {said}; put them back")


def check_plain(found: Any, method: str, what: str) -> None:
    """ConformanceError unless a result is a plain strided tensor."""
    if not isinstance(found, Tensor):
        raise ConformanceError(f"{method} gave {what} of type {type_name(found)}; the contract says a tensor")
    if (why := why_not_plain(found)) is not None:
        raise ConformanceError(
            f"{method} gave {what} {why}; the contract says a plain strided tensor, in which any operator of torch "
            "finds the numbers"
        )


def keep_results(engine: Engine) -> None:
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
