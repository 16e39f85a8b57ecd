"""Write the repository of a new backend, which works, passes the conformance kit, and is there to be changed.

NAME is the backend's name; its distribution is attn-NAME, its package attn_NAME. DIR must not exist, or be empty.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import os
import re
import secrets
import shlex
import shutil
import string
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path

from attncore import env
from attncore._version import __version__
from attncore.json_output import print_json
from attncore.quoted import one_line, quoted
from attncore.registry.plugins.known_backends import KNOWN
from attncore.same_readers import same_readers
from attncore.show import counted
from attncore.terminal import print_lines

_HIDDEN = {"gitignore": ".gitignore", "github": ".github"}
"""What is called so in a repository; in the template such names would be left out of wheels."""

TEMPLATE = importlib.resources.files("attncore") / "template"


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("name", metavar="NAME", help="the backend's name: lower-case letters, digits, '-', '_', '.'")
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to write the repository")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the repository and print the next commands."""
    words = names(args.name)
    files = render(words, args.directory)
    if args.json:
        print_json({**words, "directory": str(args.directory), "files": files})
        return 0
    where = f"{counted(len(files), 'file')} to {one_line(args.directory)}"
    print_lines(f"wrote {where}: the backend {words['name']}, which works already")
    print_lines("once installed, it is chosen before reference: its spec gives it priority 1 on any device")
    print("\nnext:")
    for line in (
        f"cd {_word(args.directory)}",
        "pip install -e '.[test]'",
        "pytest",
        f"attncore verify {words['name']}",
    ):
        print(f"  {line}")
    return 0


def _word(folder: Path) -> str:
    """A folder as a word of a shell's line, in printable characters."""
    text = str(folder)
    text = f"./{text}" if text.startswith("-") else text  # no option of cd
    if text.isprintable():
        return shlex.quote(text)
    plain = (string.ascii_letters + string.digits + "/._-").encode()
    return "$'" + "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in os.fsencode(text)) + "'"


def names(name: str) -> dict[str, str]:
    """Placeholder of the template -> its text; ValueError beginning with ``NAME`` for a name that cannot be used."""
    if not env.NAME.fullmatch(name):
        raise ValueError(
            f"NAME: {quoted(name)} is not a backend's name; give at most 64 lower-case letters, digits, '-', '_' and "
            "'.', with a letter first"
        )
    parts = [part for part in re.split(r"[-_.]+", name) if part]
    distribution = f"attn-{'-'.join(parts)}"
    for known, owner in KNOWN.items():  # `flash.` would be installed in the place of attn-flash
        if known == "-".join(parts) or owner.distribution == distribution:
            raise ValueError(f"NAME: {name!r} belongs to {owner.distribution}; choose another")
    if re.search(r"[-_.]([-_.]|$)", name):  # a distribution's name keeps none of them
        raise ValueError(
            f"NAME: {name!r} has a separator at its end, or two in a row, and {distribution} is the distribution of "
            f"{'-'.join(parts)!r}, too; give that name, or another"
        )
    class_ = "".join(part.capitalize() for part in parts)
    major, minor, *_ = __version__.split(".")
    return {
        "name": name,
        "distribution": distribution,
        "package": f"attn_{'_'.join(parts)}",
        "class": f"Attn{class_}" if class_ == "Attention" else class_,  # AttentionBackend is attncore's
        "floor": f"{major}.{minor}",
        "ceiling": str(int(major) + 1),
    }


def render(words: dict[str, str], directory: Path) -> list[str]:
    """Write the template with ``words`` filled in, all of it or nothing; returns the sorted paths of the files.

    The template may be in a zip file, as attncore itself may.
    """
    sources = list(_sources(TEMPLATE))
    if not sources:
        raise FileNotFoundError("the template of a backend is missing in this installation of attncore; reinstall it")
    try:
        return _render(words, Path(os.path.realpath(directory, strict=directory.is_symlink())), sources)
    except OSError as error:
        raise ValueError(f"DIR: {directory} cannot be written: {error.strerror or error}") from error


def _render(words: dict[str, str], directory: Path, sources: list[tuple[str, Traversable]]) -> list[str]:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"DIR: {directory} exists and is not an empty directory")
    made = [path for path in (directory.parent, *directory.parent.parents) if not path.exists()]
    partial = directory.parent / f".attncore-{secrets.token_hex(8)}"  # its name is known before it is made
    try:
        with contextlib.suppress(FileExistsError):  # a file: the next line says that it is no directory
            directory.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(0o700)
        files = [_write(path, source, words, partial) for path, source in sources]
        # What the user has made private stays so.
        partial.chmod(same_readers(partial, directory) if directory.exists() else 0o777 & ~_umask())
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for path in made:
            with contextlib.suppress(OSError):  # it was not made yet, or somebody else uses it by now
                path.rmdir()
        raise
    return sorted(files)


def _sources(folder: Traversable, above: str = "") -> Iterator[tuple[str, Traversable]]:
    """Every file of the template, with its path in it."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else ():
        if entry.is_dir():
            yield from _sources(entry, f"{above}{entry.name}/")
        elif entry.name.endswith(".txt"):
            yield above + entry.name, entry


def _write(path: str, source: Traversable, words: dict[str, str], root: Path) -> str:
    path = path.removesuffix(".txt").replace("PACKAGE", words["package"])
    first, slash, rest = path.partition("/")
    path = f"{_HIDDEN.get(first, first)}{slash}{rest}"
    text = source.read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace("{{" + word + "}}", value)
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
