"""Whether a tag is that of this tree: python .ci/is_release.py v0.2.0

The tag is v and the version of attncore/_version.py, and the first section of CHANGELOG.md is that version with a date.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def faults(tag, version, changelog):
    """What keeps the tree from being the release ``tag``, a sentence each."""
    if tag != f"v{version}":
        yield f"the tag is {tag}, and attncore/_version.py says {version}: the tag has to be v{version}"
    first = re.search(r"^## .*$", changelog, re.MULTILINE)
    if not first or not re.fullmatch(rf"## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", first[0]):
        yield f"CHANGELOG.md: its first section is {first and first[0]!r} and has to be '## [{version}] - YYYY-MM-DD'"


def main(tag, root=ROOT):
    text = (root / "attncore" / "_version.py").read_text(encoding="utf-8")
    version = re.search(r'__version__ = "(.*)"', text)[1]
    found = list(faults(tag, version, (root / "CHANGELOG.md").read_text(encoding="utf-8")))
    for one in found:
        print(f"is_release: {one}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
