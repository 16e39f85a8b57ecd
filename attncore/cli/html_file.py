"""The file of ``--html``, which `attncore replay` and `attncore bench` write a page with plots to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attncore import chart_page
from attncore.command import UsageError
from attncore.how_to_install import missing_module
from attncore.replay.results.whole_file import WholeFile


@contextmanager
def html_file(file: str | Path | None) -> Iterator[WholeFile | None]:
    """The open file, which is there when the block ends well; None where none was asked for.

    ``check_written_file`` has refused standard output. UsageError where the library that draws the plots is not
    installed. What cannot be written is said before the run.
    """
    if not file:
        yield None
        return
    try:
        chart_page.library()
    except ImportError as error:
        raise UsageError(f"--html: {missing_module(error, 'html')}") from error
    page = WholeFile(file)
    with ExitStack() as stack:
        stack.push(page)  # first, so that an interrupt while it opens leaves nothing behind
        page.open()
        yield page
