"""What the decode and prefill wrappers of the stand-in share: plans recorded, attention computed in torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attncore.dense import dense_attention

INT_WORKSPACE = 1 << 16
"""What the stand-in's plans ask for beside the workspace."""


class Recorder:
    """Calls of plans, in order, as (name, arguments); and what a plan asks of the workspace."""

    def __init__(self, version: str = "") -> None:
        self.version = version
        """Of FlashInfer; empty: one whose plans the device does not make."""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.asks = 0
        self.asks_of = ""
        """Which plans ask; empty: all."""

    def of(self, name: str) -> list[dict[str, Any]]:
        return [arguments for called, arguments in self.calls if called == name]


class Wrapper:
    recorder: Recorder

    def _made(self, workspace: Tensor, layout: str) -> None:
        self._workspace, self._layout = workspace, layout
        self._int_workspace = torch.empty(0, dtype=torch.uint8)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._workspace, self._int_workspace = float_workspace_buffer, int_workspace_buffer

    def _record(self, name: str, arguments: dict[str, Any]) -> None:
        self.recorder.calls.append((name, {key: one for key, one in arguments.items() if key != "self"}))
        if self._workspace.numel() < self.recorder.asks and self.recorder.asks_of in ("", name):
            raise RuntimeError("Buffer overflow when allocating memory. Increase the workspace buffer size.")

    def _attend(
        self, q: Tensor, caches: Any, rows: list[tuple[int, int, int]], out: Tensor, lse: Tensor, *,
        causal: bool, indices: Tensor, k_scale: float, v_scale: float, masks: list[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """``rows`` are (tokens, first page, keys): the tokens' queries, and where their keys are. ``masks``: bool
        (tokens, keys) of each row, in place of ``causal``."""
        if isinstance(k_scale, Tensor) or isinstance(v_scale, Tensor):
            raise TypeError("scales: of fa2 they are arguments of the kernel, numbers")
        keys, values = caches if isinstance(caches, tuple) else caches.unbind(1)
        if self._layout == "HND":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        size, token = keys.shape[1], 0
        cap = self.keywords["logits_soft_cap"] or None
        window = self.keywords["window_left"]
        for number, (tokens, first, length) in enumerate(rows):
            part = slice(token, token + tokens)
            token += tokens
            if not tokens:
                continue
            if not length:
                out[part], lse[part] = 0, -math.inf
                continue
            chosen = indices[first : first - (-length // size)].long()
            read = [half.float()[chosen].flatten(0, 1)[:length] for half in (keys, values)]
            if masks is None:
                found, found_lse = dense_attention(
                    q[part].float(), read[0] * k_scale, read[1] * v_scale, scale=self.keywords["sm_scale"],
                    causal=causal, sliding_window=None if window < 0 else window + 1, logits_soft_cap=cap,
                    return_lse=True,
                )  # fmt: skip
            else:
                found, found_lse = masked_attention(
                    q[part].float(), read[0] * k_scale, read[1] * v_scale, masks[number], window,
                    self.keywords["sm_scale"], cap,
                )  # fmt: skip
            out[part], lse[part] = found.to(out.dtype), found_lse / math.log(2)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, window: int, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """What kernels do under a custom mask, bool (queries, keys). A window goes by index, and is all that keeps keys
    from being read: what a mask hides is multiplied by 0."""
    count, length = mask.shape
    place = torch.arange(length) - (length - count)
    before = torch.arange(count)[:, None] - place  # by index
    if window >= 0:
        mask = mask & (before <= window)
        first = max(0, length - count - window)
        key, value, mask = key[first:], value[first:], mask[:, first:]
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->qhk", query, key.repeat_interleave(group, 1)) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = torch.where(mask[:, None], scores, -math.inf)
    return (
        torch.einsum("qhk,khd->qhd", torch.softmax(scores, -1), value.repeat_interleave(group, 1)),
        torch.logsumexp(scores, -1),
    )


def row_lengths(counts: list[int], indptr: Tensor, last: Tensor, page_size: int) -> list[tuple[int, int, int]]:
    rows = []
    for count, begin, end, rest in zip(counts, indptr.tolist()[:-1], indptr.tolist()[1:], last.tolist(), strict=True):
        rows.append((count, begin, (end - begin - 1) * page_size + rest if end > begin else 0))
    return rows
