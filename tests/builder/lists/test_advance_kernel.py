"""The kernel of advance_step in Triton's interpreter, which has to be chosen before triton is imported."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from builder.lists.decodes import decodes, fields

from attncore import BackendConfig
from attncore.builder import CommonMetadataBuilder
from attncore.builder.lists import advanced_arrays
from attncore.reference import ReferenceBackend

HERE = pathlib.Path(__file__).parent


def test_the_kernel_gives_what_a_build_does():
    pytest.importorskip("triton", reason="triton is not installed")
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / "interpreted_advance.py"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", ["common", "flash", "flashinfer"])
@pytest.mark.parametrize("pad", [-1, 5])
def test_the_kernel_on_a_device(layout, pad, monkeypatch):
    """300 rows over several programs, 40 steps; every field is that of a build, and of copies in the kernel's place."""
    from attncore.builder.lists import triton_advance

    calls, advance_rows = [], triton_advance.advance_rows
    monkeypatch.setattr(triton_advance, "advance_rows", lambda *given: (calls.append(1), advance_rows(*given)))
    one = ReferenceBackend(BackendConfig(2, 1, 8, "float32", 16, device="cuda"))
    builder = CommonMetadataBuilder(16, layout, max_seq_len_to_capture=1024, backend=one)
    generator = torch.Generator().manual_seed(0)
    contexts = torch.randint(0, 900, (300,), generator=generator).tolist()
    rows = [(context, torch.randint(0, 9999, (64,), generator=generator).tolist()) for context in contexts]
    metadata, copied = (builder.build(decodes(rows), pad) for _ in range(2))
    fields(metadata), fields(copied)
    for step in range(1, 41):
        metadata.advance_step()
        with monkeypatch.context() as without:
            without.setattr(advanced_arrays, "runs_kernels", lambda tensor: False)
            copied.advance_step()
        fresh = builder.build(decodes([(context + step, table) for context, table in rows]), pad)
        assert fields(metadata) == fields(fresh) == fields(copied)
    assert len(calls) == 40
