"""Running a plugin's code in this process: one thread at a time, with the process as it was afterwards."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from attncore.errors import PluginError
from attncore.registry.plugins.left_as_found import process_left_as_found
from attncore.standard_output import lent_streams

LONGEST_WAIT = 60.0
"""Seconds that a thread waits for another one that runs code of plugins.

That one may wait for this one: it loads a plugin that this thread is importing, and whose import has come here.
"""
_running = threading.RLock()
"""An RLock, because a plugin may ask for a backend when it is imported."""


def _free_running() -> None:
    global _running
    _running = threading.RLock()


os.register_at_fork(after_in_child=_free_running)  # the thread that held it is not in the child


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within it no other thread runs code of plugins: each would take what the other's changed for what was there.

    PluginError where another thread is in it for LONGEST_WAIT seconds.
    """
    running = _running
    if not running.acquire(timeout=LONGEST_WAIT):
        raise PluginError(
            f"plugins: another thread has run their code for {LONGEST_WAIT:g} s, and this one waited; either "
            "one of them hangs (attncore doctor tells which), or it needs a module that this thread is importing: call "
            "attncore.backends() before threads start, or select no backend while a module is imported"
        )
    try:
        yield
    finally:
        running.release()


@contextlib.contextmanager
def plugin_code(plugin: str) -> Iterator[None]:
    """Within it code of ``plugin`` runs, in no other thread; afterwards the process and its streams are as before.

    Errors as of ``one_thread``.
    """
    with one_thread(), lent_streams(), process_left_as_found(plugin):
        yield
