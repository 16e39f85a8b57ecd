"""Every kernel for every architecture, by the compiler alone: matrix instructions, scratch and local memory."""

import pytest
from attn_rocm import crosscompile, tiles

KIND = {64: "v_mfma", 32: "v_wmma"}
TENSOR_CORES = ("wgmma.mma", "mma.sync", "tcgen05.mma")
QUICK = "decode fp16, split keys"
"""What ``make test`` compiles for the architectures that come after the first."""


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    """What is compiled is compiled now."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


def cases():
    for name in crosscompile.names():
        for arch in crosscompile.ARCHITECTURES:
            if name in crosscompile.names(arch):
                quick = arch in crosscompile.FIRST or name == QUICK
                yield pytest.param(name, arch, marks=() if quick else pytest.mark.slow, id=f"{name}-{arch}")


def spilled(name, arch):
    """Bytes of a thread that may be spilled to memory."""
    if arch.startswith("gfx"):
        return 0
    return 1024 if "fp32" in name else 64  # without tensor cores every sum is a register


@pytest.mark.parametrize(("name", "arch"), list(cases()))
def test_compiled(name, arch):
    found = crosscompile.compile_kernel(name, arch)
    assert found.binary_bytes > 0
    known = tiles.architecture(arch)
    assert found.lds_bytes <= known.lds_bytes
    assert found.scratch_bytes <= spilled(name, arch)
    products = name not in crosscompile.OTHERS
    if arch.startswith("sm_"):
        cores = products and "fp32" not in name and arch != "sm_75"  # for which Triton compiles without them
        assert bool(found.matrix) == cores
        assert all(word.startswith(TENSOR_CORES) for word in found.matrix)
        return
    if products and ("fp32" not in name or known.wavefront == 64):  # RDNA has no matrix instruction for float32
        assert found.matrix
        assert all(word.startswith(KIND[known.wavefront]) for word in found.matrix)
        assert ("bf16" in found.matrix[0]) == ("bf16" in name)
    assert found.spills == 0
    if found.is_decode:
        small = crosscompile.compile_kernel(name, arch, small_cache=True)
        assert small.scratch_bytes == small.spills == 0
        assert small.lds_bytes <= known.lds_bytes
        assert small.matrix == found.matrix


def test_kernels_of_dtypes_that_a_gpu_has_not_are_not_compiled_for_it():
    assert {"decode fp16, split keys", "any step fp32, head size 256"} < set(crosscompile.names("sm_75"))
    assert not [name for name in crosscompile.names("sm_75") if any(word in name for word in ("bf16", "e4m3", "e5m2"))]
    assert "decode bf16" in crosscompile.names("sm_86")
    assert not [name for name in crosscompile.names("sm_86") if "e4m3" in name or "e5m2" in name]
    for arch in ("sm_89", "gfx1151", "gfx908"):
        assert crosscompile.names(arch) == crosscompile.names()


def test_a_gpu_that_the_table_does_not_name_has_the_least_shared_memory():
    assert tiles.known("sm_87").lds_bytes == tiles.known("sm_121").lds_bytes == 99 * 1024
    assert tiles.known("sm_87")[3:] == tiles.known("sm_86")[3:]
    assert [tiles.known(arch) for arch in ("sm_70", "gfx906", "gfx1030", "gfx1250", "cpu", "sm_x")] == [None] * 6
    assert tiles.known("gfx1103") == tiles.known("gfx1100")


def test_the_tables_have_every_kernel_and_architecture():
    for columns in (crosscompile.FIRST, crosscompile.MORE):
        rows = [
            crosscompile.Compiled(name, arch, ("v_mfma_f32_16x16x16_bf16",), 16384, 0, 0, 0, 100, 1)
            for name in crosscompile.names()
            for arch in columns
            if name in crosscompile.names(arch)
        ]
        lines = crosscompile.table(iter(rows), columns).splitlines()
        assert lines[0] == f"| kernel | {' | '.join(columns)} |"
        assert len(lines) == 2 + len(crosscompile.names())
        assert lines[2].count(" - |") == columns.count("sm_75")
        assert lines[2].count("v_mfma, 16 KiB, 100 VGPRs") == sum(arch.startswith("gfx") for arch in columns)
