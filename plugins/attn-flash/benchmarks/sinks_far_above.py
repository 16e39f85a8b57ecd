"""What vLLM's build of FlashAttention 3 makes of sinks that are more than 88 above every score of a part of the keys
(docs/design/flash-attention-3.md). On a Hopper GPU, with vLLM's library file:

    python sinks_far_above.py

One decode over 8,192 keys, which the kernel splits; the scores of some are -200, of the others 0; sinks of -4 to 4.
"""

from __future__ import annotations

import torch

from attncore import InputBatch, MetadataBuilder, select
from attncore.dense import dense_attention

KEYS, SIZE = 8192, 64
PARTS = {
    "none": slice(0, 0),
    "all": slice(0, KEYS),
    "first half": slice(0, KEYS // 2),
    "second half": slice(KEYS // 2, KEYS),
}


def main() -> None:
    torch.manual_seed(0)
    for heads, kv_heads in ((8, 8), (8, 2), (64, 8)):
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": SIZE, "dtype": "bfloat16", "block_size": 16}
        chosen = select(**sizes, sinks=True, backend="flash", options={"flash": {"generation": "3"}})
        backend, sinks = chosen.create(device="cuda:0"), torch.linspace(-4, 4, heads).tolist()
        impl, cache = backend.impl("layers.0", scale=1.0, sinks=sinks), backend.allocate_kv_cache(KEYS // 16 + 1)
        batch = InputBatch(max_num_reqs=1, max_model_len=KEYS, block_size=16)
        builder = MetadataBuilder(batch, backend, max_num_batched_tokens=KEYS)
        query, key, value = (torch.zeros(KEYS, n, SIZE, device="cuda").bfloat16() for n in (heads, kv_heads, kv_heads))
        query[:, :, 0] = 10.0
        value.normal_()
        for name, low in PARTS.items():
            key.zero_()
            key[low, :, 0] = -20.0
            batch.add_request("a", list(range(1, KEYS // 16 + 1)))
            for count in (KEYS - 1, 1):
                step, now = builder.build({"a": count}), slice(-count, None) if count == 1 else slice(0, count)
                output, lse = impl.forward_with_lse(query[now], key[now], value[now], cache, step)
            batch.remove_request("a")
            expected, sums = dense_attention(query[-1:], key, value, scale=1.0, sinks=sinks, return_lse=True)
            off = (output.float() - expected).abs().max().item()
            print(f"heads {heads} over {kv_heads}, low scores: {name}: output off by {off:.5f}, ", end="")
            print(f"log-sum-exp {lse[0, :2].tolist()} of {sums[0, :2].tolist()}")


if __name__ == "__main__":
    main()
