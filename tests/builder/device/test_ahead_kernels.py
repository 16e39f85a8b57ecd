"""Nodes of steps ahead, and corrections of overlapped steps, in Triton's interpreter, chosen before it is imported."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize(
    "words",
    [
        ["interpreted_ahead.py", "short"],
        pytest.param(["interpreted_ahead.py"], marks=pytest.mark.slow),
        ["interpreted_corrections.py"],
    ],
)
def test_kernels_of_the_transports_in_tritons_interpreter(words):
    pytest.importorskip("triton", reason="triton is not installed")
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / words[0], *words[1:]],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip() == "equal", done.stderr
