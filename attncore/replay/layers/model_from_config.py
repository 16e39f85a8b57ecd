"""A model of transformers with random weights, by a configuration that is data: no code, no network, bounded memory.

A configuration may name code to import, kernels to fetch, or another model to load. ``checked_fields`` leaves out the
fields that do and refuses what is left and is neither a number nor a word; the class is transformers' own, found by
``model_type`` alone. The model is made twice: first on torch's meta device, which counts what it takes, in a copy of
this process: classes of configurations compute with their fields in plain loops, which nothing counts, and a copy that
takes too long or too much is ended. A new process would import transformers again, which takes 5 s.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from logging import CRITICAL
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attncore.did_you_mean import did_you_mean
from attncore.integrations.transformers.attention_interface import Attender, attending_by, using_attncore
from attncore.integrations.transformers.recurrent_layers import nbytes_of_states
from attncore.quoted import one_line, quoted_json
from attncore.registry.child_process import run_in_fork
from attncore.registry.host.free_memory import available_bytes
from attncore.registry.request_from_config_json import without_attention
from attncore.replay.layers.misspelt_field import misspelt_field
from attncore.replay.model_error import ModelError, errors_as_model_errors, memory_error_as_model_error
from attncore.show import counted
from attncore.vocabulary import DTYPES

MAX_LAYERS = 1024
"""As many as ``--layers`` may state: configurations list their layers before any memory is taken."""
MAX_MODULES = 200_000
"""Of a model: one of this size takes a minute to make, whatever its modules hold."""
MAX_SECONDS = 60.0
"""To make the configuration and its model once without memory for its numbers."""
MAX_WORK = 2 << 30
"""Bytes that this may take: modules and lists in plain memory."""
TENSORS_AT_ONCE = 4
"""Of those that a layer makes between its weights: a gate, what becomes of it, what it is multiplied with, a product.
"""

_OF_CODE = frozenset(
    (
        "auto_map", "attn_implementation", "experts_implementation", "quantization_config", "compression_config",
        "custom_pipelines", "name_or_path", "architectures", "transformers_version", "tokenizer_class",
        "processor_class", "adapters", "peft_config",
    )
)  # fmt: skip
"""What names code, a loader, a kernel or a place, and says nothing of a model's shape: left out, at every level."""
_LABELS = frozenset(("id2label", "label2id", "num_labels", "task_specific_params", "license"))
"""Texts, and names of classes, of which no model of language is made: left out too."""
_SIZES = frozenset(
    (
        "hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head",
        "num_key_value_heads", "head_dim", "vocab_size",
    )
)  # fmt: skip
"""Numbers of a model that are 1 at least: classes of configurations do not check them, and divide by some."""
_WORD = re.compile(r"[A-Za-z0-9_.+*\-]{0,100}")
_DTYPES = (*DTYPES, "float64")


