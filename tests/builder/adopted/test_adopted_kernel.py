"""The Triton kernel of adopted steps, in Triton's interpreter, which has to be chosen before triton is imported."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "interpreted.py"


def test_the_kernel_gives_what_torch_does():
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "equal", done.stderr
