"""Which variant is taken on which machine, and why not the others; nothing of an AMD GPU is at hand."""

import pickle
import re
import sys
import tomllib
from pathlib import Path

import pytest
from attn_rocm import settings, spec, tiles

import attncore
from attncore.errors import NoBackendError

HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", "backend": "rocm"}
LIBRARIES = {"torch": "2.11.0", "triton": "3.6.0", "amd-aiter": "", "flash-attn": "", "pytorch-triton-rocm": ""}
CDNA, RDNA = ("gfx90a", "gfx942", "gfx950"), ("gfx1100", "gfx1201")


def select(device, packages=(), kernel=None, **fields):
    host = attncore.Host.assume(device, packages=LIBRARIES | dict(packages))
    options = {"rocm": {"kernel": kernel}} if kernel else {}
    return attncore.select(**{**HEADS, "options": options, **fields}, host=host)


def refused(device, packages=(), kernel=None, **fields):
    """The reasons, as text, of a request that nothing serves."""
    with pytest.raises(NoBackendError) as caught:
        select(device, packages, kernel, **fields)
    return str(caught.value)


def over(choice):
    """Variant -> why it was passed over."""
    return {name: " ".join(map(str, reasons)) for name, reasons in choice.candidate.passed_over}


@pytest.mark.parametrize("device", [*CDNA, *RDNA])
def test_every_architecture_has_the_plugins_own_kernels(device):
    choice = select(device, cuda_graph="always", kv_cache_dtype="fp8", features=("kv_scales", "lse", "encoder"))
    assert (choice.variant, choice.block_size) == ("triton", 16)
    assert set(over(choice)) == {"aiter", "aiter_paged", "ck"}


@pytest.mark.parametrize("device", ["gfx1030", "gfx906", "sm_70", "cpu"])
def test_another_device_is_a_reason(device, monkeypatch):
    monkeypatch.delenv(settings.DEV_DEVICE, raising=False)
    text = refused(device)
    name = attncore.Host.assume(device).device
    assert f"device {name} not supported by" in text
    assert "supported: cuda:sm_75, cuda:sm_80, " in text
    assert "cuda:sm_89+, rocm:gfx908, rocm:gfx90a, rocm:gfx942, rocm:gfx950, rocm:gfx110*, " in text
    assert "supported by torch" not in text
    assert f"device {name} not supported by variant" not in text
    assert "taken only where" not in text, "the device is reason enough"


@pytest.mark.parametrize("device", [*CDNA, *RDNA])
def test_aiter_where_it_is_installed(device):
    choice = select(device, {"amd-aiter": "0.1.9"})
    if device in ("gfx942", "gfx950"):
        assert choice.variant == "aiter"
        assert choice.spec.finite_tail
    else:
        assert choice.variant == "triton"
        assert f"device rocm:{device} not supported by variant aiter (amd-aiter 0.1.9)" in over(choice)["aiter"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"head_size": 80}, "head_size 80 not supported by variant aiter (amd-aiter"),
        ({"block_size": 24}, "block_size 24 not supported by variant aiter (amd-aiter"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8_e4m3 not supported by variant aiter (amd-aiter"),
        (
            {"features": ("lse",)},
            "lse not supported by variant aiter (amd-aiter 0.1.9): aiter's unified_attention returns the output",
        ),
        (
            {"features": ("encoder",)},
            "encoder not supported by variant aiter (amd-aiter 0.1.9): aiter's unified_attention is causal",
        ),
        ({"dtype": "float32"}, "dtype float32 not supported by variant aiter (amd-aiter"),
    ],
)
def test_what_aiter_cannot_do_goes_to_the_plugins_own_kernels(fields, why):
    choice = select("gfx942", {"amd-aiter": "0.1.9"}, **fields)
    assert choice.variant == "triton"
    assert why in over(choice)["aiter"]


def test_an_old_aiter_is_a_reason():
    choice = select("gfx942", {"amd-aiter": "0.1.3"})
    assert choice.variant == "triton"
    assert "amd-aiter 0.1.3 is installed; attn-rocm 0.1.0 needs amd-aiter>=0.1.7" in over(choice)["aiter"]


