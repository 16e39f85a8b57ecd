"""What a library was found to lack when it was called, kept from one process to the next.

A build of flash-attn may leave features out (soft cap, ALiBi, windows, head sizes, a dtype), and says so only when it
is called. ``probe`` calls; the findings are kept, a JSON file for a library file and a kind of device, in
``$XDG_CACHE_HOME/attncore/flash`` (beside the verdicts of `attncore verify`), and are good for as long as that file is
the same. The spec is made of them. That nothing runs for want of something else is known to one process alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from attncore.kept_files import cache_folder, read_kept, write_kept

DISTRIBUTIONS: Mapping[str, str] = {"3": "flash-attn-3", "3_vllm": "vllm", "4": "flash-attn-4", "2": "flash-attn"}
"""Generation -> the distribution that provides it, in the order in which a choice tries them."""

DTYPES = ("bfloat16", "float16")
HEAD_SIZES = tuple(range(8, 257, 8))
FEATURES = ("sliding_window", "logits_soft_cap", "alibi", "alibi_standard", "sinks")
CACHE_DTYPES = ("kv_cache_dtype fp8_e4m3",)
LATENT = "kv_cache latent"
_DTYPE_NAMES = frozenset(f"dtype {name}" for name in DTYPES)
_SIZE_NAMES = frozenset(f"head_size {size}" for size in HEAD_SIZES)
_NAMES = _DTYPE_NAMES | _SIZE_NAMES | {*FEATURES, *CACHE_DTYPES, LATENT}
"""What calls can show a build to lack. Findings of an earlier version, which asked for less, are not read."""


@dataclass(frozen=True)
class ProbeResult:
    """What calls of one generation's library showed on one device."""

    library: str
    """``flash-attn 2.8.3.post2``"""
    device: str
    """As the vendor calls it."""
    fails: str = ""
    """Why nothing of it runs; empty where something does."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Feature, ``dtype float16`` or ``head_size 96`` -> the library's words."""
    synchronises: bool = False
    """Whether its decode function waits for the device, as later versions of generation 2 do."""

    @property
    def head_sizes(self) -> frozenset[int]:
        """Sizes that the build leaves out."""
        return frozenset(int(name.partition(" ")[2]) for name in self.lacks if name.startswith("head_size "))

    def missing(self, kind: str) -> dict[str, str]:
        """What it lacks of a kind (``dtype``, ``head_size``), or with an empty one the features."""
        prefix = f"{kind} " if kind else ""
        named = ((name.removeprefix(prefix), text) for name, text in self.lacks.items() if name.startswith(prefix))
        return {name: text for name, text in named if kind or " " not in name}


def library(generation: str) -> str | None:
    """The generation's distribution with its version, None where it is not installed. Imports nothing."""
    try:
        return f"{DISTRIBUTIONS[generation]} {importlib.metadata.version(DISTRIBUTIONS[generation])}"
    except importlib.metadata.PackageNotFoundError:
        return None


_FILES = {
    "2": ("flash_attn_2_cuda", ""),
    "3": ("flash_attn_3", "_C*.so"),
    "3_vllm": ("vllm", "vllm_flash_attn/_vllm_fa3_C*.so"),
    "4": ("flash_attn", "cute/interface.py"),
}
"""Generation -> the module that the file is, or the package that it lies in, and where."""


def library_file(generation: str) -> Path | None:
    """The file whose change makes findings stale; None where it is not there. Imports nothing."""
    name, place = _FILES[generation]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not place:
        return Path(spec.origin) if spec.origin else None
    found = (file for folder in spec.submodule_search_locations or () for file in sorted(Path(folder).glob(place)))
    return next(found, None)


_here: dict[tuple[str, str], ProbeResult] = {}
"""(file of the library as it is, device) -> failures that another process may not have."""


