"""Write the repository of a new backend, which works, passes the conformance kit, and is there to be changed.

NAME is the backend's name; its distribution is attn-NAME, its package attn_NAME. DIR must not exist, or be empty.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from pathlib import Path

from attncore import env
from attncore._version import __version__
from attncore.cli.output import print_json
from attncore.registry.plugins.known_backends import KNOWN

TEMPLATE = Path(__file__).parents[1] / "template"


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
    print(f"wrote {len(files)} files to {args.directory}: the backend {words['name']}, which works already")
    print("next:")
    for line in (f"cd {args.directory}", "pip install -e '.[test]'", "pytest", f"attncore verify {words['name']}"):
        print(f"  {line}")
    return 0


def names(name: str) -> dict[str, str]:
    """Placeholder of the template -> its text; ValueError beginning with ``NAME`` for a name that cannot be used."""
    if not env.NAME.fullmatch(name):
        raise ValueError(f"NAME: {name!r} is not a backend's name; it takes lower-case letters, digits, '-', '_', '.'")
    if name in KNOWN:
        raise ValueError(f"NAME: {name!r} belongs to {KNOWN[name].distribution}; choose another")
    parts = [part for part in re.split(r"[-_.]+", name) if part]
    major, minor, *_ = __version__.split(".")
    return {
        "name": name,
        "distribution": f"attn-{'-'.join(parts)}",
        "package": f"attn_{'_'.join(parts)}",
        "class": "".join(part.capitalize() for part in parts),
        "floor": f"{major}.{minor}",
        "ceiling": str(int(major) + 1),
    }


def render(words: dict[str, str], directory: Path) -> list[str]:
    """Write the template with ``words`` filled in, all of it or nothing; returns the sorted paths of the files."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"DIR: {directory} exists and is not an empty directory")
    made = [path for path in (directory.parent, *directory.parent.parents) if not path.exists()]
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        files = [_write(source, words, partial) for source in sorted(TEMPLATE.rglob("*.txt"))]
        partial.chmod(0o777 & ~_umask())
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for path in made:
            path.rmdir()
        raise
    return sorted(files)


def _write(source: Path, words: dict[str, str], root: Path) -> str:
    path = str(source.relative_to(TEMPLATE)).removesuffix(".txt").replace("PACKAGE", words["package"])
    path = ".gitignore" if path == "gitignore" else path
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