def random_model(
    path: str, facts: dict[str, Any], seed: int, device: str | None, longest: int = 1, at_once: int = 1
) -> tuple[Any, int]:
    """The model of a configuration's fields, and the bytes that it takes beside its weights for a request of
    ``longest`` tokens, and for ``at_once`` tokens of a step; ModelError, which begins with ``path``, where they make
    none, or where both do not fit in memory.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = checked_fields(path, facts)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with errors_as_model_errors(path, fields), data_alone():
        kind = fields.pop("model_type", None)
        if not isinstance(kind, str):
            raise ModelError(f"{path}: model_type: missing; it names the class of transformers that is made")
        if not kind or kind not in _known_kinds():
            raise ModelError(
                f"{path}: model_type: {quoted_json(kind)} is none of transformers' own; code of a configuration is "
                f"not run{did_you_mean(kind, _known_kinds())}"
            )
        if without := without_attention(facts):
            raise ModelError(f"{path}: {without}")
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ModelError(f"{path}: model_type: {kind} is no model that says a next token; take a decoder of text")
        for name in sorted(_SIZES & fields.keys()):
            if type(fields[name]) is int and fields[name] < 1:
                raise ModelError(f"{path}: {name}: {fields[name]} is not a positive integer")
        if wrong := misspelt_field(_known_kinds()[kind], fields):
            raise ModelError(f"{path}: {wrong}")

        def make(place: str) -> Any:
            config = AutoConfig.for_model(kind, **_copied(fields))
            dtype = config.dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
            with torch.device(place):
                return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    config, dtype=dtype, trust_remote_code=False
                ).eval()

        free = available_bytes(device)

        def counted_bytes() -> str:
            torch.set_num_threads(1)  # a copy of a process has none of its threads
            try:
                with (
                    errors_as_model_errors(path, fields),
                    memory_error_as_model_error(f"{path}: the model", "take a smaller one"),
                    _counted(path, free),
                ):
                    model = make("meta")
                    _initialise(model)
                    size = _checked_size(path, model, free)
                    return str(_checked_step(path, model, free - size, longest, at_once))
            except ModelError as error:
                return str(error)

        answer, ended = run_in_fork(counted_bytes, MAX_SECONDS, MAX_WORK)
        if not answer.isdigit():  # an error has a colon behind the path
            raise ModelError(answer or f"{path}: the model cannot be made: {ended}; take a smaller one")
        torch.manual_seed(seed)
        with memory_error_as_model_error(f"{path}: the model", "take a smaller one"):
            return make(device), int(answer)


def check_states(path: str, model: Any, num_slots: int, num_tokens: int) -> None:
    """ModelError where a model with states cannot run ``num_tokens`` of a request in MAX_SECONDS, or takes more than
    half of what is free for that or for the states of ``num_slots`` requests.

    Neither is bounded by its weights: states have any size, and a token is padded to a chunk. It runs in a copy of this
    process. On a device other than a CPU nothing is tried, since a copy has none.
    """
    if model.device.type != "cpu":
        return
    free = available_bytes("cpu") // 2

    def fault() -> str:
        torch.set_num_threads(1)
        try:
            with errors_as_model_errors(path), data_alone():
                with memory_error_as_model_error(f"{path}: a forward pass", "take a smaller model"):
                    taken = nbytes_of_states(model, num_tokens) * num_slots
                if taken > free:
                    raise ModelError(
                        f"{path}: the states of {counted(num_slots, 'request')} do not fit in memory: "
                        f"{taken / 2**30:.1f} GiB, more than half of what is free; give fewer requests (--max-num-seqs)"
                    )
        except ModelError as error:
            return str(error)
        return ""

    refusal, ended = run_in_fork(fault, MAX_SECONDS, free)
    if refusal or ended:
        raise ModelError(
            refusal or f"{path}: the model cannot run {counted(num_tokens, 'token')}: {ended}; take a smaller one"
        )


def _initialise(model: Any) -> None:
    """Compute what weights begin with, of which some classes make lists of numbers, for a model of the meta device."""
    try:
        model.initialize_weights()
    except (MemoryError, ModelError):
        raise
    except Exception as error:  # the numbers of a parameter are asked for, and it has none here
        if "allocate memory" in str(error):
            raise


def checked_fields(path: str, facts: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that say what a model is; ModelError for one that is not a number or a word."""
    return {name: _checked(path, name, value) for name, value in facts.items() if _is_of_shape(name)}


def _is_of_shape(name: str) -> bool:
    return not name.startswith("_") and name not in _OF_CODE and name not in _LABELS