def read(generation: str, device: str = "") -> ProbeResult | None:
    """The findings on the library as it is installed now, on ``device``, as the vendor calls it; None where there are
    none. Without a device, what some device showed, of one where something runs if there is.
    """
    found, files = library(generation), _files(generation, device)
    known = [_parsed(file) for file in files if found is not None]
    key = _key(generation)
    known += [one for (of, name), one in _here.items() if of == key and device in ("", name)]
    here = [
        one for one in known if isinstance(one, ProbeResult) and one.library == found and device in ("", one.device)
    ]
    return min(here, key=lambda one: bool(one.fails), default=None)


def ignored(generation: str) -> list[str]:
    """Why findings that are kept on the library as it is installed now are not read: a sentence for each file."""
    return [why for file in _files(generation, "") if isinstance(why := _parsed(file), str)]


def _parsed(file: Path) -> ProbeResult | str | None:
    """The findings kept in a file; None where there are none; why they are ignored, as a sentence."""
    import json  # here: `attncore list` reads this module, and mostly nothing is kept

    try:
        result = ProbeResult(**json.loads(read_kept(file)))
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error)
    except (ValueError, TypeError, RecursionError):  # damaged, or of another version of this plugin: probe again
        return f"{file} holds no findings"
    return result if _credible(result) else f"{file} holds findings that no call makes"


def _credible(result: ProbeResult) -> bool:
    """Whether every value is one that calls make: the spec is made of them."""
    lacks = result.lacks
    if not isinstance(lacks, dict) or type(result.synchronises) is not bool:
        return False
    texts = (result.library, result.device, result.fails, *lacks.values())
    return (
        all(isinstance(text, str) and len(text) <= 1000 for text in texts)
        and lacks.keys() <= _NAMES
        # It would run nothing then, and `fails` says so.
        and not any(lacks.keys() >= kind for kind in (_DTYPE_NAMES, _SIZE_NAMES))
    )


def write(generation: str, result: ProbeResult, *, lasting: bool = True) -> None:
    """Keeps the findings: for other processes too where they are ``lasting``. A folder that cannot be written to keeps
    none, and each process asks anew.
    """
    forget(generation, result.device)
    if not lasting:
        _here[_key(generation), result.device] = result
        return
    file = _file(generation, result.device)
    if file is None:
        return
    import json

    with suppress(OSError):
        write_kept(file, json.dumps(asdict(result), indent=1, allow_nan=False).encode())


def forget(generation: str, device: str = "") -> None:
    """Drops the findings on ``device``, or on all, so that the next creation calls the library again."""
    for place in [place for place in _here if place[0] == _key(generation) and device in ("", place[1])]:
        del _here[place]
    for file in _files(generation, device):
        try:
            file.unlink(missing_ok=True)
        except OSError:  # a folder that is read only: what it says stays true of this library file
            return


def _key(generation: str) -> str:
    """The library's file as it is now, and what calls ask of it; empty where there is none."""
    of_library = library_file(generation)
    if of_library is None:
        return ""
    try:
        status = of_library.stat()
    except OSError:
        return ""
    facts = f"{of_library.resolve()} {status.st_mtime_ns} {status.st_size} {sorted(_NAMES)}"
    import hashlib  # here: `attncore list` reads this module, and where no library is installed asks for no name

    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _file(generation: str, device: str) -> Path | None:
    key, name = _key(generation), re.sub(r"[^A-Za-z0-9]+", "-", device)
    try:
        return cache_folder("flash") / f"generation{generation}-{key}-{name}.json" if key else None
    except RuntimeError:  # a user without a home
        return None


def _files(generation: str, device: str) -> list[Path]:
    """Those that are there, of ``device`` or of all."""
    if device:
        file = _file(generation, device)
        return [file] if file is not None else []
    key = _key(generation)
    try:
        return sorted(cache_folder("flash").glob(f"generation{generation}-{key}-*.json")) if key else []
    except (OSError, RuntimeError):
        return []
