"""What numba has compiled is compiled again where any of the files that it was made of has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import attncore

ASK = """
from attncore.kernels import numba
import numpy as np
slots = np.zeros(1, np.int64)
numba.fill_slot_mapping(np.array([[5]], np.int32), np.array([1], np.int32), np.array([1], np.int32), 4, slots)
print(slots[0])
"""


def test_a_change_in_another_file_reaches_a_compiled_function(tmp_path):
    copy = tmp_path / "attncore"
    shutil.copytree(Path(attncore.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["PYTHONPATH"] = str(tmp_path)

    def ask():
        process = subprocess.run(
            [sys.executable, "-c", ASK], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return process.stdout.strip()

    assert ask() == "21"
    # fill_slot_mapping is in field_functions.py; the remainder that it compiles in is in slots.py.
    slots = copy / "kernels" / "numba" / "slots.py"
    slots.write_text(slots.read_text().replace("return token % block_size", "return token % block_size + 100"))
    assert ask() == "121"
