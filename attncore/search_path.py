"""Where modules are searched: not in the current folder, whose files are data. Imports nothing but os and sys."""

from __future__ import annotations

import os
import sys


def without_current_folder() -> list[str]:
    """``sys.path`` without the current folder where Python has put it before the standard library.

    ``python -m``, ``python -c`` and an empty element of PYTHONPATH do so. It stays where PYTHONPATH names it, and where
    attncore itself is imported from it.
    """
    named = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    try:
        current = os.getcwd()
        named = [os.path.abspath(place) for place in named]
    except OSError:  # the folder has been deleted: what is named by a path from there is nowhere
        current = ""
    here = {"", current}
    if current in named or current == os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        here.discard(current)
    places = [place for place in sys.path if isinstance(place, str)]  # Python searches no other object
    library = os.path.dirname(os.__file__)
    before = places.index(library) if library in places else len(places)
    return [place for place in places[:before] if place not in here] + [place for place in places[before:] if place]
