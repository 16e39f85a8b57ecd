"""With which head sizes flash-attn-4 reads keys from pages rightly: bare calls, against float32. On a GPU.

    python head_sizes.py [SIZE ...] [--save FILE.json]

Decodes and prompts of five tokens; with a causal mask, a window of 41, and no mask; lengths around the tiles of its
kernels. Prints the largest difference relative to the largest expected number, or the error. An illegal memory access
ends a process's use of the device: run the sizes in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import warnings
from datetime import date
from pathlib import Path

import torch
from flash_attn.cute import flash_attn_varlen_func

HEADS, KV_HEADS, BLOCKS = 4, 2, 128
MASKS: dict[str, tuple[bool, int | None]] = {"causal": (True, None), "window": (True, 40), "no mask": (False, None)}
PAGES = {16: [17, 100, 112, 113, 130, 200], 64: [300, 200, 144, 145, 17], 128: [1000, 300, 17]}
"""Tokens of a page -> lengths of the requests."""


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: str) -> torch.Tensor:
    causal, left = MASKS[mask]
    key, value = (tensor.float().repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
    scores = torch.einsum("thd,khd->htk", query.float(), key) * query.shape[-1] ** -0.5
    last = torch.arange(len(query), device="cuda")[:, None] + len(key) - len(query)
    position = torch.arange(len(key), device="cuda")[None]
    hidden = (position > last) & causal
    if left is not None:
        hidden |= position < last - left
    return torch.einsum("htk,khd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


def difference(size: int, page: int, mask: str, tokens: int) -> float:
    """The largest of four runs, with keys of different magnitudes: what an earlier one left behind shows."""
    lengths = PAGES[page]
    causal, left = MASKS[mask]
    worst = 0.0
    for seed in range(4):
        torch.manual_seed(seed)
        shape = (BLOCKS, page, KV_HEADS, size)
        keys, values = (torch.randn(shape, device="cuda").mul(8 if seed % 2 else 1).bfloat16() for _ in range(2))
        width = -(-max(lengths) // page)
        table = torch.randperm(BLOCKS, device="cuda")[: width * len(lengths)].view(len(lengths), width).int()
        query = torch.randn(len(lengths) * tokens, HEADS, size, device="cuda").bfloat16()
        rows = query.view(len(lengths), tokens, HEADS, size) if tokens == 1 else query
        starts = None if tokens == 1 else torch.arange(0, len(query) + 1, tokens, dtype=torch.int32, device="cuda")
        found = flash_attn_varlen_func(
            rows, keys, values, cu_seqlens_q=starts, seqused_k=torch.tensor(lengths, device="cuda").int(),
            page_table=table, max_seqlen_q=tokens, max_seqlen_k=max(lengths), causal=causal,
            window_size=(left, None if left is None else 0), softmax_scale=size**-0.5,
        )[0].view_as(query)  # fmt: skip
        for row, length in enumerate(lengths):
            mine = slice(row * tokens, (row + 1) * tokens)
            own = [cache[table[row].long()].flatten(0, 1)[:length] for cache in (keys, values)]
            expected = dense(query[mine], *own, mask)
            worst = max(worst, float((found[mine].float() - expected).abs().max() / expected.abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sizes", nargs="*", type=int, default=[*range(16, 257, 16)])
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # of its compiler
    found = []
    for size in asked.sizes:
        for mask in MASKS:
            for tokens in (1, 5):
                for page in PAGES:
                    try:
                        result: float | str = round(difference(size, page, mask, tokens), 4)
                    except Exception as error:
                        result = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
                    found.append({"head_size": size, "mask": mask, "tokens": tokens, "page": page, "found": result})
                    print(found[-1], flush=True)
    if asked.save:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today())}
        asked.save.write_text(json.dumps({"machine": machine, "results": found}, indent=1))


if __name__ == "__main__":
    main()
