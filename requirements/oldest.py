"""Constraints for pip: of each requirement of attncore and its plugins, the oldest minor version that it allows.

Of that, pip takes the last one: first ones are missing, or were withdrawn, of several packages.
"""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
TOOLS = {"dev"}
"""Extras that are no user's: what they have is pinned by the files beside this one."""
LEFT_TO_TORCH = {"triton"}
"""torch requires one version of each; that of the oldest torch is older than attncore's plugins allow."""


def requirements(folder):
    """What pip installs with the project of ``folder`` and with each of its extras."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    yield from project["dependencies"]
    for name in extras.keys() - TOOLS:
        yield from extras[name]


def oldest(texts):
    """By name, the lowest bound of requirements that have one, attncore and what torch decides apart."""
    bounds = {}
    for requirement in map(Requirement, texts):
        for one in requirement.specifier:
            if one.operator == ">=" and requirement.name not in {"attncore", *LEFT_TO_TORCH}:
                bound = Version(one.version)
                bounds[requirement.name] = min(bound, bounds.get(requirement.name, bound))
    return bounds


if __name__ == "__main__":
    plugins = sorted(folder.parent for folder in ROOT.glob("plugins/*/pyproject.toml"))
    found = oldest(text for folder in (ROOT, *plugins) for text in requirements(folder))
    for name, bound in sorted(found.items()):
        print(f"{name}>={bound},=={bound.major}.{bound.minor}.*")
