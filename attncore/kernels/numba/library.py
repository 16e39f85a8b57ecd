"""What is used of numba, which is imported so that it reads no file of the current folder.

numba takes settings from ``.numba_config.yaml`` in the current folder, when it is imported and whenever it compiles.
One of them says from which folder compiled functions are unpickled, and a file beside somebody's data is data. numba
has no switch for it: its module of settings is loaded with another name of the file, the empty one. Where the program
has imported numba before, it has had numba read that file; ``jit.py`` takes no folder from numba's settings.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

SETTINGS, FILE = "numba.core.config", ".numba_config.yaml"


class _Loader(SourceFileLoader):
    """Loads numba's module of settings without the name of its file."""

    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        return code and code.replace(co_consts=tuple("" if one == FILE else one for one in code.co_consts))


class _Finder(MetaPathFinder):
    """Finds numba's module of settings alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == SETTINGS else None
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


_finder = _Finder()
sys.meta_path.insert(0, _finder)
try:
    from numba import __version__ as numba_version
    from numba import extending, from_dtype, njit, types
    from numba.core.caching import FunctionCache, IndexDataCacheFile
    from numba.core.compiler_lock import global_compiler_lock
finally:
    with contextlib.suppress(ValueError):  # another list has taken the place of this one
        sys.meta_path.remove(_finder)

intrinsic: Any = extending.intrinsic  # a loop calls it without its first argument

__all__ = [
    "FunctionCache", "IndexDataCacheFile", "from_dtype", "global_compiler_lock", "intrinsic", "njit", "numba_version",
    "types",
]  # fmt: skip
