"""Writes [project.urls] of attncore and its plugins into the pyproject.toml of each, before a release is built.

    python .ci/project_urls.py [ADDRESS] [FOLDER]

ADDRESS is the repository's, such as https://github.com/OWNER/NAME; without it, GITHUB_SERVER_URL and GITHUB_REPOSITORY
say it. DOCUMENTATION_URL is the site's address, if it has one. The sources have no such table: where the project is
published is known to the repository alone that publishes it. A file that has the table already is an error.
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADDRESS = re.compile(r"https://[\w.-]+(?::\d+)?(?:/[\w.-]+)+")
TABLE = "[project.urls]"


def repository_of(environ):
    """The address that a runner's variables name."""
    server, name = environ.get("GITHUB_SERVER_URL"), environ.get("GITHUB_REPOSITORY")
    if not server or not name:
        sys.exit("project_urls: no ADDRESS, and GITHUB_SERVER_URL and GITHUB_REPOSITORY are not set: give the address")
    return f"{server}/{name}"


def urls(address, documentation=None):
    """Each label and its address."""
    return {
        "Homepage": address,
        "Source": address,
        "Documentation": documentation or f"{address}/tree/HEAD/docs",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def checked(address):
    if not ADDRESS.fullmatch(address):
        sys.exit(f"project_urls: {address!r} is no address; give one such as https://github.com/OWNER/NAME")
    return address


def main(arguments, environ):
    address = checked((arguments[0] if arguments else repository_of(environ)).rstrip("/"))
    documentation = environ.get("DOCUMENTATION_URL") and checked(environ["DOCUMENTATION_URL"].rstrip("/"))
    folder = Path(arguments[1]) if arguments[1:] else ROOT
    table = "\n".join(f'{label} = "{url}"' for label, url in urls(address, documentation).items())
    files = [folder / "pyproject.toml", *sorted(folder.glob("plugins/*/pyproject.toml"))]
    for file in files:
        if TABLE in file.read_text(encoding="utf-8"):
            sys.exit(f"project_urls: {file} has {TABLE} already")
    for file in files:
        text = file.read_text(encoding="utf-8")
        file.write_text(f"{text.rstrip()}\n\n{TABLE}\n{table}\n", encoding="utf-8")
        print(f"project_urls: {file}: {address}")


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
