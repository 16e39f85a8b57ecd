"""An environment of its own for what is installed, and a copy of the sources to install."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]


def sources(folder):
    """The files of attncore's own distribution, as they stand in the working tree, in a new folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if name.partition("/")[0] not in ("tests", "plugins", "docs", "benchmarks") and (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return folder


def clean_venv(folder):
    """A new environment; its Python."""
    in_venv(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def borrow(python):
    """Have it see this environment's packages behind its own; the folder of its own."""
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(in_venv(python, "-c", program, cwd=python.parent).strip())
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return packages


def in_venv(python, *command, cwd, **environ):
    """Standard output of a command without this one's PYTHON and ATTNCORE variables; fails with all that it said."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ATTNCORE"))}
    done = subprocess.run(
        [python, *command], cwd=cwd, env={**clean, **environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
