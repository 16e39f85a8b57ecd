"""`attncore verify`: does a backend agree with ``reference`` on this device? Asked in a process of its own, and kept.

A library that crashes or hangs is a verdict like any other. Verdicts are kept by (plugin version, device, driver) and
what else the answer depends on, under ``$XDG_CACHE_HOME/attncore/verify``.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM
from typing import Any

from attncore import env
from attncore._version import __version__
from attncore.input_files import parse_json
from attncore.installed_metadata import FILES
from attncore.installed_metadata import distribution as found_distribution
from attncore.json_output import json_text
from attncore.kept_files import cache_folder, read_kept, write_kept
from attncore.quoted import MAX_PART, one_line
from attncore.registry import package_requirements
from attncore.registry.child_process import NO_ANSWER, NOT_STARTED, how_it_ended, read_answers, run_in_child
from attncore.registry.choice.choice import Choice
from attncore.registry.plugins.plugin_code import run_plugin_code
from attncore.temporary_folder import check_room, temporary_folder, write_temporary

STATES = ("agrees", "differs", "fails", "crashes", "hangs")
MOST = {"steps": 10**6, "max_abs_error": 1e300, "tolerance": 1e300, "seconds": 1e9}
"""What each number of a verdict is below."""

_OF_OTHERS = (NO_ANSWER, NOT_STARTED, *(how_it_ended(-one) for one in (SIGHUP, SIGINT, SIGKILL, SIGTERM)))
"""How the sentences about a process begin that did not end by the backend's fault, or perhaps not; the system kills by
SIGKILL where memory is short.
"""

REQUEST = (
    "num_heads", "num_kv_heads", "head_size", "head_size_v", "use_mla", "dtype", "kv_cache_dtype", "sliding_window",
    "logits_soft_cap", "phase",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What came of one backend on one device. ``state`` is of STATES; ``message`` says what is wrong, where it is."""

    name: str
    distribution: str
    version: str
    library: str
    """The distributions that the plugin requires, with their versions."""
    device: str
    driver: str
    state: str
    message: str = ""
    against: str = ""
    """What it was compared with."""
    steps: int = 0
    max_abs_error: float | None = None
    tolerance: float | None = None
    seconds: float = 0.0
    cached: bool = False
    variant: str = ""
    """The variant that was verified; empty where the backend has none."""
    ignored: str = ""
    """Why a verdict that was kept is not this one; empty where none was, or where it is."""

    @property
    def fine(self) -> bool:
        """Whether it agrees."""
        return self.state == "agrees"

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)


def verify(choice: Choice, *, timeout: float, fresh: bool = False, folder: Path | None = None) -> Verdict:
    """The verdict on a choice: the one kept, or, where there is none or ``fresh``, a new one, which is then kept.

    Verdicts of a process that ended by itself or by its own fault are kept. One that took longer than ``timeout``
    seconds is not, for the limit may have been too short; nor one that was not started, was ended from outside, or had
    too little memory, no room on a disk or no more files, for the next one may have what it lacked. NoRoomError where
    there is none for what the process is to answer.
    """
    try:
        folder = cache_folder("verify") if folder is None else folder
    except RuntimeError:  # a user without a home keeps none
        return _ask(choice, _blank(choice), timeout)[0]
    blank = _blank(choice)
    file = folder / f"{choice.name}-{_digest(choice, blank)}.json"
    kept, ignored = (None, "") if fresh else _read(file, blank)
    if kept is not None:
        return kept
    verdict, lasts = _ask(choice, blank, timeout)
    if lasts:
        _write(file, verdict)
    return replace(verdict, ignored=ignored)


def _blank(choice: Choice) -> Verdict:
    host, form = choice.host, choice.spec
    names = sorted({package_requirements.parse(text).name for text in form.all_requires})
    library = ", ".join(f"{name} {host.packages.get(name, '')}".strip() for name in names)
    return Verdict(
        name=choice.name,
        distribution=choice.candidate.distribution,
        version=choice.candidate.version,
        library=library,
        device=host.device,
        driver=host.driver,
        variant=choice.variant,
        state="fails",
    )


def _digest(choice: Choice, blank: Verdict) -> str:
    facts = {
        **{name: getattr(blank, name) for name in ("distribution", "version", "library", "device", "driver")},
        "attncore": __version__,
        "variant": choice.variant,
        "choice": _asked(choice),
        "variables": env.values(sorted(choice.spec.variables)),
        # a plugin in development changes without its version: its files' times tell
        "files": _modified(choice.spec.factory.partition(":")[0]) | _modified_of(choice.candidate.distribution),
    }
    return hashlib.sha256(json_text(facts, sort_keys=True).encode()).hexdigest()[:16]


def _asked(choice: Choice) -> dict[str, Any]:
    asked = {name: getattr(choice.request, name) for name in REQUEST}
    options = {choice.name: dict(choice.request.options.get(choice.name, {}))}
    asked |= {"options": options} if options[choice.name] else {}
    return {**asked, "block_size": choice.block_size, "kv_cache_layout": choice.kv_cache_layout}


