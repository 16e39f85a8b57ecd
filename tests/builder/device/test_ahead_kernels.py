"""The nodes of the transport ``graph`` for steps ahead, in Triton's interpreter, chosen before triton is imported."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "interpreted_ahead.py"


def test_the_nodes_run_steps_ahead_as_they_are_built():
    pytest.importorskip("triton", reason="triton is not installed")
    path = os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip() == "equal", done.stderr