@pytest.mark.parametrize("raised", ["RuntimeError('no ROCm here')", "OSError('libamdhip64.so')", "SystemExit(1)"])
def test_an_aiter_that_cannot_be_imported_is_a_reason(raised, tmp_path, monkeypatch):
    """Tried where the host is this machine: an assumed one may be anywhere."""
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec.import_problem.cache_clear()
    host = attncore.Host(device="rocm:gfx942", packages=LIBRARIES | {"amd-aiter": "0.1.9"})
    try:
        choice = attncore.select(**HEADS, host=host)
    finally:
        spec.import_problem.cache_clear()
        sys.modules.pop("aiter", None)
    assert choice.variant == "triton"
    assert f"amd-aiter 0.1.9 cannot be imported: {raised.partition('(')[0]}" in over(choice)["aiter"]
    assert "not its variant aiter: amd-aiter 0.1.9 cannot be imported" in choice.explain()


@pytest.mark.parametrize("device", CDNA)
def test_ck_where_it_is_asked_for(device):
    packages = {"flash-attn": "2.8.3"}
    assert "ask for kernel ck" in over(select(device, packages))["ck"]
    choice = select(device, packages, kernel="ck")
    assert choice.variant == "ck"
    assert "the request's option kernel asks for ck" in over(choice)["aiter"] or device == "gfx90a"
    assert "install flash-attn" in refused(device, kernel="ck")


def test_ck_needs_cdna():
    text = refused("gfx1100", {"flash-attn": "2.8.3"}, kernel="ck")
    assert re.search(r"device rocm:gfx1100 not supported by variants [^;]*\bck \(flash-attn 2.8.3\)", text)


def test_the_build_that_ignores_block_tables_is_refused(monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")
    host = attncore.Host(device="rocm:gfx942", packages=LIBRARIES | {"flash-attn": "2.8.3"})
    with pytest.raises(NoBackendError, match="ignores block tables in silence"):
        attncore.select(**HEADS, options={"rocm": {"kernel": "ck"}}, host=host)


def test_block_ids_and_pages_of_aiters_paged_kernel():
    packages = {"amd-aiter": "0.1.9"}
    choice = select("gfx942", packages, kernel="aiter_paged", num_blocks=65536)
    assert (choice.variant, choice.spec.max_block_id) == ("aiter_paged", 65535)
    assert "num_blocks 65537 not supported" in refused("gfx942", packages, kernel="aiter_paged", num_blocks=65537)
    assert "block_size 64 not supported" in refused("gfx942", packages, kernel="aiter_paged", block_size=64)
    assert "query heads per key/value head: 32" in refused("gfx942", packages, kernel="aiter_paged", num_kv_heads=1)
    assert "max_model_len 65536" in refused("gfx942", packages, kernel="aiter_paged", max_model_len=65536)


def test_without_triton_there_is_torch():
    packages = {"triton": ""}
    choice = select("gfx1100", packages)
    assert (choice.variant, choice.spec.cuda_graph) == ("sdpa", "never")
    assert "triton is not installed" in over(choice)["triton"]
    text = refused("gfx1100", packages, logits_soft_cap=30.0)
    assert "torch's scaled_dot_product_attention has none" in text
    assert select("gfx1100", {**packages, "pytorch-triton-rocm": "3.6.0"}).variant == "triton"
    assert "torch is not installed" in refused("gfx1100", {"torch": ""})


@pytest.mark.parametrize("name", ["triton", "pytorch-triton-rocm", "triton-rocm"])
@pytest.mark.parametrize("version", ["2.3.1", "3.2.0", "3.5.1+rocm7.1", "3.5.1.post1"])
def test_the_kernels_are_not_taken_with_a_triton_that_fails_to_compile_some(name, version):
    packages = {"triton": "", name: version}
    choice = select("gfx942", packages)
    assert choice.variant == "sdpa"
    said = f"{name} {version} is installed; attn-rocm needs triton>=3.6; take a torch that brings triton>=3.6"
    assert over(choice)["triton"].startswith(said)
    assert "; install triton" in refused("sm_90", packages)
    # aiter's variants run the plugin's own kernels where aiter has none.
    assert said in over(select("gfx942", {**packages, "amd-aiter": "0.1.9"}))["aiter"]


@pytest.mark.parametrize("version", ["3.6.0", "3.10.0", "4.0.0", "3.9.0a0+git1", "unknown"])
def test_the_kernels_are_taken_with_a_later_triton(version):
    assert select("gfx942", {"triton": version}).variant == "triton"


def test_the_packages_bound_of_triton_is_the_specs():
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        bound = f"triton>={'.'.join(map(str, spec.OLDEST_TRITON))}"
        assert bound in tomllib.load(file)["project"]["dependencies"]
    assert f"attn-rocm needs {bound}" in over(select("gfx942", {"triton": ""}))["triton"]


def test_a_kernel_that_is_asked_for():
    assert "Triton is there" not in over(select("gfx942", kernel="sdpa")).get("sdpa", "")
    assert select("gfx942", kernel="sdpa").variant == "sdpa"
    choice = select("gfx942", {"amd-aiter": "0.1.9"}, kernel="triton")
    assert choice.variant == "triton"
    assert "option 'kernel': 'cutlass' is not one of" in refused("gfx942", kernel="cutlass")


def test_the_environment_variable_is_a_default(monkeypatch):
    monkeypatch.setenv(settings.KERNEL, "sdpa")
    assert select("gfx942").variant == "sdpa"
    assert "environment variable ATTNCORE_ROCM_KERNEL asks for sdpa" in over(select("gfx942"))["triton"]
    assert select("gfx942", kernel="triton").variant == "triton"


def test_the_spec_declares_every_variable_that_the_plugin_reads():
    sources = "".join(path.read_text() for path in Path(spec.__file__).parent.glob("**/*.py"))
    assert set(re.findall("ATTNCORE_ROCM_[A-Z_]+", sources)) == spec.make_spec().variables.keys()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        (settings.KERNEL, "fast", "ATTNCORE_ROCM_KERNEL: 'fast' is not one of auto, aiter"),
        (settings.DEV_DEVICE, "tpu", "ATTNCORE_ROCM_DEV_DEVICE: 'tpu' is not one of cuda, cpu"),
        (settings.DEV_DEVICE, "cpu", "set TRITON_INTERPRET=1 as well"),
    ],
)
def test_bad_environment_variables(name, value, why, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name) as caught:
        spec.make_spec()
    assert why in str(caught.value)