def _modified(module: str) -> dict[str, int]:
    """The modification times of all files of the package that holds the factory's module; nothing is imported.

    Not of Python's code alone: kernels may be compiled from what lies beside it.
    """
    try:
        roots, origin = _places(module.partition(".")[0])
    except KeyboardInterrupt:
        raise
    except BaseException:  # of a finder, or of what it has found
        return {}
    found = [(file, root) for root in roots for file in root.glob("**/*") if "__pycache__" not in file.parts]
    if not roots and origin is not None:
        found.append((origin, origin.parent))
    archives = {above for place in (*roots, origin) if place for above in place.parents if above.is_file()}
    found += [(file, file.parent) for file in sorted(archives)]  # one that is imported from a zip file
    return {
        f"{roots.index(root) if root in roots else 0}/{file.relative_to(root).as_posix()}": file.stat().st_mtime_ns
        for file, root in found
        if file.is_file()
    }


def _modified_of(distribution: str | None) -> dict[str, int]:
    """Those of what is installed of a distribution, modules beside that package too; {} where it does not tell."""
    try:
        files = found_distribution(distribution or "", *FILES).files or ()
        places = {str(file): Path(str(file.locate())) for file in files if "__pycache__" not in file.parts}
        return {name: place.stat().st_mtime_ns for name, place in places.items() if place.is_file()}
    except Exception:  # it is not installed, or its list of files is damaged, of which csv raises errors of its own
        return {}


def _places(package: str) -> tuple[list[Path], Path | None]:
    """The folders of a package, several of a namespace; and the file of a module. The package's own code is not asked.

    Its module of ``sys.modules``, which ``importlib.util`` would ask, may be anything. Finders are asked in the order
    of an import: one of others, such as that of an editable installation, may come before the folders of ``sys.path``.
    """
    found = (one.find_spec(package, None) for one in sys.meta_path)
    spec = run_plugin_code("a finder of sys.meta_path", next, filter(None, found), None)
    roots = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    return roots, None if spec is None or spec.origin is None else Path(spec.origin)


def _ask(choice: Choice, blank: Verdict, timeout: float) -> tuple[Verdict, bool]:
    """A new verdict, and whether it says something of the backend alone, so that it may be kept."""
    started = time.perf_counter()
    with temporary_folder("verify") as temporary:
        question, answer = Path(temporary, "question"), Path(temporary, "answer")
        write_temporary(question, json_text({"backend": choice.name, **_asked(choice)}).encode())
        ended = run_in_child(["-m", "attncore.testing.verify_child", str(question), str(answer)], timeout)
        facts: dict[str, Any] = {name: value for told in read_answers(answer) for name, value in told.items()}
        if "state" not in facts:
            check_room(answer)
    phase = facts.pop("phase", "before it was imported")
    lasts = not facts.pop("lacks", False) and ("state" in facts or not ended.startswith(_OF_OTHERS))
    if ended and "state" not in facts:  # else what others do at the end of the process is no matter of the backend
        facts = {"state": "hangs" if ended.startswith(NO_ANSWER) else "crashes", "message": f"{ended} {phase}"}
    elif "state" not in facts or _verdict({**asdict(blank), **facts}) is None:
        facts = {"state": "crashes", "message": f"the process ended without an answer {phase}"}
    facts["message"] = one_line(facts.get("message", ""), MAX_PART)
    return replace(blank, **facts, seconds=round(time.perf_counter() - started, 3)), lasts


def _verdict(facts: Any) -> Verdict | None:
    """A verdict of its fields as JSON types; None where one of them is no value of such a field."""
    try:
        verdict = Verdict(**facts)
    except TypeError:  # no mapping, or other fields
        return None
    texts = [value for name, value in facts.items() if name not in (*MOST, "cached")]
    numbers = [(value, most) for name, most in MOST.items() if (value := getattr(verdict, name)) is not None]
    fine = all(isinstance(text, str) for text in texts) and all(
        type(number) in (int, float) and 0 <= number < most for number, most in numbers
    )
    known = verdict.state in STATES and type(verdict.steps) is int and type(verdict.seconds) in (int, float)
    if not fine or not known or type(verdict.cached) is not bool:
        return None
    return verdict if verdict.fine == (not verdict.message) and len(verdict.against) <= MAX_PART else None


def _read(file: Path, blank: Verdict) -> tuple[Verdict | None, str]:
    """The verdict kept in ``file``, None where there is none on what is asked; and why one that is there is ignored."""
    try:
        kept = _verdict(parse_json(read_kept(file), 1, ""))
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, str(error)
    except ValueError:
        kept = None
    # That a process hung is not kept, and a message is cut before it is.
    if kept is None or kept.state == "hangs" or len(kept.message) > MAX_PART or _asked_of(kept) != _asked_of(blank):
        return None, f"{file} holds no verdict on this"
    return replace(kept, variant=blank.variant, cached=True, ignored=""), ""


def _asked_of(verdict: Verdict) -> tuple[str, ...]:
    """What is known of it before anything is verified, but for the variant."""
    return (verdict.name, verdict.distribution, verdict.version, verdict.library, verdict.device, verdict.driver)


def _write(file: Path, verdict: Verdict) -> None:
    """A cache that cannot be written is no cache: the verdict stands all the same."""
    with contextlib.suppress(OSError):
        write_kept(file, json_text(verdict.as_json()).encode())
