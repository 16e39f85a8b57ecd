"""The commands that errors and reports print for what is not installed, as they work for this copy of attncore.

Extras are given as what they require, so that a command neither builds attncore again nor asks an index for it. A
plugin comes from where attncore came from: a checkout, an index, or a file.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from attncore.installed_metadata import METADATA, distribution, installed_version

_HERE = Path(__file__).parents[1]


def install_extra(extra: str) -> str:
    """The command that installs what attncore's extra ``extra`` requires, quoted for a shell; where a part of that is
    installed, what is lacking.
    """
    try:
        wanted = dict.fromkeys(_requirements(extra))
    except Exception:  # it is not installed, or its metadata are damaged, in which each library has errors of its own
        wanted = {}
    if not wanted:  # a checkout on PYTHONPATH, or one that was installed before it had this extra
        return f"pip install -e {shlex.quote(f'{_HERE}[{extra}]')}"
    return f"pip install {shlex.join([text for text in wanted if not _is_met(text)] or wanted)}"


def missing_module(error: ImportError, extra: str) -> str:
    """What is not installed, of what attncore's extra ``extra`` requires, and the command that installs it."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    name = "pytest" if name == "_pytest" else name
    # Where a part of a package is missing, the package itself is there.
    what = f"{name} is not installed" if name and "." not in name else str(error)
    return f"{what}: {install_extra(extra)}"


def install_required(name: str | None) -> str:
    """The command that installs ``name`` as attncore requires it, whatever its extras do; empty where it does not."""
    own = (text for text in _required() if ";" not in text)  # behind which an extra is named
    wanted = next((text for text in own if re.match(r"[\w.-]*", text)[0] == name), "")  # type: ignore[index]
    return f"pip install {shlex.quote(wanted)}" if wanted else ""


def install_distribution(name: str) -> str:
    """The command that installs attncore, or a distribution of its ``plugins/``; or where that comes from, in words."""
    origin, is_installed = _origin()
    folder = _checkout(origin)
    if folder is None:
        return f"install {name} from where attncore came from, {origin}" if origin else f"pip install {name}"
    there = is_installed and name != "attncore"
    core = [] if there else ["-e", str(folder)]  # a plugin alone would have an index asked for attncore
    plugin = [] if name == "attncore" else [str(folder / "plugins" / name)]
    return f"pip install {shlex.join(core + plugin)}"


def compile_extension() -> str:
    """What to do where the compiled extension cannot be imported, in words: in a source tree, or in an installation."""
    if (_HERE / "setup.py").is_file():  # Python puts the folder that it is started in before site-packages
        return (
            f"this attncore is the source tree {_HERE}, in which the extension is not compiled: pip install -e "
            f"{shlex.quote(str(_HERE))}, or, where attncore is installed, start Python in another folder or with -P"
        )
    return (
        "install a C compiler and then attncore again (with pip's --no-cache-dir and --force-reinstall, which leave no "
        "old wheel)"
    )


def _required() -> list[str]:
    """What attncore requires, with that of its extras; of a checkout on PYTHONPATH, without."""
    try:
        return distribution("attncore", *METADATA).requires or []
    except Exception:  # as in install_extra
        try:
            import tomllib  # only a source tree that is not installed is read so

            found = tomllib.loads((_HERE / "pyproject.toml").read_text(encoding="utf-8"))
            return [str(one) for one in found["project"]["dependencies"]]
        except (OSError, ValueError, KeyError):
            return []


def _is_met(text: str) -> bool:
    from packaging.requirements import Requirement

    wanted = Requirement(text)
    try:
        return wanted.specifier.contains(installed_version(wanted.name), prereleases=True)
    except Exception:  # as in install_extra
        return False


def _requirements(extra: str) -> Iterator[str]:
    from packaging.requirements import Requirement

    for text in distribution("attncore", *METADATA).requires or ():
        wanted = Requirement(text)
        marker = wanted.marker
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue
        if wanted.name == "attncore":
            for one in sorted(wanted.extras):
                yield from _requirements(one)
        else:
            wanted.marker = None
            yield str(wanted)


@lru_cache(maxsize=1)
def _origin() -> tuple[str, bool]:
    """What attncore was installed from (PEP 610), empty where that is an index; and whether it is installed."""
    import json  # here: most commands have nothing to install

    try:
        text = distribution("attncore", "direct_url.json").read_text("direct_url.json")
        return (str(json.loads(text)["url"]) if text else ""), True
    except importlib.metadata.PackageNotFoundError:
        return "", False
    except Exception:  # damaged
        return "", True


def _checkout(origin: str) -> Path | None:
    """The checkout that this module is in, or that ``origin`` names, as long as it is there."""
    place = urlsplit(origin)
    named = [Path(unquote(place.path))] if place.scheme == "file" else []
    return next((folder for folder in (_HERE, *named) if (folder / "plugins").is_dir()), None)
