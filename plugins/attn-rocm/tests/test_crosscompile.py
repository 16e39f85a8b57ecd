"""Every kernel for every architecture, by the compiler alone: matrix instructions, scratch and local memory."""

import pytest
from attn_rocm import crosscompile, tiles

KIND = {64: "v_mfma", 32: "v_wmma"}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    """What is compiled is compiled now."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


@pytest.mark.parametrize("arch", crosscompile.ARCHITECTURES)
@pytest.mark.parametrize("name", crosscompile.names())
def test_compiled(name, arch):
    found = crosscompile.compile_kernel(name, arch)
    assert found.binary_bytes > 0
    known = (tiles.ARCHITECTURES | tiles.DEVELOPMENT)[arch]
    assert found.lds_bytes <= known.lds_bytes
    products = name not in crosscompile.OTHERS
    if arch == "sm_90":
        if products and "fp32" not in name:
            assert found.matrix[0].startswith(("wgmma.mma", "mma.sync"))
        return
    if products and ("fp32" not in name or known.wavefront == 64):  # RDNA has no matrix instruction for float32
        assert found.matrix
        assert all(word.startswith(KIND[known.wavefront]) for word in found.matrix)
        assert ("bf16" in found.matrix[0]) == ("bf16" in name)
    assert found.scratch_bytes == found.spills == 0
    if found.is_decode:
        small = crosscompile.compile_kernel(name, arch, small_cache=True)
        assert small.scratch_bytes == small.spills == 0
        assert small.lds_bytes <= known.lds_bytes
        assert small.matrix == found.matrix


def test_the_table_has_every_kernel_and_architecture():
    rows = [
        crosscompile.Compiled(name, arch, ("v_mfma_f32_16x16x16_bf16",), 16384, 0, 0, 0, 100, 1)
        for name in crosscompile.names()
        for arch in crosscompile.ARCHITECTURES
    ]
    lines = crosscompile.table(iter(rows)).splitlines()
    assert len(lines) == 2 + len(crosscompile.names())
    assert lines[2].count("v_mfma, 16 KiB, 100 VGPRs") == len(crosscompile.ARCHITECTURES)
