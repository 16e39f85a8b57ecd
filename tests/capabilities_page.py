"""The capability matrix of docs/capabilities.md, as the command prints it for the backends of this repository.

``python tests/capabilities_page.py --write`` puts it there.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "capabilities.md"
BLOCK = re.compile(r"(<!-- matrix -->\n).*?(<!-- end -->)", re.DOTALL)
OURS = "reference,flash,flashinfer,rocm"


def matrix():
    """What `attncore show --all --markdown` prints where nothing of this machine or its user counts."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ATTNCORE_")}
    with tempfile.TemporaryDirectory() as empty:  # what a call on a GPU has shown is kept in the user's cache
        environ |= {"ATTNCORE_PLUGINS": OURS, "XDG_CACHE_HOME": empty, "PYTHONIOENCODING": "utf-8"}
        words = [sys.executable, "-m", "attncore", "show", "--all", "--markdown"]
        return subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout


def rendered(text):
    """The page's text with the matrix as the code has it."""
    return BLOCK.sub(lambda match: f"{match[1]}{matrix()}{match[2]}", text)


if __name__ == "__main__":
    text = rendered(PAGE.read_text())
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(text)
    else:
        print(text)
