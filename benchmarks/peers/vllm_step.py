"""vLLM 0.18.1: the host's part of a step, by its own model runner, block table and metadata builders."""

from types import MethodType, SimpleNamespace

import numpy as np
import ours
import torch
from shapes import BLOCK_SIZE
from timing import Way, without

from attncore.abstract import BackendConfig
from attncore.reference import ReferenceBackend

CPU = torch.device("cpu")
# Statements left out of theirs: what is no metadata (token ids, sampling, LoRA) and their logits_indices,
NO_METADATA = (
    "_calc_mrope_positions", "_calc_xdrope_positions", "token_indices", "req_prompt_embeds", "num_tokens_np",
    "num_tokens = [", "discard_request_mask", "_prepare_input_ids", "use_spec_decode", "lora_config",
    "query_start_loc = self.query_start_loc.gpu", "return (",
)  # fmt: skip
# and what sends metadata to a device.
COPIES = ("copy_to_gpu", "commit_block_table", "commit_slot_mapping")
PAGE_COPIES = (
    "self.paged_kv_indptr_cpu_buffer[:num_reqs + 1] = ", "paged_kv_indptr.copy_(",
    "self.paged_kv_last_page_len.gpu[:num_reqs].copy_(",
)  # fmt: skip


class _NoLaunch:
    """Stands for a triton kernel: launched, it does nothing. Its work is the device's, on both sides."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def runner_of(rows, backend):
    """Their GPUModelRunner, with what a step of the host reads and nothing else; tensors on the CPU."""
    from vllm import SamplingParams
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup

    n, tokens = len(rows), sum(row.query_len for row in rows)
    longest = max(row.computed + row.query_len for row in rows)  # the shortest max_model_len that holds the rows
    runner = object.__new__(GPUModelRunner)

    def buffer(*size, dtype=torch.int32):
        return CpuGpuBuffer(*size, dtype=dtype, device=CPU, pin_memory=False)

    batch = InputBatch(
        max_num_reqs=n, max_model_len=longest, max_num_batched_tokens=tokens, device=CPU, pin_memory=False,
        vocab_size=32000, block_sizes=[BLOCK_SIZE], kernel_block_sizes=[BLOCK_SIZE],
    )  # fmt: skip
    requests, sampling = {}, SamplingParams(temperature=0.0)
    for i, row in enumerate(rows):
        held = -(-(row.computed + row.query_len) // BLOCK_SIZE)
        request = CachedRequestState(
            req_id=str(i), prompt_token_ids=[1] * (row.computed + row.query_len), mm_features=[],
            sampling_params=sampling, generator=None, block_ids=(row.blocks[:held],),
            num_computed_tokens=row.computed, output_token_ids=[],
        )  # fmt: skip
        requests[str(i)] = request
        batch.add_request(request)
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    group = AttentionGroup(backend=None, layer_names=["layers.0"], kv_cache_spec=spec, kv_cache_group_id=0)
    group.metadata_builders = [builder_of(backend, spec, n, longest)]
    vars(runner).update(
        device=CPU, input_batch=batch, requests=requests, arange_np=np.arange(max(tokens, longest, n) + 1),
        positions=buffer(tokens, dtype=torch.int64), query_start_loc=buffer(n + 1), seq_lens=buffer(n),
        input_ids=buffer(tokens), discard_request_mask=buffer(n, dtype=torch.bool), uses_mrope=False,
        uses_xdrope_dim=0, enable_prompt_embeds=False, lora_config=None, speculative_config=None,
        routed_experts_initialized=False, dcp_world_size=1, is_mm_prefix_lm=False, max_model_len=longest,
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False), attn_groups=[[group]],
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.0"])]
        ),
    )  # fmt: skip
    return runner


def builder_of(backend, spec, max_num_reqs, max_model_len):
    """Their metadata builder for ``backend``, of a configuration in which nothing optional is on."""
    from vllm.config import CUDAGraphMode

    model = SimpleNamespace(
        get_num_attention_heads=lambda _: 32, get_num_kv_heads=lambda _: 8, get_head_size=lambda: 128,
        max_model_len=max_model_len, dtype=torch.bfloat16,
    )  # fmt: skip
    config = SimpleNamespace(
        model_config=model, speculative_config=None, cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1, decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE, max_cudagraph_capture_size=None),
        attention_config=SimpleNamespace(
            flash_attn_max_num_splits_for_cuda_graph=32, use_trtllm_attention=False,
            disable_flashinfer_q_quantization=True,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_reqs),
    )  # fmt: skip
    if backend == "flash":
        from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

        return FlashAttentionMetadataBuilder(spec, ["layers.0"], config, CPU)
    from vllm.v1.attention.backends import flashinfer

    flashinfer._copy_page_indices_kernel = _NoLaunch()
    flashinfer.fast_plan_decode = lambda *args, **kwargs: None  # the library's plan is no part of either side
    flashinfer.can_use_trtllm_attention = lambda *args: False  # those kernels read the table, and no page lists
    flashinfer.is_pin_memory_available = lambda: False
    flashinfer.get_kv_cache_layout = lambda: "NHD"
    flashinfer.get_per_layer_parameters = lambda *args: None
    flashinfer.infer_global_hyperparameters = lambda _: SimpleNamespace(
        sm_scale=1.0, window_left=-1, logits_soft_cap=0.0, has_sinks=False, has_same_window_lefts=True,
        has_same_all_params=True,
    )  # fmt: skip
    builder = flashinfer.FlashInferMetadataBuilder(spec, ["layers.0"], config, CPU)
    builder.set_workspace_buffer(torch.zeros(1))
    return builder


def whole_step(runner, rows, prepare=None):
    """A call that does the host's part of the step and answers its metadata."""
    query_lens = np.array([row.query_len for row in rows], np.int32)
    n, tokens, longest_query = len(rows), int(query_lens.sum()), int(query_lens.max())
    scheduled = SimpleNamespace(total_num_scheduled_tokens=tokens, scheduled_spec_decode_tokens={})
    prepare = prepare or type(runner)._prepare_inputs

    def step():
        prepare(runner, scheduled, query_lens)
        slot_mappings, _ = runner._get_slot_mappings(tokens, n, tokens)
        metadata, _ = runner._build_attention_metadata(tokens, n, longest_query, slot_mappings=slot_mappings)
        return metadata["layers.0"]

    return step


