"""The cases of vLLM's own test of its attention backends, from its source distribution, with attncore's names.

VLLM_TESTS names the unpacked source distribution. Layers are made before the builder here, as vLLM makes them; that
test makes them after it.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-engines has an environment with it")
SOURCES = os.environ.get("VLLM_TESTS", "")
if not Path(SOURCES, "tests/v1/attention/test_attention_backends.py").is_file():
    pytest.skip("VLLM_TESTS names no source distribution of vLLM", allow_module_level=True)

import torch  # noqa: E402
from integrations.vllm import cpu_engine  # noqa: E402, F401  it sets the environment up

# Their package is named "tests", as pytest names the folder of this file.
_ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "tests"}
sys.path.insert(0, SOURCES)
from tests.v1.attention import test_attention_backends as theirs  # noqa: E402

sys.path.remove(SOURCES)
sys.modules.update(_ours)
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheLayout  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128,
    "max_position_embeddings": 8192, "torch_dtype": "float32",
}  # fmt: skip
BATCHES = sorted(name for name in theirs.BATCH_SPECS if not name.startswith("large"))  # those take minutes on a CPU


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    load_general_plugins()
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def run(backend, spec, layer_names, vllm_config, device, given, query, key, value, kv_cache, **more):
    """``run_attention_backend`` in the order of an engine: layers, then their builder."""
    found, config = backend.get_class(), vllm_config.model_config
    with set_current_vllm_config(vllm_config):
        impl = found.get_impl_cls()(
            query.shape[1], query.shape[2], query.shape[2] ** -0.5, key.shape[1],
            sliding_window=more["sliding_window"], kv_cache_dtype=more["kv_cache_dtype"], attn_type=more["attn_type"],
            sinks=more["sinks"],
        )  # fmt: skip
    layer = SimpleNamespace(impl=impl, _k_scale_float=more["layer_k_scale"], _v_scale_float=more["layer_v_scale"])
    vllm_config.compilation_config.static_forward_context = dict.fromkeys(layer_names, layer)
    config.dtype = query.dtype
    metadata = found.get_builder_cls()(spec, layer_names, vllm_config, device).build(0, given)
    return impl.forward(layer, query, key, value, kv_cache, metadata, torch.empty_like(query))


def causal(batch, head, row, column, *, context_len):
    return row + context_len >= column


def check(model, batch, monkeypatch, **more):
    monkeypatch.setattr(theirs, "run_attention_backend", run)
    monkeypatch.setattr(theirs, "DEVICE_TYPE", "cpu")
    mask = more.pop("mask", causal)
    names = [AttentionBackendEnum["ATTNCORE_REFERENCE"], AttentionBackendEnum.CUSTOM]
    theirs._test_backend_correctness(
        theirs.BATCH_SPECS[batch], str(model), names, mask, atol=1e-4, rtol=1e-4, model_dtype=torch.float32, **more
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.LBHNC], ids=lambda one: one.name)
def test_causal(model, batch, layout, monkeypatch):
    check(model, batch, monkeypatch, layout=layout)


@pytest.mark.parametrize("batch", ["small_decode", "mixed_small"])
def test_sinks(model, batch, monkeypatch):
    check(model, batch, monkeypatch, use_sinks=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_of_a_rank(model, ranks, monkeypatch):
    check(model, "mixed_small", monkeypatch, tensor_parallel_size=ranks)


def test_another_mask_is_seen(model, monkeypatch):
    def all_but_the_first(batch, head, row, column, *, context_len):
        return (row + context_len >= column) & (column > 0)

    with pytest.raises(AssertionError, match="differs from SDPA baseline"):
        check(model, "mixed_small", monkeypatch, mask=all_but_the_first)
