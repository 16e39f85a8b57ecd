"""attncore's names in vLLM: registered by vLLM's own plugins, pickled into other processes, refused with reasons."""

import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-engines has an environment with it")

import torch
from integrations.vllm import cpu_engine  # noqa: F401  it sets the environment up
from vllm.config import AttentionConfig
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from attncore.integrations.vllm import names, registration, versions

BASE = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}


@pytest.fixture(scope="module", autouse=True)
def _plugins():
    load_general_plugins()


def selected(name, **over):
    """What vLLM's selector for CUDA says to a name, as on an H100."""
    sys.modules.setdefault("vllm._C_stable_libtorch", SimpleNamespace())
    from vllm.platforms.cuda import CudaPlatformBase

    class Here(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(9, 0)

    return Here.get_attn_backend_cls(AttentionBackendEnum[name], AttentionSelectorConfig(**BASE | over), 32)


def test_vllm_loads_the_names_by_itself():
    assert "ATTNCORE_REFERENCE" in AttentionBackendEnum.__members__
    assert AttentionConfig(backend="attncore_reference").backend is AttentionBackendEnum["ATTNCORE_REFERENCE"]
    assert AttentionBackendEnum.CUSTOM.get_class().get_name() == "CUSTOM"


def test_registering_again_changes_nothing():
    before = dict(AttentionBackendEnum.__members__)
    registration.register()
    assert dict(AttentionBackendEnum.__members__) == before


@pytest.mark.parametrize("name", ["ATTNCORE_REFERENCE", "CUSTOM", "FLASH_ATTN"])
def test_members_reach_a_spawned_process(name):
    sent = pickle.dumps(AttentionBackendEnum[name])
    code = f"import pickle; one = pickle.loads({sent!r}); print(one.name, one.get_path() if one.value else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == name


def test_a_member_is_lost_without_our_reducer(monkeypatch):
    import copyreg

    monkeypatch.delitem(copyreg.dispatch_table, AttentionBackendEnum)
    sent = pickle.dumps(AttentionBackendEnum["ATTNCORE_REFERENCE"])
    done = subprocess.run([sys.executable, "-c", f"import pickle; pickle.loads({sent!r})"], capture_output=True)
    assert done.returncode != 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
def test_the_selector_takes_what_runs(kv_cache_dtype):
    found = selected("ATTNCORE_REFERENCE", kv_cache_dtype=kv_cache_dtype)
    assert found == f"{names.CLASSES}.ATTNCORE_REFERENCE"


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"use_mla": True}, "latent attention"),
        ({"use_dcp": True}, "decode context parallelism"),
        ({"use_pcp": True}, "prefill context parallelism"),
        ({"use_sparse": True}, "sparse attention"),
        ({"use_non_causal": True}, "not causal"),
        ({"attn_type": "encoder_decoder"}, "the type encoder_decoder"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype nvfp4"),
    ],
)
def test_the_selector_says_why_not(over, words):
    with pytest.raises(ValueError, match=words):
        selected("ATTNCORE_REFERENCE", **over)


def test_the_selector_has_the_reasons_of_a_backend_that_cannot_run():
    with pytest.raises(ValueError, match=r"attncore: flashinfer: \w"):
        selected("ATTNCORE_FLASHINFER")


def test_what_a_later_vllm_asks_is_not_promised():
    made = AttentionBackendEnum["ATTNCORE_REFERENCE"].get_class()
    facts = {**BASE, "use_mla": False, "has_sink": False}
    assert made.validate_configuration(**facts) == []
    assert made.validate_configuration(**facts, use_tomorrow=True) == [
        "attncore: vLLM asks for use_tomorrow, which this bridge does not know"
    ]


def test_another_version_is_refused_where_its_name_is_used(monkeypatch):
    from attncore.integrations.vllm import backend_classes

    monkeypatch.setattr(backend_classes, "installed_version", lambda: "0.45.1")
    with pytest.raises(ValueError, match=r"vLLM 0\.45\.1 is installed, .* was written for 0\.32\.x, 0\.33\.x; install"):
        backend_classes._made("ATTNCORE_REFERENCE")


def test_a_broken_registry_stops_nothing(monkeypatch, caplog):
    def broken():
        raise RuntimeError("boom")

    monkeypatch.setattr(registration, "_by_name", broken)
    registration.register()
    assert "boom" in caplog.text


def test_the_installed_version_is_one_of_ours():
    assert versions.version_problem(versions.installed_version()) is None
