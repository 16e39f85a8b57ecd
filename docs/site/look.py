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
WIDTHS = (1280, 390)
NARROWEST = 500  # of Chromium's windows: a narrower page stands in a frame
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
        framed = pathlib.Path(profile, "page.html")
        style = f"border: 0; left: 0; position: fixed; top: 0; width: {width}px; height: {HEIGHT}px"
        address = (SITE / f"{page}.html").as_uri()
        framed.write_text(f'<iframe src="{address}" style="{style}"></iframe>', encoding="utf-8")
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
        words += ["--disable-component-update", "--proxy-server=127.0.0.1:9", f"--user-data-dir={profile}"]
        words += ["--hide-scrollbars", f"--window-size={max(width, NARROWEST)},{HEIGHT}", f"--screenshot={target}"]
        subprocess.run([chromium, *words, framed.as_uri()], check=True, capture_output=True, timeout=120)
    return target


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PAGES))
