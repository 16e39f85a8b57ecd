"""Running a plugin's code in this process: one thread at a time, with the process as it was afterwards.

An interrupt, which is what a signal's handler raises, may come between any two steps of this module.
"""

from __future__ import annotations

import contextlib
import contextvars
import signal
import sys
import time
from collections.abc import Callable
from itertools import repeat
from typing import ParamSpec, TypeVar

from attncore.errors import PluginError
from attncore.registry.plugins.left_as_found import Process
from attncore.running_call import RunningCall
from attncore.standard_output import LentStreams

LONGEST_WAIT = 60.0
"""Seconds that a thread waits for another one that runs code of plugins.

That one may wait for this one: it loads a plugin that this thread is importing, and whose import has come here.
"""
_LOOKS = 0.005
"""Seconds between two looks of a thread that waits."""
_TRIES = 100
"""Interrupts while the process is restored, after each of which that begins again."""
P = ParamSpec("P")
T = TypeVar("T")


class one_thread:  # noqa: N801  used as a function
    """Within it no other thread runs code of plugins: each would take what the other's changed for what was there.

    PluginError where another thread is in it for LONGEST_WAIT seconds. It is no lock, which an interrupted thread would
    keep: a turn lasts while its caller's frame runs. What is asked for within it, such as a backend by a plugin's
    check, is within the turn of its thread.
    """

    now: one_thread | None = None
    """The turn that was taken last; it may be over."""

    def __init__(self) -> None:
        self._call = RunningCall(sys._getframe(1))

    def __enter__(self) -> None:
        end = None
        while True:
            last = one_thread.now
            free = last is None or not last._call.lasts()
            if not free and last is not None and last._call.thread == self._call.thread:
                return
            if free and one_thread.now is last:
                one_thread.now = self  # nothing is called since the comparison: no other thread comes between
                return
            end = time.monotonic() + LONGEST_WAIT if end is None else end
            if time.monotonic() > end:
                raise PluginError(
                    f"plugins: another thread has run their code for {LONGEST_WAIT:g} s, and this one waited; either "
                    "one of them hangs (attncore doctor tells which), or it needs a module that this thread is "
                    "importing: call attncore.backends() before threads start, or select no backend while a module is "
                    "imported"
                )
            time.sleep(_LOOKS)

    def __exit__(self, *_: object) -> None:
        if one_thread.now is self:
            one_thread.now = None


def run_plugin_code(plugin: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function``, code of ``plugin``, in no other thread; afterwards the process and its streams are as before.

    Errors as of ``one_thread``, and SystemExit where it calls ``os._exit``. No context manager, for it has two attempts
    at restoring: an interrupt may come before the first statement of the first one.
    """
    with one_thread():
        streams, process = LentStreams(), Process(plugin)
        timers = map(signal.setitimer, process.idle_timers(), repeat(0))
        try:
            try:
                try:
                    streams.lend()
                    process.begin()
                    return _own_context().run(function, *args, **kwargs)
                finally:
                    list(timers)  # one call of C, which stops a timer that is so fast that no function can be called
            finally:
                _restore(process, streams)
        except BaseException:
            _restore(process, streams)
            raise


def _own_context() -> contextvars.Context:
    """That of this thread for a plugin: what it sets in it, such as decimal's settings, does not reach the thread."""
    context = contextvars.copy_context()
    if (decimal := sys.modules.get("decimal")) is not None:
        with contextlib.suppress(Exception):  # another module may stand there
            context.run(lambda: decimal.setcontext(decimal.getcontext().copy()))  # which it may change in place
    return context


def _restore(*found: Process | LentStreams) -> None:
    """Restores each, begun again where it is interrupted; the interrupt is then raised."""
    interrupt = None
    for one in found:
        for _ in range(_TRIES):
            try:
                one.restore()
                break
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
