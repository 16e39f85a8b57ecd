"""What a library can do here, found by calling it: importing it tells nothing of what a build leaves out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from attn_flash import generation2, generation3, generation4, probe_results
from attn_flash.generations import MODULES
from attn_flash.latent_layer import LatentLayer
from attn_flash.probe_results import HEAD_SIZES, ProbeResult
from attn_flash.segments import packed_segment
from attn_flash.spec import LATENT_ROW

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FEATURES: dict[str, dict[str, Any]] = {
    "sliding_window": {"window_size": (2, 0)},
    "logits_soft_cap": {"softcap": 20.0},
    "alibi": {"alibi_slopes": None},
}
"""Feature -> what a call of generation 2 takes for it (slopes are made on the device)."""
FEATURES3: dict[str, dict[str, Any]] = {
    "sliding_window": {"sliding_window": 3},
    "logits_soft_cap": {"logits_soft_cap": 20.0},
    "sinks": {"sinks": True},
}
"""Feature -> what a layer of generation 3 takes for it (sinks are made on the device)."""


def found(generation: str, device: torch.device) -> ProbeResult:
    """The findings that are kept, or new ones, which are then kept. Waits for the device where it calls."""
    return probe_results.read(generation, _name(device)) or again(generation, device)


def again(generation: str, device: torch.device) -> ProbeResult:
    """Call the library, and keep what comes of it. Where the device is full: torch.OutOfMemoryError, nothing kept."""
    library, name = probe_results.library(generation) or f"generation {generation}", _name(device)
    lasting = True
    try:
        if generation == "2":
            lacks, synchronises = generation2_lacks(generation2.load(), device)
            made = ProbeResult(library, name, lacks=lacks, synchronises=synchronises)
        elif generation == "4":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler
                _settled(device, partial(_decode4, generation4.load(), device))
            made = ProbeResult(library, name)
        else:
            made = ProbeResult(library, name, lacks=generation3_lacks(MODULES[generation].load(), device))
    except torch.OutOfMemoryError:  # says nothing of the library
        raise
    except Exception as error:  # whatever a library raises when it is imported or called is the finding
        made, lasting = ProbeResult(library, name, fails=_words(error)), _of_the_library(error)
    probe_results.write(generation, made, lasting=lasting)
    return made


def generation2_lacks(functions: Any, device: torch.device) -> tuple[dict[str, str], bool]:
    """What ``functions`` leave out, with their words, and whether the decode function waits for the device.

    Everything by both functions, a decode and a prompt, whose kernels are built apart. RuntimeError where nothing
    works.
    """
    lacks, dtype, size = _lacks([partial(call, functions, device) for call in (_decode2, _varlen2)], FEATURES, device)
    if "alibi" in lacks:
        lacks["alibi_standard"] = lacks["alibi"]
    try:
        with _no_synchronisation(device):
            _decode2(functions, device, dtype, size)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return lacks, True
    return lacks, False


def generation3_lacks(library: Any, device: torch.device) -> dict[str, str]:
    """What a build of generation 3 leaves out, with its words: asked of a decode and of a prompt. RuntimeError where
    nothing works.
    """
    features = (
        FEATURES3 if library.last(None, None) else {name: FEATURES3[name] for name in FEATURES3 if name != "sinks"}
    )
    calls = [partial(_attend3, library, device, paged) for paged in (True, False)]
    lacks, dtype, size = _lacks(calls, features, device)
    fp8 = partial(_attend3, library, device, True, dtype, size, cache_dtype=generation3.FP8)
    if problem := _problem(device, fp8):
        lacks["kv_cache_dtype fp8_e4m3"] = problem
    for paged in (True, False):
        if problem := _problem(device, partial(_attend3, library, device, paged, dtype, LATENT_ROW, latent=True)):
            lacks[probe_results.LATENT] = problem
    return lacks


def _lacks(
    calls: Sequence[Callable[..., None]], features: Mapping[str, dict[str, Any]], device: torch.device
) -> tuple[dict[str, str], torch.dtype, int]:
    """What ``calls`` (dtype, head size, and what ``features`` give) fail with, and a dtype and a size that run."""

    def first_problem(*asked: Any) -> str:
        return next(filter(None, (_problem(device, partial(call, *asked)) for call in calls)), "")

    problems = {name: {size: first_problem(dtype, size) for size in HEAD_SIZES} for name, dtype in DTYPES.items()}
    lacks = {}
    working = [name for name in DTYPES if not all(problems[name].values())]
    if not working:
        raise RuntimeError(problems["bfloat16"][128])
    for name in DTYPES.keys() - set(working):
        lacks[f"dtype {name}"] = problems[name][128]
    for size in HEAD_SIZES:
        if problem := next(filter(None, (problems[name][size] for name in working)), ""):
            lacks[f"head_size {size}"] = problem
    sizes = [size for size in (128, 64, *HEAD_SIZES) if f"head_size {size}" not in lacks]
    dtype, size = DTYPES[working[0]], sizes[0]
    for feature, given in features.items():
        for call in calls:
            if problem := _problem(device, partial(call, dtype, size, **given)):
                lacks[feature] = problem
    return lacks, dtype, size


def _decode2(functions: Any, device: torch.device, dtype: torch.dtype, size: int, **given: Any) -> None:
    query, cache, lengths, table = _tensors(device, dtype, size, 256)
    functions.flash_attn_with_kvcache(
        query, cache, cache, cache_seqlens=lengths, block_table=table, causal=True, **_slopes(given, device)
    )


def _varlen2(functions: Any, device: torch.device, dtype: torch.dtype, size: int, **given: Any) -> None:
    query, cache, lengths, _ = _tensors(device, dtype, size, 256)
    starts, key = torch.cat((lengths.new_zeros(1), lengths // lengths)), cache[0, :1]
    functions.flash_attn_varlen_func(query[0], key, key, starts, starts, 2, 2, causal=True, **_slopes(given, device))


def _attend3(
    library: Any, device: torch.device, paged: bool, dtype: torch.dtype, size: int, *,
    cache_dtype: torch.dtype | None = None, sinks: bool = False, latent: bool = False, **features: Any,
) -> None:  # fmt: skip
    """A token over three keys in a page, or over itself."""
    query, cache, lengths, table = _tensors(device, dtype, size, 16)
    starts = torch.cat((lengths.new_zeros(1), lengths // lengths))
    given = {"sliding_window": None, "logits_soft_cap": None, **features}
    kind = partial(LatentLayer, num_heads=1, cores=1) if latent else generation3.Layer
    float32: dict[str, Any] = {"dtype": torch.float32, "device": device}  # the default may be that of a model
    layer = kind(
        library, scale=1.0, alibi_slopes=None, sinks=torch.zeros(1, **float32) if sinks else None, causal=True,
        device=str(device), descales=torch.ones(3, 1, **float32), **given,
    )  # fmt: skip
    segment, key = packed_segment(starts, 1, 1, 1), query[0]
    caches = None
    if paged:
        segment = segment._replace(entry="paged", max_seq_len=3, lengths=lengths, block_table=table)
        caches = (cache.to(cache_dtype or dtype),) * 2
    layer.bound(segment, layer.arguments(segment), caches)(key, key, key)


def _decode4(functions: Any, device: torch.device) -> None:
    query, cache, lengths, table = _tensors(device, torch.bfloat16, 128, 128)
    functions.flash_attn_varlen_func(
        query, cache, cache, seqused_k=lengths, page_table=table, max_seqlen_q=1, max_seqlen_k=128, causal=True
    )


def _tensors(device: torch.device, dtype: torch.dtype, size: int, page: int) -> tuple[torch.Tensor, ...]:
    """A query, a cache, lengths and a table of one request of three tokens."""
    lengths = torch.full((1,), 3, dtype=torch.int32, device=device)
    query = torch.zeros((1, 1, 1, size), dtype=dtype, device=device)
    cache = torch.zeros((1, page, 1, size), dtype=dtype, device=device)
    return query, cache, lengths, torch.zeros((1, 1), dtype=torch.int32, device=device)


def _slopes(given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    if "alibi_slopes" not in given:
        return given
    return {**given, "alibi_slopes": torch.full((1,), 0.5, dtype=torch.float32, device=device)}


def _problem(device: torch.device, call: Callable[[], None]) -> str:
    """Why a call fails, empty where it works. A failure that stops the device is raised: nothing works after it. So is
    a lack of memory, which is not the build's.
    """
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _settled(device)
        return _words(error)
    _settled(device)
    return ""


def _of_the_library(error: Exception) -> bool:
    """Whether a failure is of the library on such a device, and not of something else on this machine or in this
    process: a library that does not load, a device that another call has stopped, a full disk.
    """
    words = str(error).lower()
    return not isinstance(error, ImportError | OSError) and any(
        said in words for said in ("support", "no kernel image", "invalid device function", "left out")
    )


def _settled(device: torch.device, call: Callable[[], None] | None = None) -> None:
    if call is not None:
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _no_synchronisation(device: torch.device) -> Iterator[None]:
    """torch's check: a call that waits for the device is an error."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype, says torch
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
