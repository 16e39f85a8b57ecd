"""What a failed test of the kit prints: its message, what was drawn, and where the backend raised."""

from __future__ import annotations

import traceback
from pathlib import Path

from attncore.quoted import MAX_TEXT, notes
from attncore.testing.harness.errors import ConformanceError, text_of, told

_KIT = Path(__file__).parents[1]
_CALLERS = {"_pytest", "pluggy", "hypothesis"}
_DRAWN = ": check(\n"
"""Of Hypothesis's note, behind words that its releases differ in."""


def shown(error: BaseException) -> str:
    """A failure in words, without the kit's own frames; empty where the kit itself is at fault, and its text short."""
    raised = _raised(error)
    frames = [] if raised is None else _frames(raised)
    if raised is not None and not frames:
        return told(error) if _is_long(error) else ""
    lines = [text_of(error) if isinstance(error, ConformanceError) else told(error), *_drawn(error)]
    if raised is not None:  # its frames
        lines += ["", "Traceback of the backend:", *"".join(traceback.format_list(frames)).splitlines()]
        lines += [told(raised)]  # without Hypothesis's note
    return "\n".join(lines)


def _raised(error: BaseException | None) -> BaseException | None:
    """What was raised first, where that is no finding of the kit's."""
    while isinstance(error, ConformanceError):
        error = error.__cause__
    return error


def _is_long(error: BaseException) -> bool:
    """Whether the text of an error, of one that it was raised from or of one in a group would be cut."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            if len(text_of(one)) > MAX_TEXT:
                return True
            members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            left += [other for other in (one.__cause__, one.__context__, *members) if other is not None]
    return False


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames from where the kit calls others."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [i for i, frame in enumerate(frames) if _is_the_kits(Path(frame.filename))]
    return frames[own[-1] + 1 :] if own else frames


def _is_the_kits(file: Path) -> bool:
    return file.is_relative_to(_KIT) or not _CALLERS.isdisjoint(file.parts)


def _drawn(error: BaseException) -> list[str]:
    """The arguments that Hypothesis drew, in a line."""
    for note in notes(error):
        _, found, drawn = note.partition(_DRAWN)
        if found:
            words = " ".join(drawn.rpartition(")")[0].split())
            return [f"drawn: {words.removesuffix(',')}"]
    return []
