"""How far a command is, on standard error where that is a terminal: a line, or a bar."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from attncore.standard_output import kept_stream
from attncore.terminal import columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import ProgressColumn, Task


STEADY = 5
"""Per cent that are finished before an end is foretold: the first requests end sooner than those that queue."""


@contextlib.contextmanager
def said_meanwhile(text: str) -> Iterator[None]:
    """``text`` on a terminal's line while something takes seconds, and gone behind it."""
    stream = kept_stream("stderr")
    width = columns(stream)
    if width is None:
        yield
        return
    line = f"{text} ..."[: width - 1]
    print(line, end="\r", file=stream, flush=True)
    try:
        yield
    finally:
        print(" " * len(line), end="\r", file=stream, flush=True)


def remaining_column() -> ProgressColumn:
    """The time that is left, empty until it can be told."""
    from rich.progress import TimeRemainingColumn
    from rich.text import Text

    class Remaining(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) if task.percentage >= STEADY else Text("")

    return Remaining()


@contextlib.contextmanager
def progress_bar(total: int, what: str = "requests") -> Iterator[Callable[[int], None] | None]:
    """The function to call with the number of ``what`` that are finished; None where standard error is no terminal."""
    stream = kept_stream("stderr")  # a backend's forward may replace that of sys while the bar is drawn
    if not stream.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    shown = (TextColumn(what), BarColumn(), MofNCompleteColumn(), remaining_column())
    with Progress(*shown, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda finished: bar.update(task, completed=finished)
