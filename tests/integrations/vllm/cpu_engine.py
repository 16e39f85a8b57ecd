"""vLLM on a CPU without its compiled code: its CPU worker's operators in torch, and an engine over a small model."""

import os
from contextlib import contextmanager

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.triton_utils import dispatcher  # noqa: E402
from vllm.utils import cpu_triton_utils  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # noqa: E402
from vllm.v1.attention.selector import _cached_get_attn_backend  # noqa: E402

CLASSES = "attncore.integrations.vllm.backend_classes"
_library = torch.library.Library("_C", "FRAGMENT")
"""Operators live as long as this."""


def _operator(schema):
    """Registers a function as the operator of vLLM's compiled code with this schema."""

    def register(function):
        _library.define(schema)
        _library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
        return function

    return register


@_operator("init_cpu_memory_env(int[] nodes) -> ()")
def _init_cpu_memory_env(nodes):
    """Binds no memory to nodes."""


def _compute_slot_mapping(num_tokens, most, query_start_loc, positions, table, stride, slot_mapping, block_size, *more):
    """The slot of each token: its block by the request's table, and its place in that; -1 behind the last token.

    vLLM 0.32 hands its own function for CPUs the arguments of its Triton kernel in another order: this one takes both.
    """
    count = int(query_start_loc[-1])
    lengths = query_start_loc.diff().long()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths, output_size=count)
    of_token = positions[:count]
    slot_mapping[:count] = table[rows, of_token // block_size].long() * block_size + of_token % block_size
    slot_mapping[count:] = -1


cpu_triton_utils._compute_slot_mapping_kernel_impl = _compute_slot_mapping


@_operator("greedy_argmax(Tensor logits) -> Tensor")
def _greedy_argmax(logits):
    return logits.argmax(-1)


@_operator(
    "rejection_greedy_sample_kernel_impl(Tensor(a!) output, Tensor counts, Tensor drafts, Tensor best, Tensor bonus, "
    "Tensor? is_greedy, int most) -> ()"
)
def _accept_drafts(output, counts, drafts, best, bonus, is_greedy, most):
    """Of each request its best tokens up to the first draft that differs, or all of them and the one behind.

    ``counts`` are sums of the requests' drafts.
    """
    start = 0
    for row, stop in enumerate(counts.tolist()):
        differs = (drafts[start:stop] != best[start:stop]).nonzero().flatten().tolist()
        taken = differs[0] + 1 if differs else stop - start
        output[row, :taken] = best[start : start + taken]
        if not differs:
            output[row, taken] = bonus.flatten()[row]
        start = stop


@contextmanager
def engine(folder, backend, **options):
    """A vLLM engine over the model in ``folder`` whose attention is that of the name ``backend``.

    vLLM's CPU platform takes one name alone, CPU_ATTN, which stands for the backend's class here.
    """
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{CLASSES}.{backend}")
    _cached_get_attn_backend.cache_clear()
    settings = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 160, "max_num_seqs": 8, "block_size": 16,
        "max_num_batched_tokens": 32, "enable_prefix_caching": True, "disable_log_stats": True,
        "skip_tokenizer_init": True, "compilation_config": {"custom_ops": ["none"]}, "attention_backend": backend,
    }  # fmt: skip
    llm = None
    try:
        llm = LLM(str(folder), **settings | options)
        yield llm
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        _cached_get_attn_backend.cache_clear()
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()  # or the next engine of this process would find half of it
        # Kernels are replaced once a process; vLLM's search for them fails over what numba's import leaves behind.
        dispatcher.register_kernels = lambda overrides: None


def answers(llm, prompts, count):
    """``count`` greedy tokens after each prompt."""
    greedy = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def prompts_for(vocabulary):
    """Prompts of several lengths: longer than a chunk, one with another's beginning, and one of a single token."""
    lengths = (5, 17, 40, 100, 1, 100)
    prompts = [[(7 * i + j * j) % (vocabulary - 3) + 3 for j in range(length)] for i, length in enumerate(lengths)]
    prompts[5][:96] = prompts[3][:96]
    return prompts
