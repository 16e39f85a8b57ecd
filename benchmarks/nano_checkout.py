"""A checkout of nano-vllm, its modules, and a model with random weights for them: for benchmarks/nano_vllm.py."""

import contextlib
import hashlib
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import torch

SIZE = 256
"""Tokens of a block: flash-attn takes multiples of it."""
LONGEST = 4096
"""Tokens of a request, in both ways: tables are equally wide then, which the graphs of nano-vllm copy."""


class Nano:
    """The modules of a checkout. ``host_only``: with stand-ins for what is not installed."""

    def __init__(self, checkout, *, host_only):
        if not (Path(checkout) / "nanovllm").is_dir():
            raise FileNotFoundError(f"{checkout}: no folder nanovllm in it; give a clone of nano-vllm")
        sys.path.insert(0, str(checkout))
        if host_only:
            stand_in("flash_attn", flash_attn_varlen_func=None, flash_attn_with_kvcache=None)
            stand_in("xxhash", xxh64=Hash)
        for name in ("model_runner", "scheduler", "block_manager", "sequence"):
            module = importlib.import_module(f"nanovllm.engine.{name}")
            setattr(self, name, module)
        self.context = importlib.import_module("nanovllm.utils.context")
        self.set_context, self.get_context = self.context.set_context, self.context.get_context
        self.sampling_params = importlib.import_module("nanovllm.sampling_params").SamplingParams
        self.sequence.Sequence.block_size = SIZE

    def without_block_0(self, manager):
        """attncore's null block is no request's: it is taken out of the pool, in both ways."""
        with contextlib.suppress(ValueError):
            manager.free_block_ids.remove(0)

    def host_runner(self):
        """A ModelRunner that has nothing but what its ``prepare_*`` read, and keeps tensors on the CPU."""
        runner = object.__new__(self.model_runner.ModelRunner)
        runner.block_size = SIZE

        def tensor(data, *, dtype, pin_memory):
            return torch.tensor(data, dtype=dtype)

        self.model_runner.torch = types.SimpleNamespace(
            tensor=tensor, **{name: getattr(torch, name) for name in ("int32", "int64", "float32")}
        )
        torch.Tensor.cuda = lambda self, non_blocking: self
        return runner


def stand_in(name, **attributes):
    """A module ``name`` of these attributes, unless there is one."""
    if importlib.util.find_spec(name) is None:
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module


class Hash:
    """In place of xxhash.xxh64."""

    def __init__(self):
        self.inner = hashlib.blake2b(digest_size=8)

    def update(self, data):
        self.inner.update(data)

    def intdigest(self):
        return int.from_bytes(self.inner.digest(), "little")


def make_model(folder, tiny):
    """A folder with a Qwen3's configuration and a tokenizer of a few words; no weights: the engine's are drawn."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2 if tiny else 28}
    Qwen3Config(
        **shape, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=32000 if tiny else 151936,
        max_position_embeddings=LONGEST, tie_word_embeddings=True, dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    words = Tokenizer(WordLevel({"<eos>": 0, "<unk>": 1, "a": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


@torch.inference_mode()
def draw_weights(model):
    """Random weights in place, where the graphs read them."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.05, generator=generator)
