"""Says in one line why nothing can be run on a CUDA device here; exit code 1.

``make test-gpu`` and ``make bench-gpu`` ask it, with -P: attncore has to be installed, because the source tree alone
has no compiled extension.
"""

import importlib
import sys


def missing():
    for name in ("torch", "pytest", "attncore"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{sys.executable} cannot import {name} ({error}); make runs another Python with PYTHON=..."
    import torch

    if not torch.cuda.is_available():
        return f"no CUDA device here (torch {torch.__version__} of {sys.executable})"
    return ""


if __name__ == "__main__":
    if found := missing():
        sys.exit(f"nothing is run: {found}")
