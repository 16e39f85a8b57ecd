"""``python tests/device_alarms.py`` for seconds, in a process of its own: what it is tested for includes a crash."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attncore.kernels import load_kernels

pytest.importorskip("torch")
pytest.importorskip("triton", reason="the transport with nodes needs triton's module")

pytestmark = [
    pytest.mark.skipif(load_kernels().IMPLEMENTATION != "cython", reason="numba's kernels serve no device"),
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer that signals"),
]

SCRIPT = Path(__file__).parents[2] / "device_alarms.py"


@pytest.mark.parametrize("transport", ["graph", "copy"])
@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.gpu)])
def test_device_alarms(transport, seconds):
    command = [sys.executable, str(SCRIPT), "--seconds", str(seconds), "--transport", transport]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(r"[1-9]\d* engines, [1-9]\d+ alarms: no inconsistent step\n", done.stdout)