def metadata_step(runner, rows, *, copies):
    """The same without what makes no metadata; without ``copies`` also without what sends it to the device."""
    builder = runner.attn_groups[0][0].metadata_builders[0]
    if not copies and hasattr(builder, "_compute_flashinfer_kv_metadata"):
        kind = type(builder)
        builder._compute_flashinfer_kv_metadata = MethodType(
            without(kind._compute_flashinfer_kv_metadata, *PAGE_COPIES), builder
        )
    kept = without(type(runner)._prepare_inputs, *NO_METADATA, *(() if copies else COPIES))
    return whole_step(runner, rows, kept)


def check(rows, runner, metadata):
    """The host's fields of their step are attncore's; with copies, so are those that were sent (``metadata``)."""
    builder, scheduled, _ = ours.persistent(rows)
    mine = builder.build(scheduled)
    n, tokens = mine.num_reqs, mine.num_tokens
    table = runner.input_batch.block_table[0]
    found = {
        "slot_mapping": table.slot_mapping.np[:tokens], "positions": runner.positions.np[:tokens],
        "seq_lens": runner.seq_lens.np[:n], "query_start_loc": runner.query_start_loc.np[: n + 1],
    }  # fmt: skip
    kind = runner.attn_groups[0][0].metadata_builders[0]
    if hasattr(kind, "paged_kv_indptr"):
        found["paged_kv_indptr"] = kind.paged_kv_indptr.np[: n + 1]
        found["paged_kv_last_page_len"] = kind.paged_kv_last_page_len.np[:n]
    if metadata is not None:
        found |= {"slot_mapping ": metadata.slot_mapping}
    if hasattr(metadata, "seq_lens"):
        found |= {"seq_lens ": metadata.seq_lens, "query_start_loc ": metadata.query_start_loc}
        for theirs, row in zip(metadata.block_table.tolist(), rows, strict=True):
            held = -(-(row.computed + row.query_len) // BLOCK_SIZE)
            assert theirs[:held] == row.blocks[:held]
    for name, values in found.items():
        assert values.tolist() == getattr(mine, name.strip()).tolist(), name
    assert (mine.max_seq_len, mine.max_query_len) == (
        max(row.computed + row.query_len for row in rows), max(row.query_len for row in rows)
    )  # fmt: skip


def read_as_tensors(metadata):
    """What a layer's kernel reads, as torch tensors."""
    return (
        metadata.slot_mapping, metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
        metadata.max_query_len, metadata.max_seq_len,
    )  # fmt: skip


def ways(rows):
    found = {}
    for backend, name in (("flash", "FlashAttention"), ("flashinfer", "FlashInfer")):
        for what in ("metadata", "metadata and copies", "all"):
            runner = runner_of(rows, backend)
            copies = what != "metadata"
            step = whole_step(runner, rows) if what == "all" else metadata_step(runner, rows, copies=copies)
            metadata = step()
            check(rows, runner, metadata if copies else None)
            found[f"vLLM, {name}, {what}"] = Way(step, 8)
    reference = ReferenceBackend(BackendConfig(32, 8, 128, "bfloat16", BLOCK_SIZE))
    return found | {
        "attncore, persistent builder": ours.persistent_way(rows),
        "attncore, persistent builder, read as tensors": ours.persistent_way(rows, read_as_tensors, backend=reference),
        "attncore, persistent builder and copy": ours.persistent_way(rows, transport="copy"),
        **ours.baselines(rows),
    }


PERSISTENT, COPIED = "attncore, persistent builder", "attncore, persistent builder and copy"
RATIOS = [
    ("flash layout: metadata", "vLLM, FlashAttention, metadata", PERSISTENT, 30),
    ("page lists: metadata", "vLLM, FlashInfer, metadata", PERSISTENT, 30),
    (
        "flash layout: metadata, fields read as tensors",
        "vLLM, FlashAttention, metadata",
        f"{PERSISTENT}, read as tensors",
        None,
    ),
    ("flash layout: metadata and copies", "vLLM, FlashAttention, metadata and copies", COPIED, None),
    ("page lists: metadata and copies", "vLLM, FlashInfer, metadata and copies", COPIED, None),
]
