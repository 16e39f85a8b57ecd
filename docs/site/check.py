"""Checks of the built site that need no browser: headings, alternative texts, names of links, buttons and frames,
landmarks, labels, ids, languages, and the contrast of the theme's colours (contrast.py).

``python docs/site/check.py`` (part of ``make docs``) prints what is wrong and exits with 1 where something is.
"""

import collections
import html.parser
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import contrast

SITE = pathlib.Path(__file__).parents[2] / "build" / "site"
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
LABELS = ("aria-label", "aria-labelledby", "title")
LANDMARKS = {"main": "main", "nav": "navigation", "aside": "complementary"}  # tags, and the roles that say the same


class Page(html.parser.HTMLParser):
    """What is wrong with one page, in ``problems``."""

    def __init__(self, text):
        super().__init__()
        self.problems, self.ids, self.level, self.h1 = [], collections.Counter(), 0, 0
        self.links, self.buttons = [], []  # those that are open: [where, whether it has a name]
        self.landmarks = collections.Counter()  # (role, name)
        self.for_ids, self.inputs = set(), []
        self.title, self.language, self.hidden = False, False, 0
        self.feed(text)
        self.close()
        self.whole()

    def problem(self, what):
        self.problems.append(f"line {self.getpos()[0]}: {what}")

    def handle_starttag(self, tag, pairs):
        given = dict(pairs)
        if one := given.get("id"):
            self.ids[one] += 1
        if (role := given.get("role") or LANDMARKS.get(tag)) in LANDMARKS.values():
            self.landmarks[role, given.get("aria-label") or given.get("aria-labelledby")] += 1
        if tag == "html":
            self.language = bool(given.get("lang"))
        elif tag == "title":
            self.title = True
        elif tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            self.heading(int(tag[1]))
        elif tag == "img":
            self.image(given)
        elif tag == "a" and "href" in given:
            self.links.append([given["href"], any(given.get(name) for name in LABELS)])
        elif tag == "button":
            self.buttons.append([given.get("class"), any(given.get(name) for name in LABELS)])
        elif tag == "iframe" and not given.get("title"):
            self.problem(f"a frame without a title: {given.get('src')}")
        elif tag == "label":
            self.for_ids.add(given.get("for"))
        elif tag in ("input", "select", "textarea") and given.get("type") not in ("hidden", "checkbox", "submit"):
            self.inputs.append((given.get("id"), any(given.get(name) for name in (*LABELS, "placeholder"))))

    def handle_endtag(self, tag):
        if tag == "a" and self.links:
            where, named = self.links.pop()
            if not named:
                self.problem(f"a link without a name, to {where}")
        elif tag == "button" and self.buttons:
            where, named = self.buttons.pop()
            if not named:
                self.problem(f"a button without a name: {where}")

    def handle_data(self, data):
        if data.strip():
            for one in (*self.links, *self.buttons):
                one[1] = True

    def heading(self, level):
        self.h1 += level == 1
        if level > self.level + 1:
            self.problem(f"h{level} behind h{self.level}")
        self.level = level

    def image(self, given):
        if "alt" not in given or (not given["alt"] and given.get("role") != "presentation"):
            self.problem(f"an image without alternative text: {given.get('src')}")
        elif self.links:
            self.links[-1][1] = True

    def whole(self):
        """What is known once the page is read."""
        for what, fine in (("one h1", self.h1 == 1), ("a title", self.title), ("a language", self.language)):
            if not fine:
                self.problem(f"not {what}")
        if (mains := sum(times for (role, _), times in self.landmarks.items() if role == "main")) != 1:
            self.problem(f"not one main landmark: {mains}")
        for (role, name), times in self.landmarks.items():
            if times > 1:
                self.problem(f"{times} landmarks {role} are called {name}")
        for one, times in self.ids.items():
            if times > 1 and not one.startswith("activate-serie-"):  # pygal's, in each of a page's charts
                self.problem(f"the id {one} {times} times")
        for one, named in self.inputs:
            if not named and one not in self.for_ids:
                self.problem(f"a field without a label: {one}")


def main(folder):
    pages = [page for page in sorted(folder.rglob("*.html")) if "_static" not in page.parts]
    found = 0
    for page in pages:
        if page in (folder / "index.html", folder / "search.html"):  # a redirection; made by its script
            continue
        for problem in Page(page.read_text(encoding="utf-8")).problems:
            print(f"{page.relative_to(folder)}: {problem}")
            found += 1
    for problem in contrast.problems(folder / "_static"):
        print(problem)
        found += 1
    if not pages:
        print(f"no page in {folder}")
    return int(bool(found) or not pages)


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]) if sys.argv[1:] else SITE))
