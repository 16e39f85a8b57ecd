"""The site: docs/index.md lists every page once; what docs/site makes of documents and of pages, and finds in them."""

import importlib.util
import pathlib
import re
import types

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"


SPHINX = types.SimpleNamespace(config=types.SimpleNamespace(root_doc="docs/index"))


def module(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def pages():
    return module("pages")


@pytest.mark.parametrize("folder", [DOCS, DOCS / "design"], ids=lambda folder: folder.name)
def test_an_index_lists_every_page_once(folder, pages):
    listed = [page for page in pages.LINK.findall((folder / "index.md").read_text()) if "/" not in page]
    assert sorted(listed) == sorted(page.name for page in folder.glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("folder", [DOCS, DOCS / "design"], ids=lambda folder: folder.name)
def test_a_page_is_called_by_its_title(folder, pages):
    listed = re.findall(r"^- \[([^]]*)\]\(([^)#]+\.md)\)", (folder / "index.md").read_text(), re.MULTILINE)
    titles = {page: [(folder / page).read_text()] for _, page in listed}
    for page, text in titles.items():
        pages.read(SPHINX, (folder / page).resolve().relative_to(ROOT).with_suffix("").as_posix(), text)
    wrong = [(name, page) for name, page in listed if not re.search(rf"^#+ {re.escape(name)}$", titles[page][0], re.M)]
    assert len(listed) > 10
    assert not wrong


def test_sections_of_links_become_tables_of_contents(pages):
    text = "# T\n\n[x](no.md)\n\n## One\n\n- [A](a.md): a\n- [B](../b.md)\n\n## Two\n\ntext [c](c.md)\n"
    tables = re.findall(r"```{toctree}\n(.*?)```", pages.contents(text, captions=True), re.DOTALL)
    assert tables == [":hidden:\n:caption: One\na.md\n../b.md\n"]


def test_blocks_of_signatures_become_docstrings(pages):
    text = "<!-- api: InputBatch select PAD_SLOT_ID slots -->\n```python\nclass InputBatch\n```\n<!-- end -->"
    made = pages.SIGNATURES.sub(pages.documented, text)
    for directive in (
        "autoclass:: attncore.InputBatch",
        "autofunction:: attncore.select",
        "automodule:: attncore.slots",
    ):
        assert directive in made
    assert "   :value: -1" in made
    assert "class InputBatch" not in made


def test_links_on_the_site(pages):
    text = [
        "[device.md](device.md#steps) [d](docs/design/) [device](device.md) [a.md](https://x.org/a.md) [b.md](c.md)"
    ]
    pages.read(None, "docs/x", text)
    assert text == [
        "[](device.md#steps) [d](docs/design/index.md) [device](device.md) [a.md](https://x.org/a.md) [b.md](c.md)"
    ]


def test_an_example_stands_below_the_docstring_of_its_name(pages):
    lines = ["Chooses."]
    pages.docstring(None, "function", "attncore.select", None, None, lines)
    assert ".. rubric:: Example" in lines
    assert any("attncore.select(" in line for line in lines)
    before = ["A method, by the rules of docs/list-builder.md."]
    pages.docstring(None, "method", "attncore.Choice.select", None, None, before)
    assert before == ["A method, by the rules of :doc:`/docs/list-builder`."]


GOOD = (
    '<html lang="en"><head><title>t</title></head><body><h1 id="a">A</h1><h2>B</h2><a href="x"><img src="i" alt="plot">'
    '</a><a href="y">y</a><label for="q">Search</label><input id="q"><main><nav aria-label="n"></nav><nav></nav></main>'
    '<iframe title="plots"></iframe><button>x</button></body></html>'
)


def test_a_good_page_has_no_problems():
    assert module("check").Page(GOOD).problems == []


@pytest.mark.parametrize(
    ("found", "worse", "said"),
    [
        ("<h2>B</h2>", "<h3>B</h3>", "h3 behind h1"),
        (' alt="plot"', "", "an image without alternative text: i"),
        (">y</a>", "></a>", "a link without a name, to y"),
        ("<h2>", "<h1>", "not one h1"),
        ("<h2>", '<h2 id="a">', "the id a 2 times"),
        (' lang="en"', "", "not a language"),
        ("<title>t</title>", "", "not a title"),
        ('for="q"', 'for="p"', "a field without a label: q"),
        ("<main>", "<main></main><main>", "not one main landmark: 2"),
        ("main>", "div>", "not one main landmark: 0"),
        (' aria-label="n"', "", "2 landmarks navigation are called None"),
        (' title="plots"', "", "a frame without a title: None"),
        (">x</button>", "></button>", "a button without a name: None"),
    ],
)
def test_a_page_that_is_hard_to_read_is_found(found, worse, said):
    page = GOOD.replace(found, worse)
    assert page != GOOD
    assert [problem for problem in module("check").Page(page).problems if problem.endswith(said)]


FURO = (
    "body{%s}@media x{body[data-theme=dark]{--color-foreground-primary:#eee;--color-background-primary:#111;"
    "--color-highlighted-background:#222;--color-problematic:#eee}}"
)


def themed(folder, found="", worse=""):
    """What is wrong with a theme and with highlighted code, once ``found`` in them is ``worse``."""
    contrast = module("contrast")
    names = {"problematic", *contrast.PAIRS, *(text for texts in contrast.PAIRS.values() for text in texts)}
    own = {"foreground-primary": "#000", "background-primary": "#fff", "highlighted-background": "#fff"}
    grounds = dict.fromkeys(contrast.PAIRS, "var(--color-background-primary)")
    colours = dict.fromkeys(names, "var(--color-foreground-primary)") | grounds | own
    (folder / "styles").mkdir(exist_ok=True)
    theme = FURO % ";".join(f"--color-{name}:{colour}" for name, colour in sorted(colours.items()))
    code = ".highlight { background: #ffffff; color: #000 }\n.highlight .c { color: #555555 } /* Comment */\n"
    code += code.replace(".highlight", 'body[data-theme="dark"] .highlight').replace("#555555", "#000")
    for file, text in (("styles/furo.css", theme), ("pygments.css", code)):
        (folder / file).write_text(text.replace(found, worse) if found else text)
    return list(contrast.problems(folder))


def test_texts_of_the_theme_and_of_code_have_contrast(tmp_path):
    assert themed(tmp_path) == []
    assert themed(tmp_path, "#555555", "#999999") == ["light: highlight .c: 2.85 to 1"]
    dark = themed(tmp_path, "dark]{--color-foreground-primary:#eee", "dark]{--color-foreground-primary:#333")
    assert "dark: foreground-primary on background-primary: 1.49 to 1" in dark
    assert not [problem for problem in dark if problem.startswith("light")]


def test_finished_pages_are_mended_once():
    mended = module("accessible").mended
    page = '<pre>x</pre><dl>\n<dd><em class="sig-param">a</em>,</dd>\n</dl><th class="head"><p></p></th>'
    better = mended(page)
    assert better.startswith('<pre tabindex="0">x</pre><div class="sig-lines"><div class="sig-line"><em')
    assert "<dl>" not in better
    assert "<th" not in better
    assert mended(better) == better


def test_the_plots_are_of_committed_runs():
    pytest.importorskip("pygaljs", reason="pygal draws the plots; requirements/docs.txt has it")
    plots = module("plots")
    (name, run), (_, steps) = plots.newest("peers/*.json"), plots.newest("gpu/served_step_*.json")
    assert (ROOT / name).is_file()
    charts = [*plots.peers(run), *plots.served(steps)]
    assert len(charts) == len(run["peers"]) + 2
    assert all(chart.startswith("<svg") for chart in charts)
    assert run["peers"][0]["peer"] in charts[0]
    lines = [colours_of(chart) for chart in charts[: len(run["peers"])]]
    assert all(len(set(one.values())) == len(one) > 5 for one in lines), "two lines of a chart look alike"
    assert len(shared := lines[0].keys() & lines[1].keys()) > 1
    assert all(lines[0][way] == lines[1][way] for way in shared)


def colours_of(chart):
    """The name of each line of a chart, and its colour."""
    names = re.findall(r'class="legend reactive activate-serie[^>]*>.*?<text[^>]*>(.*?)</text>', chart, re.DOTALL)
    colours = dict(re.findall(r"\.color-(\d+)[^{]*\{\s*stroke:\s*([^;]+);", chart))
    return {name: colours[str(number)] for number, name in enumerate(names)}
