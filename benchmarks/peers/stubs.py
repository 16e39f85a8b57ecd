"""What lets vLLM's builders be imported where neither CUDA nor all of its requirements are.

``STUBBED`` are third-party packages that vLLM imports somewhere and that no timed code uses: modules whose every
attribute is an empty class. Everything of vLLM itself is its wheel's.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

STUBBED = ("flashinfer", "gguf", "llguidance", "openai_harmony", "xgrammar")


class _Empty:
    """Can be made of anything, and plans nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def plan(self, *args, **kwargs):
        pass


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Empty,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in STUBBED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def install():
    """Before anything of vLLM is imported. torch and transformers come first: they would take stubs for the packages,
    and vLLM's own placeholder of triton for triton."""
    import torch._inductor.compile_fx
    from transformers import AutoConfig, BatchFeature, PreTrainedModel, ProcessorMixin  # noqa: F401

    torch.set_num_threads(1)  # as vLLM's own workers do
    sys.meta_path.append(_Finder())


def open_package(folder, *, whole):
    """Makes ``vllm`` importable from ``folder``; not ``whole``: without running its __init__, which starts with the
    servers. Its modules are the wheel's either way."""
    sys.path.insert(0, str(folder))
    if not whole:
        package = types.ModuleType("vllm")
        package.__path__ = [str(Path(folder) / "vllm")]
        sys.modules["vllm"] = package
