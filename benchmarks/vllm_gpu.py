"""vLLM on a CUDA device with attncore's backends beside its own: tokens, tokens a second, host time of ``build``.

    python -P benchmarks/vllm_gpu.py --save benchmarks/results/gpu/vllm_DATE.json
    python -P benchmarks/vllm_gpu.py --backends TRITON_ATTN,FLASHINFER,ATTNCORE_FLASHINFER --concurrent 1,64,256

It needs vLLM and transformers beside attncore and its plugins, and a GPU. Each run is a process of its own: a backend,
eager or with the graphs of FULL_DECODE_ONLY. Backends that are joined by + (FLASH_ATTN+ATTNCORE_FLASH) are engines of
one process, which take turns: two processes of a busy host differ by a fifth by themselves.
``--without-compiled-code`` runs vLLM's .py files alone: a few of its operators are then torch's, on both sides of each
comparison. Tokens are compared with those of the first run, and judged by transformers: the largest gap between a
token's logit and the best one.

The first round of each number of requests, which compiles, and the last one are left out of what is compared. In the
last one attncore's ``build`` runs under torch's sync debug mode, in which what waits for the device is an error
(``--no-sync-check`` leaves that out), and the floor of a bridge (benchmarks/bridge_floor.py) runs over the same
arguments, by turns before it and behind it: who is second finds part of what it reads in the caches.
``build_us_first`` and ``floor_us_first`` are the medians of those that were first.
"""

import argparse
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
LENGTHS = (5, 17, 40, 100, 3, 200, 33, 100)
VOCABULARY = 4096
SHAPES = {
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16},
}


def block_size_of(backend):
    """16 tokens; flash-attn 2, which is what is left where neither generation 3 nor 4 is, takes multiples of 256."""
    if backend != "ATTNCORE_FLASH" or any(importlib.metadata.distributions(name="flash-attn-4")):
        return 16
    from attn_flash.probe_results import library_file

    return 256 if library_file("3_vllm") is None else 16


OWN_BUILDERS = {
    "TRITON_ATTN": ("triton_attn", "TritonAttentionMetadataBuilder"),
    "FLASHINFER": ("flashinfer", "FlashInferMetadataBuilder"),
    "FLASH_ATTN": ("flash_attn", "FlashAttentionMetadataBuilder"),
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "4",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_HOST_IP": "127.0.0.1", "TQDM_DISABLE": "1",
    "VLLM_TARGET_DEVICE": "cuda",
}  # fmt: skip


def prompts():
    """Prompts of several lengths; the last begins as the fourth does."""
    found = [[(7 * i + 13 * j * j + 3 * j) % 4000 + 3 for j in range(length)] for i, length in enumerate(LENGTHS)]
    found[7][:96] = found[3][:96]
    return found


def timed_prompts(count, turn):
    """As many different prompts of 48 to 95 tokens. Those of another turn begin otherwise: no prefix of theirs is
    cached, whatever the block size is."""
    return [[turn + 3, *((31 * i + 17 * j) % 4000 + 3 for j in range(47 + (i * 5) % 48))] for i in range(count)]


