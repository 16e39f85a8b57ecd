"""A second process that starts the example engine with compiled layers finds inductor's code, and compiles nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.slow


def started(cache, hidden_size):
    """What a process of its own found, over inductor's cache in a folder."""
    program = Path(__file__).with_name("compiled_start.py")
    environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    ended = subprocess.run(
        [sys.executable, str(program), str(hidden_size)], env=environ, check=True, capture_output=True, text=True
    )
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_second_start_finds_what_the_first_compiled(tmp_path):
    first, second = (started(tmp_path, 64) for _ in range(2))
    assert (first["miss"], first["hit"], first["graphs"]) == (2, 0, 2)
    assert (second["miss"], second["hit"], second["graphs"]) == (0, 2, 2)
    assert first["bypass"] == second["bypass"] == 0
    assert second["tokens"] == first["tokens"]
    another = started(tmp_path, 32)  # another model finds none of it
    assert (another["miss"], another["hit"]) == (2, 0)
