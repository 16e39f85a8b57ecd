"""Python's garbage collector in a process that runs one command. Imports nothing but atexit and gc.

The collector looks for objects that only one another refer to: time and again while modules are loaded, which stay, and
when Python ends, in all that there is. With these searches `attncore list` takes a tenth longer.
"""

from __future__ import annotations

import atexit
import gc


def pause() -> None:
    """No search until ``resume``: while modules are loaded."""
    gc.disable()


def resume() -> None:
    """Searches from here on, but never among what there is by now."""
    gc.freeze()
    gc.enable()


def end_without_search() -> None:
    """No search when this process ends, so that ``__del__`` of what stands in a cycle is not called then.

    Python does not promise that call. What is registered with ``atexit`` is called as ever.
    """
    atexit.register(gc.freeze)
