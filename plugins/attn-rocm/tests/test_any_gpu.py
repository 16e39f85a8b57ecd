"""Which variant serves which GPU, NVIDIA's too, in which dtypes, and behind whom."""

import json
import re

import pytest
import torch
from attn_rocm import base, settings, spec, tiles

import attncore
from attncore import BackendConfig
from attncore.cli import main
from attncore.errors import NoBackendError

HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
PACKAGES = {"torch": "2.11.0", "triton": "3.6.0", "amd-aiter": "", "flash-attn": "", "pytorch-triton-rocm": ""}
LIBRARIES = ["flash-attn-4==4.0.0b36", "flash-attn==2.8.3", "flashinfer-python==0.7.2.post1"]
VENDORS = {"sm_80", "sm_86", "sm_90", "sm_100", "sm_120"}


@pytest.fixture(autouse=True)
def _no_developer(monkeypatch):
    for name in (settings.DEV_DEVICE, "ATTNCORE_BACKEND"):
        monkeypatch.delenv(name, raising=False)


def select(device, **fields):
    host = attncore.Host.assume(device, packages=PACKAGES)
    return attncore.select(**{**HEADS, "dtype": "float16", "backend": "rocm", **fields}, host=host)


def refused(device, **fields):
    with pytest.raises(NoBackendError) as caught:
        select(device, **fields)
    return str(caught.value)


def explained(capsys, *words):
    code = main(["explain", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("device", ["sm_75", "sm_86", "sm_89", "sm_100", "sm_120", "gfx908", "gfx1151", "gfx1200"])
def test_explain_shows_a_gpu_backend(device, capsys, monkeypatch):
    """Of the plugins that need no vendor's library, and for a model of which nothing is said."""
    monkeypatch.setenv("ATTNCORE_PLUGINS", "reference,rocm")
    words = [f"--assume-package={name}=={version}" for name, version in PACKAGES.items()]
    code, report = explained(capsys, "--assume", device, *words)
    assert (code, report["chosen"]["name"]) == (0, "rocm")
    assert report["chosen"]["variant"].startswith("triton")
    assert report["request"]["dtype"] == ("float16" if device == "sm_75" else "bfloat16")


@pytest.mark.parametrize("device", sorted(VENDORS))
def test_the_libraries_for_nvidia_come_first(device, capsys, monkeypatch):
    monkeypatch.setenv("ATTNCORE_PLUGINS", "reference,rocm,flash,flashinfer")
    packages = [*LIBRARIES, *(f"{name}=={version}" for name, version in PACKAGES.items() if name != "flash-attn")]
    _, report = explained(capsys, "--assume", device, *(f"--assume-package={one}" for one in packages))
    names = [row["name"] for row in report["backends"] if row["usable"]]
    assert names[-2:] == ["rocm", "reference"]
    assert len(names) > 2


@pytest.mark.parametrize(
    ("device", "variant"),
    [
        ("sm_75", "triton_no_bf16"), ("sm_80", "triton_no_fp8"), ("sm_86", "triton_no_fp8"), ("sm_87", "triton_no_fp8"),
        ("sm_88", "triton_no_fp8"), ("sm_89", "triton"), ("sm_90", "triton"), ("sm_103", "triton"),
        ("sm_121", "triton"), ("gfx908", "triton"), ("gfx1103", "triton"), ("gfx1151", "triton"), ("gfx1200", "triton"),
    ],
)  # fmt: skip
def test_each_gpu_has_the_dtypes_that_triton_compiles_for_it(device, variant):
    choice = select(device, cuda_graph="always", features=("lse", "encoder", "encoder_decoder"), head_size=256)
    assert (choice.variant, choice.block_size) == (variant, 16)
    assert select(device, dtype="float32").variant == variant
    if variant == "triton_no_bf16":
        assert "dtype bfloat16 not supported by variant triton_no_bf16" in refused(device, dtype="bfloat16")
    else:
        assert select(device, dtype="bfloat16").variant == variant
    for fp8 in ("fp8_e4m3", "fp8_e5m2"):
        if variant == "triton":
            assert select(device, kv_cache_dtype=fp8, features=("kv_scales_per_head",)).variant == variant
        else:
            text = refused(device, kv_cache_dtype=fp8)
            assert re.search(rf"kv_cache_dtype {fp8} not supported by variants [^;]*\b{variant}\b", text)


def test_the_option_triton_asks_for_each_of_its_forms():
    options = {"rocm": {"kernel": "triton"}}
    assert select("sm_86", options=options).variant == "triton_no_fp8"
    assert "variant triton_no_bf16: the request's option kernel asks for aiter" in refused(
        "sm_75", options={"rocm": {"kernel": "aiter"}}
    )
    bare = attncore.Host.assume("sm_86", packages={**PACKAGES, "triton": ""})
    with pytest.raises(NoBackendError, match=r"cuda:sm_75, cuda:sm_89\+, rocm:.*; install triton"):
        attncore.select(**HEADS, dtype="float16", backend="rocm", host=bare)


@pytest.mark.parametrize(
    ("major", "minor", "name"), [(7, 5, "sm_75"), (8, 6, "sm_86"), (9, 0, "sm_90"), (12, 1, "sm_121"), (7, 0, None)]
)
def test_the_device_is_found_by_its_capability(major, minor, name, monkeypatch):
    facts = type("Facts", (), {"major": major, "minor": minor, "multi_processor_count": 34})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.version, "hip", None)
    if name is None:
        with pytest.raises(ValueError, match=r"device: cuda:0 is a sm_70; supported: gfx908, .*, sm_75 and later"):
            base.architecture("cuda:0")
        return
    assert base.architecture("cuda:0") == (name, 34)
    form = dict(spec.make_spec().by_variant)["triton_no_fp8"]
    config = BackendConfig(
        8, 2, 64, "float16", 16, device="cuda:0", variant="triton_no_fp8", spec=form, options={"kernel": "triton"}
    )
    from attn_rocm.triton_backend import TritonBackend

    assert TritonBackend(config).launcher.arch == name


def test_the_devices_of_the_spec_are_those_of_the_tiles():
    """A GPU that a form names has tiles, and one that has tiles is named by one form."""
    every = dict(spec.make_spec().by_variant)
    forms = [every[name] for name in ("triton", *settings.FORMS)]
    for device in (
        *(f"rocm:{name.replace('*', '0')}" for name in tiles.AMD),
        *(f"cuda:{name}" for name in tiles.NVIDIA),
    ):
        assert tiles.known(device.partition(":")[2]) is not None
        kind, _, arch = device.partition(":")
        named = [form for form in forms if _names(form.devices, kind, arch)]
        assert len(named) == 1, device


def _names(devices, kind, arch):
    number = tiles.capability(arch)
    return any(
        pattern == f"{kind}:{arch}"
        or (pattern.endswith("*") and f"{kind}:{arch}".startswith(pattern[:-1]))
        or (pattern == "cuda:sm_89+" and number is not None and number >= 89)
        for pattern in devices
    )