def save_model(folder, shape):
    """A bf16 model of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[shape], num_key_value_heads=4, head_dim=128, vocab_size=VOCABULARY, max_position_embeddings=2048,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.05)
    model.to(torch.bfloat16).save_pretrained(folder)


def stand_in_for_compiled_code():
    """Operators of vLLM's compiled libraries in torch, as far as these models ask for them."""
    import torch

    for name in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__file__ = "/none"
        sys.modules[name] = module

    def silu_and_mul(out, x):
        half = x.shape[-1] // 2
        out.copy_(torch.nn.functional.silu(x[..., :half]) * x[..., half:])

    def normed(x, weight, epsilon):
        wide = x.float()
        wide = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
        return wide if weight is None else wide * weight

    def fused_add_rms_norm(x, residual, weight, epsilon):
        residual.add_(x)
        x.copy_(normed(residual, weight, epsilon))

    operators = {
        "silu_and_mul(Tensor! out, Tensor x) -> ()": silu_and_mul,
        "rms_norm(Tensor! out, Tensor x, Tensor? weight, float eps) -> ()": lambda out, x, weight, eps: out.copy_(
            normed(x, weight, eps)
        ),
        "fused_add_rms_norm(Tensor! x, Tensor! residual, Tensor? weight, float eps) -> ()": fused_add_rms_norm,
        "weak_ref_tensor(Tensor t) -> Tensor": lambda t: t.detach(),
    }
    for name in (
        "cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_scaled_mm_supports_fp4",
        "cutlass_group_gemm_supported", "cutlass_sparse_scaled_mm_supported", "mxfp4_experts_quant_supported",
    ):  # fmt: skip
        operators[f"{name}(int capability) -> bool"] = lambda capability: False
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in operators.items():
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
    caches = torch.library.Library("_C_cache_ops", "FRAGMENT")
    caches.define(
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! kc, Tensor! vc, Tensor slots, str dtype, "
        "Tensor ks, Tensor vs) -> ()"
    )
    caches.impl("reshape_and_cache_flash", _store, "CompositeExplicitAutograd")
    buffers = importlib.import_module("vllm.v1.worker.gpu.buffer_utils")
    buffers.is_uva_available = lambda: False
    importlib.import_module("vllm.model_executor.models.registry")._run_in_subprocess = lambda function: function()
    importlib.import_module("vllm.v1.worker.gpu_worker").kernel_warmup = lambda worker: None
    return library, caches


def _store(*arguments):
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    triton_reshape_and_cache_flash(*arguments)


