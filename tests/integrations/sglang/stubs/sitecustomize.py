"""Where torchvision has no compiled operators: declares those that importing it registers something for.

SGLang imports torchvision for images, which no test has. Python imports this module when it starts, in every process
whose PYTHONPATH names this folder.
"""

import importlib.abc
import sys


class _DeclaresOperators(importlib.abc.MetaPathFinder):
    """Declares ``nms`` and ``qnms`` before torchvision is imported, and finds nothing."""

    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")


sys.meta_path.insert(0, _DeclaresOperators())
