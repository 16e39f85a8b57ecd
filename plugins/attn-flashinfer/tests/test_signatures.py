"""The stand-in has the signatures of the installed FlashInfer: parameters by name, order, kind and default."""

from __future__ import annotations

import inspect
from typing import Any

import flashinfer_standin as standin
import pytest

flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")


def _signature(function: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [(one.name, one.kind, one.default) for one in found]


@pytest.mark.parametrize("method", ["__init__", "plan", "run", "workspace_size", "reset_workspace_buffer"])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_wrappers(kind: str, method: str) -> None:
    real = {
        "decode": flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper,
        "prefill": flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper,
    }[kind]
    ours = {"decode": standin.Decode, "prefill": standin.Prefill}[kind]
    assert _signature(getattr(ours, method)) == _signature(getattr(real, method))


def test_keywords_of_a_decode_plan() -> None:
    real = flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper._plan_impl
    assert _signature(standin.Decode._plan) == _signature(real)


@pytest.mark.parametrize("name", ["fast_decode_plan", "xqa_batch_decode_with_kv_cache"])
def test_functions_of_decode(name: str) -> None:
    assert _signature(getattr(standin, name)) == _signature(getattr(flashinfer.decode, name))


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_the_wrapper_of_latent_attention(method: str) -> None:
    real = getattr(flashinfer.mla.BatchMLAPagedAttentionWrapper, method)
    assert _signature(getattr(standin.Latent, method)) == _signature(real)


def test_rows_of_plans_of_latent_attention() -> None:
    assert _signature(standin.csr) == _signature(flashinfer.mla.MLAPlanMetadata.csr)


def test_merge_state() -> None:
    assert _signature(standin.merge_state_in_place) == _signature(flashinfer.cascade.merge_state_in_place)
