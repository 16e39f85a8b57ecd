"""The one extension module of attncore. Everything else about the build is in pyproject.toml.

ATTNCORE_DEBUG_EXT=1       compiles with bounds checks on (for tests; slow)
ATTNCORE_SANITIZE_EXT=1    compiles with gcc's address and undefined-behaviour sanitizers (make test-asan)
ATTNCORE_PUBLIC_C_API=1    reads Python ints through the public C API only, the way other interpreters must
ATTNCORE_NO_EXT=1          leaves the extension out, for numba's kernels; else a build that cannot compile it fails
"""

import os
import sys
import textwrap
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

NOT_COMPILED = """
attncore: its extension was not compiled ({error}).
Install a C compiler and Python's headers (such as the packages gcc and python3-dev) and run the same command again. Or
leave the extension out and take numba's kernels: ATTNCORE_NO_EXT=1 and the extra numba, as in
    ATTNCORE_NO_EXT=1 pip install '.[numba]'
"""


def switch(name):
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        sys.exit(f"{name}: {value!r} is neither 0 nor 1")
    return value == "1"


class BuildExtension(build_ext):
    """Ends the build where a compiler is missing or fails: a wheel without the extension would look compiled."""

    def build_extensions(self):
        try:
            super().build_extensions()
        except (BaseError, CCompilerError, OSError) as error:
            sys.exit(NOT_COMPILED.format(error=textwrap.shorten(str(error), 120)))


debug = switch("ATTNCORE_DEBUG_EXT")
release = ["/O2"] if sys.platform == "win32" else ["-O3", "-g0", "-fvisibility=hidden"]
# Undefined behaviour ends the process too: a line on standard error would be lost among those of the tests.
sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
sanitized = switch("ATTNCORE_SANITIZE_EXT")
extension = Extension(
    "attncore._slots",
    ["attncore/_slots.pyx"],
    # The topics that _slots.pyx includes, and their C helpers.
    depends=sorted(glob("attncore/kernels/cython/*")),
    # The baseline instruction set of the platform (x86-64-v1 on x86-64): a wheel must run wherever it installs.
    extra_compile_args=[*sanitizers, "-O1", "-g1"] if sanitized else release,
    extra_link_args=sanitizers if sanitized else [],
    define_macros=[("ATTNCORE_PUBLIC_C_API", "1")] if switch("ATTNCORE_PUBLIC_C_API") else [],
)
# The one place where directives are set.
directives = {
    "language_level": 3,
    "boundscheck": debug,
    "wraparound": False,
    "initializedcheck": debug,
    "cdivision": True,
    "embedsignature": True,
}
wanted = [] if switch("ATTNCORE_NO_EXT") else [extension]
setup(ext_modules=cythonize(wanted, compiler_directives=directives), cmdclass={"build_ext": BuildExtension})