def _checked(path: str, name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _checked(path, f"{name}.{key}", one) for key, one in value.items() if _is_of_shape(key)}
    if isinstance(value, list):
        return [_checked(path, name, one) for one in value]
    last = name.rpartition(".")[2]
    where = f"{path}: {one_line(name, 60)}"
    if last in ("dtype", "torch_dtype") or last.endswith("_dtype"):
        return _checked_dtype(where, value)
    if isinstance(value, str) and not _WORD.fullmatch(value):
        raise ModelError(
            f"{where}: {quoted_json(value)} is no word; a configuration is data, and what it names is not followed"
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ModelError(f"{where}: {quoted_json(value)} does not fit 64 bits")
    if _counts_layers(last) and isinstance(value, int | float) and value > MAX_LAYERS:
        raise ModelError(f"{where}: {quoted_json(value)} is more than {MAX_LAYERS}")
    return value


def _counts_layers(name: str) -> bool:
    """Whether a number of this name is one of layers, and not one that each of them has."""
    if "per_layer" in name or name.endswith("_theta"):
        return False
    return "layer" in name or name == "attention_types" or name.startswith("first_k_")


def _checked_dtype(where: str, value: Any) -> str | None:
    if value is None:
        return None
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in _DTYPES:
        raise ModelError(f"{where}: {quoted_json(value)} is not one of {', '.join(_DTYPES)}")
    return str(name)


def _known_kinds() -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING


def _copied(value: Any) -> Any:
    """The fields anew: configuration classes change what they are given."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


@contextmanager
def data_alone() -> Iterator[None]:
    """Inside, transformers reaches no network and prints nothing of what it thinks of a configuration."""
    from huggingface_hub import constants
    from transformers.utils import logging

    offline, verbosity = constants.HF_HUB_OFFLINE, logging.get_verbosity()
    constants.HF_HUB_OFFLINE = True
    logging.set_verbosity(CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(verbosity)


@contextmanager
def _counted(path: str, most: int) -> Iterator[None]:
    """Inside, a model may be made of MAX_MODULES modules and ``most`` bytes, tied ones twice; else ModelError."""
    from torch.nn.modules import module as hooks

    modules, numbers = 0, 0

    def count_module(*_: Any) -> None:
        nonlocal modules
        modules += 1
        if modules > MAX_MODULES:
            raise ModelError(f"{path}: the model has more than {MAX_MODULES} modules; take a smaller one")

    def count_tensor(_module: Any, _name: str, tensor: Any) -> None:
        nonlocal numbers
        numbers += 0 if tensor is None else tensor.numel() * tensor.element_size()
        if numbers > 2 * most:  # tied weights are registered twice; _checked_size counts them once
            raise _too_large(path, most)

    with ExitStack() as stack:
        for handle in (
            hooks.register_module_module_registration_hook(count_module),
            hooks.register_module_parameter_registration_hook(count_tensor),
            hooks.register_module_buffer_registration_hook(count_tensor),
        ):
            stack.callback(handle.remove)
        yield


def _checked_size(path: str, model: Any, most: int) -> int:
    """The bytes of a model's numbers, each counted once; ModelError where they are more than ``most``."""
    size: int = sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))
    if size > most:
        raise _too_large(path, most)
    return size


class _Largest(TorchDispatchMode):
    """Inside, ``nbytes`` becomes those of the largest tensor that torch makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                self.nbytes = max(self.nbytes, one.untyped_storage().nbytes())
        return made


class _NoAttention(Attender):
    """An Attender that gives zeros; ``num_heads`` becomes the most query heads of a layer."""

    num_heads = 0

    def attend(self, module: Any, query: Any, key: Any, value: Any, asked: Any) -> Any:
        self.num_heads = max(self.num_heads, query.shape[1])
        return query.new_zeros((*query.shape[:2], value.shape[2]))


def _checked_step(path: str, model: Any, most: int, longest: int, at_once: int) -> int:
    """The bytes that a model of the meta device takes beside its weights, for the check of ``longest`` tokens by its
    own attention, which compares all with all, or for ``at_once`` tokens of a step; ModelError where they are more
    than ``most``. Weights say little of it.

    They are those of TENSORS_AT_ONCE tensors as large as the largest. What cannot run without numbers is not counted.
    """
    attention, largest, num_tokens = _NoAttention(), _Largest(), max(longest, at_once)
    with suppress(Exception), using_attncore(model), attending_by(attention), torch.inference_mode(), largest:
        tokens = torch.zeros((1, num_tokens), dtype=torch.int64, device="meta")
        model(tokens, use_cache=False, logits_to_keep=1)
    pairs = attention.num_heads * longest**2 * int(model.dtype.itemsize)
    taken = TENSORS_AT_ONCE * max(largest.nbytes, pairs)
    if taken > most:
        which, advice = f"a request of {counted(longest, 'token')}", "or replay shorter requests"
        if pairs < largest.nbytes and longest < num_tokens:
            which, advice = f"a step of {counted(num_tokens, 'token')}", "or pass a smaller --max-num-batched-tokens"
        raise ModelError(
            f"{path}: {which} makes {TENSORS_AT_ONCE} tensors of {taken / TENSORS_AT_ONCE / 2**30:.1f} GiB, and the "
            f"model leaves {most / 2**30:.1f} GiB; take a smaller model, {advice}"
        )
    return taken


def _too_large(path: str, most: int) -> ModelError:
    free = f"{most / 2**30:.1f} GiB that are free"
    return ModelError(f"{path}: the model does not fit in memory: more than the {free}; take a smaller one")
