"""Tries the installed attncore as a wheel's user has it: from an empty folder, away from the checkout.

    python .ci/try_wheel.py

What it holds: attncore is not the checkout's, the compiled kernels are there, the command lists its backends, a replay
of a synthetic trace makes the metadata of its steps right, and the tests of host functions and kernels pass. Neither
torch nor numba is needed.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IS_INSTALLED = """
import attncore, attncore._slots, attncore.slots
from pathlib import Path
root = Path({root!r})
found = Path(attncore.__file__).resolve()
assert "site-packages" in found.parts, found
assert root / "attncore" not in found.parents, found
why = attncore.slots.why_kernels()
assert why.startswith("cython"), why
print(f"attncore {{attncore.__version__}}, kernels {{why}}")
"""
TESTS = ("tests/test_slots.py", "tests/kernels/test_rows.py", "tests/kernels/test_adopted_rows.py")
SUPPORT = ("tests", "examples", "benchmarks", "pyproject.toml")


def run(folder, *command):
    print("+", *(str(word).splitlines()[0] or "the installation" for word in command), flush=True)
    done = subprocess.run([sys.executable, "-P", *command], cwd=folder, check=False)
    if done.returncode:
        sys.exit(f"try_wheel: exit code {done.returncode}")


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, "-c", IS_INSTALLED.format(root=str(ROOT)))
        run(folder, "-m", "attncore", "list")
        run(folder, "-m", "attncore", "replay", "--requests", "50", "--metadata-only")
        for part in SUPPORT:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, folder / part)
            else:
                shutil.copy(ROOT / part, folder)
        run(
            folder,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not gpu and not slow",
            "-k",
            "not numba",
            *TESTS,
        )


if __name__ == "__main__":
    main()