def test_a_request_that_forbids_compilation():
    assert "compiles kernels at first use" in refused("gfx942", allow_compile=False)
    assert select("gfx942", kernel="sdpa", allow_compile=False).variant == "sdpa"


def test_splits():
    assert tiles.num_splits(8, 304, 8000, 64) == 16  # bounded by what the programs leave idle, and by four tiles a part
    assert tiles.num_splits(8, 304, 500, 64) == 1
    assert tiles.num_splits(8, 304, 520, 64) == 2
    assert tiles.num_splits(8, 304, 10**6, 64) == tiles.MAX_SPLITS
    assert tiles.num_splits(5000, 304, 10**6, 64) == 1


@pytest.mark.parametrize("arch", [*tiles.AMD, *tiles.NVIDIA])
def test_tiles(arch):
    """At least 16 rows, powers of two; a group of heads, or even parts of it; workgroups of 256 threads, or of 512,
    on AMD."""
    for group in (1, 3, 8, 40, 71):
        for size, itemsize in ((16, 2), (128, 2), (256, 2), (256, 4)):
            for decode in (True, False):
                tile = tiles.tile(arch, group=group, padded_size=size, itemsize=itemsize, decode=decode)
                heads = tile.heads(group)
                assert tile.rows >= max(16, heads)
                assert heads == group or tile.rows < group <= heads * -(-group // heads) < group + heads
                assert {number & (number - 1) for number in tile._replace(stages=1)} == {0}
                if arch in tiles.AMD:
                    assert tile.warps * tiles.AMD[arch].wavefront == (512 if tile.slice else 256)


def test_the_doctor(monkeypatch):
    from attn_rocm import attncore_doctor

    monkeypatch.setenv(settings.KERNEL, "triton")
    told = attncore_doctor(host=attncore.Host.assume("gfx942", packages=LIBRARIES))
    assert told["architecture"].startswith("gfx942: wavefronts of 64, 64 KiB of local memory")
    assert told["triton"] == "3.6.0"
    assert told[settings.KERNEL] == "triton"
    assert "import aiter" not in told
    assert attncore_doctor(host=attncore.Host.assume("gfx1030"))["architecture"].startswith(
        "gfx1030: not one of gfx908, gfx90a"
    )


def test_a_choice_pickles():
    choice = select("rocm:gfx942")
    assert pickle.loads(pickle.dumps(choice)).explain() == choice.explain()
