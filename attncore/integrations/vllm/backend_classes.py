"""The classes that attncore's names in vLLM stand for: ``ATTNCORE_FLASHINFER`` and so on, and ``CUSTOM``.

vLLM finds a class by its path. Those of this module are made when they are first asked for, in any process.
"""

from __future__ import annotations

from typing import Any

from attncore.integrations.vllm import names
from attncore.integrations.vllm.versions import installed_version, version_problem


def __getattr__(name: str) -> Any:
    if name != names.CUSTOM and not name.startswith(names.PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = _made(name)
    return made


def _made(name: str) -> type:
    if problem := version_problem(installed_version()):
        raise ValueError(problem)
    from attncore.integrations.vllm.attention_backend import class_for

    backend = None if name == names.CUSTOM else _known(name)
    return class_for(name, backend, __name__)


def _known(name: str) -> str:
    """The attncore backend of a name; where it is not installed, what its name would be."""
    return names.backend_of(name) or name.removeprefix(names.PREFIX).lower()
