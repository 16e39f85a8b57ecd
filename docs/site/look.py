"""Screenshots of the built site at two widths, by Chromium without a window: to be looked at.

``python docs/site/look.py [PAGE ...]``, behind ``make docs``; pages as docs/index, by default a handful of each kind.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
SITE, SHOTS = ROOT / "build" / "site", ROOT / "build" / "screenshots"
PAGES = ("docs/index", "docs/first-steps", "docs/api", "docs/capabilities", "docs/troubleshooting", "docs/performance")
WIDTHS = (1280, 500)  # Chromium's windows are no narrower than 500
HEIGHT = 1600


def main(pages):
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        return "look.py: no Chromium on the path; install the package chromium"
    if missing := [page for page in pages if not (SITE / f"{page}.html").is_file()]:
        return f"look.py: {missing[0]} is no page of {SITE}; run make docs first"
    SHOTS.mkdir(parents=True, exist_ok=True)
    for page in pages:
        for width in WIDTHS:
            print(shot(chromium, page, width))
    return 0


def shot(chromium, page, width):
    """The file of one screenshot, taken with a profile of its own and without a network."""
    target = SHOTS / f"{page.replace('/', '-')}-{width}.png"
    with tempfile.TemporaryDirectory() as profile:
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
        words += ["--disable-component-update", "--proxy-server=127.0.0.1:9", f"--user-data-dir={profile}"]
        words += ["--hide-scrollbars", f"--window-size={width},{HEIGHT}", f"--screenshot={target}"]
        address = (SITE / f"{page}.html").as_uri()
        subprocess.run([chromium, *words, address], check=True, capture_output=True, timeout=120)
    return target


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PAGES))
