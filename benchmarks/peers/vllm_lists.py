"""vLLM 0.8.5.post1: metadata of a step from lists of block ids, by its own builders."""

from types import SimpleNamespace

import ours
import torch
from shapes import BLOCK_SIZE
from timing import Way

FIELDS = ("slot_mapping", "seq_lens", "context_lens", "query_start_loc", "seq_start_loc")
THEIR_NAMES = {"seq_lens": "seq_lens_tensor", "context_lens": "context_lens_tensor"}


def builders():
    """Name -> class: FlashAttention's own, and the common one that ROCm's, xFormers' and others are."""
    from vllm.attention.backends.flash_attn import FlashAttentionMetadataBuilder
    from vllm.attention.backends.rocm_flash_attn import ROCmFlashAttentionMetadataBuilder

    return {"flash": FlashAttentionMetadataBuilder, "common": ROCmFlashAttentionMetadataBuilder}


def step_of(kind, rows):
    """A call that builds the step. What their scheduler and input builder make beforehand is made here, untimed."""
    from vllm.worker.model_runner import ModelInputForGPUBuilder

    ordered = sorted(enumerate(rows), key=lambda item: item[1].query_len == 1)  # prompts first, as they require
    groups = []
    for i, row in ordered:
        group = ModelInputForGPUBuilder.InterDataForSeqGroup(
            request_id=str(i),
            seq_ids=[i],
            is_prompt=row.query_len > 1,
            block_tables={i: row.blocks},
            computed_block_nums=[],
        )
        seq_len = row.computed + row.query_len
        group.input_tokens = [[0] * row.query_len]
        group.orig_seq_lens, group.seq_lens = [seq_len], [seq_len]
        group.query_lens, group.context_lens = [row.query_len], [row.computed]
        groups.append(group)
    query_lens = [row.query_len for _, row in ordered]
    seq_lens = [row.computed + row.query_len for _, row in ordered]
    inputs = SimpleNamespace(
        runner=SimpleNamespace(device=torch.device("cpu"), pin_memory=False),
        sliding_window=None,
        block_size=BLOCK_SIZE,
        chunked_prefill_enabled=True,
        inter_data_list=groups,
    )
    builder = kind(inputs)

    def step():
        builder.prepare()
        return builder.build(seq_lens, query_lens, -1, len(seq_lens))

    return step


def check(rows, steps):
    """Their fields and those of attncore's list builder are the same, and so are the persistent builder's slots."""
    for layout, step in steps.items():
        theirs, mine = step(), ours.list_way(rows, layout).call()
        for name in FIELDS:
            found = getattr(theirs, THEIR_NAMES.get(name, name)).tolist()
            assert found == getattr(mine, name).tolist(), (layout, name)
        width = theirs.block_tables.shape[1]
        assert theirs.block_tables.tolist() == mine.block_table[:, :width].tolist(), layout
        assert (theirs.num_prefills, theirs.num_decode_tokens) == (mine.num_prefills, mine.num_decode_tokens)
    builder, scheduled, _ = ours.persistent(rows)
    if not scheduled:  # a mixed batch has its decodes first in that builder
        assert builder.build().slot_mapping.tolist() == theirs.slot_mapping.tolist()


def ways(rows):
    steps = {layout: step_of(kind, rows) for layout, kind in builders().items()}
    check(rows, steps)
    calls = 4 if len(rows[0].blocks) < 500 else 1
    return {
        "vLLM, FlashAttention builder": Way(steps["flash"], calls),
        "vLLM, common builder": Way(steps["common"], calls),
        "attncore, list builder, flash": ours.list_way(rows, "flash"),
        "attncore, list builder, common": ours.list_way(rows, "common"),
        "attncore, persistent builder": ours.persistent_way(rows),
        **ours.baselines(rows),
    }


RATIOS = [
    # what, theirs, ours, goal (for decodes)
    ("FlashAttention builder / list builder", "vLLM, FlashAttention builder", "attncore, list builder, flash", 8),
    ("common builder / list builder", "vLLM, common builder", "attncore, list builder, common", 8),
    (
        "FlashAttention builder / persistent builder",
        "vLLM, FlashAttention builder",
        "attncore, persistent builder",
        500,
    ),
    ("common builder / persistent builder", "vLLM, common builder", "attncore, persistent builder", 500),
]
