"""Prompts of latent attention (MLA) absorbed and by keys and values of every head, in one process by turns; medians.

    python benchmarks/plain_prefill.py [--save FILE] [--heads 16 128] [--latent flashinfer] [--plain flash ...]

A model of DeepSeek's shape (rows of 512 + 64, heads of 128 + 64, values of 128), random weights, bfloat16, whose layers
do little but attend. A row of the report is one step: its heads, the prompts' new tokens and contexts, and decodes
beside them. ``absorbed_ms`` and each ``<backend>_ms`` are an eager step, from build to the end on the device, per
layer; ``saved`` are the products that a layer saves by running plainly, of all heads, in millions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import attncore
from attncore import InputBatch, MetadataBuilder
from attncore.integrations.transformers import (
    attncore_context,
    paged_caches,
    plain_prefill,
    select_for_model,
    use_latent_caches,
)

LAYERS, BLOCK, DECODES, DECODE_CONTEXT = 16, 64, 32, 2048
ROUNDS, WARM_UP = 7, 2
STEPS = (
    *(([tokens], [0], 0) for tokens in (128, 512, 1024, 2048, 4096, 8192)),
    *(([tokens], [2048], 0) for tokens in (256, 512, 1024, 2048)),
    *(([tokens], [16384], 0) for tokens in (256, 512, 1024, 2048)),
    ([512] * 4, [4096] * 4, 0),
    *(([tokens], [0], DECODES) for tokens in (512, 2048)),
    *(([tokens], [4096], DECODES) for tokens in (512, 2048)),
)
"""New tokens and contexts of the prompts, and how many decodes are beside them."""


def model_of(heads: int) -> Any:
    """DeepSeek's attention over a small model."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=1024, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=heads, num_key_value_heads=heads, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=LAYERS, kv_lora_rank=512, q_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, vocab_size=512, max_position_embeddings=1 << 15,
    )  # fmt: skip
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = DeepseekV3ForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    model.set_attn_implementation("attncore")
    use_latent_caches(model)
    return model


class Way:
    """One way to run the prompts: its caches and its batch."""

    def __init__(self, model: Any, backend: Any, plain: Any) -> None:
        self.model, self.num_blocks = model, (1 << 15) // BLOCK * 3
        self.caches = paged_caches(model, backend, self.num_blocks, plain_prefill=plain)
        self.backend = backend

    def begin(self, tokens: list[int], contexts: list[int], decodes: int) -> None:
        """A batch whose requests have their contexts; the caches hold what they hold."""
        blocks = count(1)
        self.batch = InputBatch(max_num_reqs=64, max_model_len=1 << 15, block_size=BLOCK, num_blocks=self.num_blocks)
        self.builder = MetadataBuilder(self.batch, self.backend, max_num_batched_tokens=1 << 14)
        wanted = [*zip(contexts, tokens, strict=True), *[(DECODE_CONTEXT, 1)] * decodes]
        for name, (context, new) in enumerate(wanted):
            self.batch.add_request(name, [next(blocks) for _ in range(-(-(context + new) // BLOCK))], context)
        self.scheduled = {name: new for name, (_, new) in enumerate(wanted)}
        self.ids = torch.randint(0, 512, (1, sum(self.scheduled.values())), device="cuda")

    def __call__(self) -> tuple[float, torch.Tensor]:
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        metadata = self.builder.build(self.scheduled)
        with torch.inference_mode(), attncore_context(metadata, self.caches):
            logits = self.model(
                self.ids, position_ids=metadata.positions[None], use_cache=False,
                logits_to_keep=metadata.logits_indices,
            ).logits[0]  # fmt: skip
        torch.cuda.synchronize()
        taken = (time.perf_counter_ns() - start) / 1e6
        self.batch.rollback_many(self.scheduled)
        return taken, logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--heads", type=int, nargs="*", default=[16, 128])
    parser.add_argument("--latent", default="flashinfer")
    parser.add_argument("--plain", nargs="*", default=["flash", "rocm"])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    said = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    for heads in args.heads:
        model = model_of(heads)
        backend = select_for_model(model, backend=args.latent, block_size=BLOCK).create()
        ways, plains = {"absorbed": Way(model, backend, None)}, {}
        for name in args.plain:
            try:
                plains[name] = plain_prefill(model, backend=name, least_saved=0)
            except attncore.NoBackendError as error:
                print(f"{name}: {error}", flush=True)
                continue
            ways[name] = Way(model, backend, plains[name])
            print(heads, name, plains[name].choice.spec.name, plains[name].choice.candidate.label, flush=True)
        for cache in ways["absorbed"].caches.values():
            cache.normal_()
        for way in list(ways.values())[1:]:
            for name, cache in way.caches.items():
                cache.copy_(ways["absorbed"].caches[name])
        for tokens, contexts, decodes in STEPS:
            row: dict[str, Any] = {"heads": heads, "tokens": tokens, "contexts": contexts, "decodes": decodes}
            taken: dict[str, list[float]] = {name: [] for name in ways}
            logits = {}
            for way in ways.values():
                way.begin(tokens, contexts, decodes)
                way.ids = ways["absorbed"].ids
            for index in range(ROUNDS + WARM_UP):
                for name, way in ways.items():
                    one, logits[name] = way()
                    if index >= WARM_UP:
                        taken[name].append(one / LAYERS)
            row |= {f"{name}_ms": round(statistics.median(some), 4) for name, some in taken.items()}
            row |= {
                f"{name}_differs": round(float((one - logits["absorbed"]).abs().max()), 4)
                for name, one in logits.items()
                if name != "absorbed"
            }
            pairs = sum(new * old + new * (new + 1) // 2 for new, old in zip(tokens, contexts, strict=True))
            row["saved"] = heads * (pairs * 768 - sum(contexts) * 512 * 256) // 10**6
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.save:
                args.save.write_text(json.dumps(said, indent=1) + "\n")
        del ways, model, backend
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
