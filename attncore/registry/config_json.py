"""A model's configuration file, read as data.

A configuration comes from wherever a model came from. It is read by size, as a regular file, as JSON; nothing that it
names is opened, imported or fetched. Its fields are checked where they are used: by ``request_from_config_json``, and
by ``attncore replay --model``.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from attncore.input_files import parse_json, read_file

MAX_BYTES = 4 * 2**20
"""The largest configuration that is read; published ones have some kilobytes."""
MAX_DEPTH = 32
_OF_A_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
"""What may be the name of a model on Hugging Face's hub."""
_TAG, _INFINITE = "__float__", {"Infinity": math.inf, "-Infinity": -math.inf}
"""How transformers 5 writes numbers that JSON has not, such as the longest time step of Mamba 2: ``{tag: name}``."""


def read_config(path: str | Path) -> dict[str, Any]:
    """The object in a file, or in the ``config.json`` of a folder; ValueError that begins with the file's name."""
    place = os.fspath(path)  # as it is: of "config.json/", the name of a folder, Path would make that of the file
    try:
        place = os.path.join(place, "config.json") if os.path.isdir(place) else place
        config = parse_json(
            read_file(place, MAX_BYTES), MAX_DEPTH, "a model's configuration (a JSON object) is expected"
        )
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError) and _OF_A_HUB.fullmatch(place) and not place.endswith(".json"):
            hint = (
                f"; nothing is downloaded: give a config.json or its folder, such as that of `hf download {place} "
                "config.json --local-dir DIR`"
            )
        raise ValueError(f"{place} cannot be read: {error.strerror or error}{hint}") from None
    except ValueError as error:
        raise ValueError(f"{place} {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{place} holds a {type(config).__name__}, not an object")
    return {name: _with_infinite(value) for name, value in config.items()}


def _with_infinite(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TAG} and isinstance(value[_TAG], str):
            return _INFINITE.get(value[_TAG], value)
        return {name: _with_infinite(one) for name, one in value.items()}
    return [_with_infinite(one) for one in value] if isinstance(value, list) else value
