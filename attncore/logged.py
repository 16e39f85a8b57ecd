"""A line of the log that fails nothing: handlers and filters of a plugin or an engine are code of somebody else's."""

from __future__ import annotations

import logging

# For every logger of attncore: without a handler of the program's, warnings would go to standard error.
logging.getLogger("attncore").addHandler(logging.NullHandler())


def logged(logger: logging.Logger, level: int, words: str, *values: object, error: BaseException | None = None) -> None:
    """Logs ``words % values``, with the traceback of ``error``; what a handler raises is dropped, but an interrupt."""
    try:
        logger.log(level, words, *values, exc_info=error, stacklevel=2)
    except KeyboardInterrupt:
        raise
    except BaseException:  # SystemExit, too: it is the plugin's
        return