class Watch:
    """Notes the seconds of each ``build`` of a backend's builder, and of the floor beside those of attncore's."""

    def __init__(self, backend, check_sync):
        module, name = OWN_BUILDERS.get(backend, ("", ""))
        path = f"vllm.v1.attention.backends.{module}" if module else "attncore.integrations.vllm.metadata_builder"
        kind = getattr(importlib.import_module(path), name or "AttncoreMetadataBuilder")
        self.calls, self.floors, self._floors, self._turn, self._watches = [], [], {}, 0, True
        build, ours, watch = kind.build, not module, self

        def watched(builder, common_prefix_len, common_attn_metadata, *more, **options):  # vLLM also names them
            given = (common_prefix_len, common_attn_metadata, *more)
            beside = ours and watch._watches
            return watch.both(builder, build, check_sync, beside, given, options)

        kind.build = watched

    def clear(self, *, watches):
        """Forgets the calls; ``watches``: from now on the floor and the check for synchronisation are beside them."""
        self._watches = watches
        self.calls.clear()
        self.floors.clear()

    def both(self, builder, build, check_sync, ours, given, options):
        self._turn += 1
        first = self._turn % 2 == 0
        if ours and first:
            self.floor(builder, given, first=True)
        metadata = self.build(builder, build, check_sync and ours, given, options, first=not first or not ours)
        if ours and not first:
            self.floor(builder, given, first=False)
        return metadata

    def build(self, builder, build, check_sync, given, options, *, first):
        import torch

        before = torch.cuda.get_sync_debug_mode()
        if check_sync:  # none of attncore's may wait for the device
            torch.cuda.set_sync_debug_mode("error")
        start = time.perf_counter()
        try:
            return build(builder, *given, **options)
        finally:
            self.calls.append((time.perf_counter() - start, first))
            torch.cuda.set_sync_debug_mode(before)

    def floor(self, builder, given, *, first):
        if given[1].seq_lens_cpu_upper_bound is None:
            return
        floor = self._floors.get(id(builder))
        if floor is None:
            from bridge_floor import Floor

            floor = self._floors[id(builder)] = Floor(builder.steps)
        start = time.perf_counter()
        floor.build(*given[:2])
        self.floors.append((time.perf_counter() - start, first))

    def found(self):
        """Microseconds of the calls since ``clear``."""
        of = {"build": self.calls, "floor": self.floors}
        found = {}
        for name, calls in of.items():
            times, firsts = sorted(taken for taken, _ in calls), [taken for taken, first in calls if first]
            if times:
                found[f"{name}_us_lower_quartile"] = round(1e6 * times[len(times) // 4], 1)
                found[f"{name}_us_median"] = round(1e6 * statistics.median(times), 1)
            if firsts:
                found[f"{name}_us_first"] = round(1e6 * statistics.median(firsts), 1)
        return found


def engine_of(arguments, backend, graphs):
    """vLLM's engine over the model with this backend."""
    from vllm import LLM

    most = max(arguments.concurrent)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if size <= most]
    modes = (
        {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        if graphs
        else {"cudagraph_mode": "NONE"}
    )
    norms = ["native"]
    return LLM(
        arguments.model, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=not graphs, seed=0,
        max_model_len=1024, max_num_seqs=most, max_num_batched_tokens=max(256, 2 * most), enable_prefix_caching=True,
        disable_log_stats=True, block_size=block_size_of(backend), gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=4 << 30, attention_backend=backend,
        compilation_config={"mode": 0, "custom_ops": ["none"], **modes},
        kernel_config={
            "ir_op_priority": {"rms_norm": norms, "fused_add_rms_norm": norms}, "enable_flashinfer_autotune": False,
            "enable_jit_warmup": False,
        },
    )  # fmt: skip


def generate(llm, given, count):
    """``count`` tokens behind each prompt, the likeliest ones."""
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in given], greedy, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def timed_round(llm, watch, count, turn, *, watches):
    """One round of ``count`` requests at once: tokens a second, and what ``build`` took."""
    import torch

    watch.clear(watches=watches)
    torch.cuda.synchronize()
    start = time.perf_counter()
    generate(llm, timed_prompts(count, turn), 64)
    seconds = time.perf_counter() - start
    return {"tokens_per_s": round(count * 64 / seconds), **watch.found(), "steps": len(watch.calls)}


def run(arguments):
    """One engine for each of the backends: tokens after ``prompts``, then for each number of requests at once the
    rates of all rounds, in which the engines take turns.
    """
    kept = stand_in_for_compiled_code() if arguments.without_compiled_code else None
    import torch
    import vllm
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    backends = arguments.backend.split("+")
    watches = {name: Watch(name, arguments.sync_check) for name in backends}
    engines = {name: engine_of(arguments, name, arguments.graphs) for name in backends}
    found = {}
    for name, llm in engines.items():
        tokens = generate(llm, prompts(), 24)
        found[name] = {
            "vllm": vllm.__version__, "device": torch.cuda.get_device_name(), "beside": backends, "rates": {},
            "tokens": tokens, "again_equal": generate(llm, prompts(), 24) == tokens,
            "runner_v2": bool(getattr(llm.llm_engine.vllm_config, "use_v2_model_runner", False)),
        }  # fmt: skip
    for count in arguments.concurrent:
        for turn in range(arguments.rounds + 2):
            for name in backends[:: 1 if turn % 2 else -1]:
                rounds = found[name]["rates"].setdefault(count, [])
                watched = turn > arguments.rounds
                rounds.append(timed_round(engines[name], watches[name], count, turn, watches=watched))
    Path(arguments.out).write_text(json.dumps(found))
    del kept
    os._exit(0)  # vLLM's threads may outlive it


def judge(arguments):
    """The largest gap, of all tokens of each run, between a token's logit by transformers and the best one."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).cuda().eval()
    gaps = {}
    for name, tokens in json.loads(Path(arguments.out).read_text()).items():
        worst = 0.0
        for prompt, answer in zip(prompts(), tokens, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + answer], device="cuda")).logits[0, len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(answer, device="cuda")[:, None])[:, 0]
            worst = max(worst, float((logits.max(-1).values - chosen).max()))
        gaps[name] = round(worst, 4)
    Path(arguments.out).write_text(json.dumps(gaps))


def child(arguments, folder, what, **more):
    """One process; its JSON, or the end of what it printed."""
    out = Path(folder, "out.json")
    if "given" in more:
        out.write_text(json.dumps(more.pop("given")))
    else:
        out.unlink(missing_ok=True)
    words = [sys.executable, "-P", __file__, "--child", what, "--model", f"{folder}/model", "--out", str(out)]
    words += ["--concurrent", ",".join(map(str, arguments.concurrent)), "--shape", arguments.shape]
    words += ["--rounds", str(arguments.rounds)]
    words += ["--without-compiled-code"] * arguments.without_compiled_code + ["--no-sync-check"] * (
        not arguments.sync_check
    )
    words += [f"--backend={more['backend']}", *["--graphs"] * more["graphs"]] if more else []
    environment = {**os.environ, **{name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode or (what != "model" and not out.exists()):
        return {"failed": (done.stderr or done.stdout)[-3000:]}
    return json.loads(out.read_text()) if out.exists() else {}


def main():
    """Runs everything and prints a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="TRITON_ATTN,FLASHINFER,ATTNCORE_FLASHINFER,ATTNCORE_FLASH")
    parser.add_argument("--concurrent", default="1,64,256")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of each number of requests, beside two that are not counted"
    )
    parser.add_argument("--eager-only", action="store_true")
    parser.add_argument("--graphs-only", action="store_true")
    parser.add_argument("--without-compiled-code", action="store_true")
    parser.add_argument("--no-sync-check", dest="sync_check", action="store_false")
    parser.add_argument("--save")
    for name in ("--child", "--model", "--out", "--backend"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--graphs", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.concurrent = [int(count) for count in arguments.concurrent.split(",")]
    if arguments.child:
        {"model": lambda one: save_model(one.model, one.shape), "run": run, "judge": judge}[arguments.child](arguments)
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        child(arguments, folder, "model")
        modes = [*[False] * (not arguments.graphs_only), *[True] * (not arguments.eager_only)]
        for backends in arguments.backends.split(","):
            for graphs in modes:
                mode = "FULL_DECODE_ONLY" if graphs else "eager"
                found = child(arguments, folder, "run", backend=backends, graphs=graphs)
                if "failed" in found:
                    found = {backends: found}
                for backend, one in found.items():
                    results[f"{backend}, {mode}"] = one
                    rates = {count: rounds[-1] for count, rounds in one.get("rates", {}).items()}
                    print(f"{backend}, {mode}", one.get("failed") or rates, flush=True)
                save(arguments.save, results)
        tokens = {name: found["tokens"] for name, found in results.items() if "tokens" in found}
        gaps = child(arguments, folder, "judge", given=tokens) if tokens else {}
    first = next(iter(tokens.values()), [])
    for name, answers in tokens.items():
        equal = sum(one == other for one, other in zip(answers, first, strict=True))
        results[name] |= {"equal_to_the_first": equal, "largest_gap": gaps.get(name)}
        print(f"{name}: {equal} of {len(first)} prompts as the first; largest gap to the best logit {gaps.get(name)}")
    print_ratios(results)
    save(arguments.save, results)


def save(file, results):
    """Writes what was found so far: a run that is cut off keeps its first processes."""
    if file:
        Path(file).write_text(json.dumps(results, indent=1))


def print_ratios(results):
    """Of each of attncore's backends beside vLLM's own of that library, tokens a second and the median of the rounds'
    ratios: where both are in one process a round is beside the other's of the same turn.
    """
    for name, found in results.items():
        own = results.get(name.replace("ATTNCORE_FLASHINFER", "FLASHINFER").replace("ATTNCORE_FLASH,", "FLASH_ATTN,"))
        if own in (None, found) or "rates" not in found or "rates" not in own:
            continue
        for count, rounds in found["rates"].items():
            pairs = [
                (ours["tokens_per_s"], theirs["tokens_per_s"])
                for ours, theirs in zip(rounds, own["rates"][count], strict=True)
            ][1:-1]
            rate, ratio = (
                statistics.median(one)
                for one in ([ours for ours, _ in pairs], [ours / theirs for ours, theirs in pairs])
            )
            print(f"{name}, {count} at once: {rate:.0f} tokens/s, {ratio:.3f} of vLLM's own")


if __name__ == "__main__":
    main()
