"""What a release would break of the public names: the working tree beside the last tag, as griffe reads both.

``python tests/api_check.py`` compares with the last tag ``v*`` (in a release's own tree: the one before),
``python tests/api_check.py REVISION`` with another revision. A break that is meant stands in ``tests/api_breaks.txt``,
a line as it is printed here. Exit code 1: a break that is not meant, or a line of that file which is none. Without a
tag there is nothing to compare with: exit code 0.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import griffe
from public_modules import PUBLIC_MODULES

ROOT = Path(__file__).parents[1]
COMPARED = PUBLIC_MODULES | {"attncore.slots", "attncore.step_arrays"}
"""The last has the fields of metadata, which griffe does not find as those of their class."""
PRIVATE_DEFAULT = re.compile(r"default was changed: _\w+ -> _\w+$")
"""A private constant that has another name now."""
CHANGES = {"attncore.__version__"}
"""Public names whose value is another one in each release."""


def git(repository, *words):
    return subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=False)


def last_tag(repository):
    """The last tag ``v*``; not that of HEAD itself where nothing was changed since. None where there is none."""
    changed = git(repository, "diff", "--quiet", "HEAD", "--", "attncore").returncode
    here = [] if changed else git(repository, "tag", "--points-at", "HEAD").stdout.split()
    for revision in ("HEAD", "HEAD^"):
        found = git(repository, "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", revision)
        if found.returncode == 0 and found.stdout.strip() not in here:
            return found.stdout.strip()
    return None


def package_of(repository, revision, folder):
    """The package as it was at ``revision``, unpacked into ``folder`` and read; no branch or work tree is made."""
    packed = Path(folder) / "packed.tar"
    done = git(repository, "archive", "-o", str(packed), revision, "attncore")
    if done.returncode:
        sys.exit(f"api-check: {revision}: {done.stderr.strip()}")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return package(folder)


def package(folder):
    """attncore in ``folder``, read and not imported."""
    return griffe.load("attncore", search_paths=[folder], allow_inspection=False, try_relative_path=False)


def public_names(module):
    """The names of ``__all__``; of a module without one, or with one that is computed, what it defines."""
    exported = [str(name) for name in module.exports or ()]
    if exported and module.members.keys() >= set(exported):
        return exported
    return [name for name, one in module.members.items() if not (name[0] == "_" or one.is_alias or one.is_module)]


def breaks(old, new):
    """A sentence for each break of a public name, sorted."""
    found = set()
    for path in COMPARED:
        was, now = member(old, path), member(new, path)
        if was is None:
            continue  # not there yet
        if now is None:
            found.add(f"{path}: the module is gone")
            continue
        found.update(breaks_of_module(was, now))
    return sorted(found)


def member(package, path):
    try:
        return package[path.removeprefix("attncore").removeprefix(".")] if path != "attncore" else package
    except KeyError:
        return None


def breaks_of_module(was, now):
    remaining = set(public_names(now))
    for name in public_names(was):
        if name not in remaining:
            yield f"{was.path}.{name}: it is no public name any more"
        elif f"{was.path}.{name}" not in CHANGES:
            told = map(sentence, breaks_of_name(was.members[name], now.members.get(name)))
            yield from (text for text in told if not PRIVATE_DEFAULT.search(text))


def breaks_of_name(was, now):
    """griffe compares the members of two objects: those of a module of each, which have this name alone."""
    sides = []
    for one in (was, now):
        side = griffe.Module("attncore")
        target = one.final_target if one.is_alias else one
        target.public = True
        side.members["name"] = target
        sides.append(side)
    return griffe.find_breaking_changes(*sides)


def sentence(breakage):
    """Where it is and what it is, without the line of the file, which moves."""
    text = re.sub(r"\x1b\[[\d;]*m", "", breakage.explain(griffe.ExplanationStyle.ONE_LINE))
    return f"{breakage.obj.module.path}.{text.split(': ', 1)[1]}"


def meant(repository):
    """The lines of ``tests/api_breaks.txt`` that are no comments."""
    file = Path(repository) / "tests" / "api_breaks.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def check(repository, revision=None):
    """The exit code; what there is to say is printed."""
    revision = revision or last_tag(repository)
    if revision is None:
        print("api-check: no tag v* before this commit, so that there is nothing to compare with")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = set(breaks(package_of(repository, revision, folder), package(repository)))
    allowed = meant(repository)
    for line in sorted(found - allowed):
        print(f"api-check: breaks {revision}: {line}")
    for line in sorted(allowed - found):
        print(f"api-check: tests/api_breaks.txt: no break since {revision}, take the line out: {line}")
    print(f"api-check: {len(found - allowed)} breaks since {revision}, and {len(found & allowed)} that are meant")
    return int(found != allowed)


if __name__ == "__main__":
    sys.exit(check(ROOT, *sys.argv[1:2]))
