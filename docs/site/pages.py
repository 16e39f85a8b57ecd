"""What the site makes of the documents: tables of contents from lists of links; in docs/api.md docstrings, examples."""

import functools
import pathlib
import re

SECTION = re.compile(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"^- \[[^]]*\]\(([^)#]+\.md)\)", re.MULTILINE)
FOLDER = re.compile(r"\]\(((?!https?:)[^)#\s]*/)\)")
NAMED = re.compile(r"\[[\w./-]*?([\w-]+\.md)\](\((?!https?:)[^)\s]*\1(#[^)]*)?\))")
DOCUMENT = re.compile(r"(?<![`/\w])docs/([\w/-]+)\.md\b")
SIGNATURES = re.compile(r"<!-- api: (.*?) -->\n.*?<!-- end -->", re.DOTALL)
EXAMPLE = re.compile(r"^### (\S+)\n\n```python\n(.*?)```", re.DOTALL | re.MULTILINE)
EXAMPLES = pathlib.Path(__file__).parents[1] / "api-examples.md"
ADDED = {
    "docs/performance": """
<iframe class="plots" src="../plots.html" title="Interactive plots of committed runs" loading="lazy"></iframe>
<script>
addEventListener("message", (event) => {
  const plots = document.querySelector(".plots");
  if (event.source === plots.contentWindow && event.data.height > 0) plots.style.height = event.data.height + "px";
});
</script>
<p><a href="../plots.html">The plots on a page of their own</a>;
<a href="../history/index.html">every saved run of the suite over time</a>.</p>
""",
}
"""What stands before the first section of a page: what docs/site/plots.py makes."""


def contents(text, captions):
    """``text`` with a hidden table of contents for each section whose items begin with links to pages."""
    for title, section in SECTION.findall(text):
        if pages := LINK.findall(section):
            caption = [f":caption: {title}"] if captions else []
            text += "\n".join(["", "```{toctree}", ":hidden:", *caption, *pages, "```", ""])
    return text


def documented(match):
    """The directives that show, in place of a block of signatures, its names with their docstrings."""
    return "\n".join(["```{eval-rst}", *(directive(name) for name in match[1].split()), "```"])


def directive(name):
    """The directive of a public name; ``slots`` stands for the module's functions."""
    import attncore

    if name == "slots":
        return ".. automodule:: attncore.slots\n"
    value = getattr(attncore, name)
    if isinstance(value, type) and value.__name__ == name:
        kind = "exception" if issubclass(value, BaseException) else "class"
        own = any(base.__module__.startswith("attncore.") for base in value.__bases__)
        inherits = "   :inherited-members:\n" if own and kind == "class" else ""  # from parts of a class, and from ABCs
        return f".. auto{kind}:: attncore.{name}\n{inherits}"
    if callable(value) and not isinstance(value, type):
        return f".. autofunction:: attncore.{name}\n"
    example = "\n".join(f"   {line}" for line in example_of(name))
    shown = value.__name__ if isinstance(value, type) else repr(value)  # another name of a class
    return f".. py:currentmodule:: attncore\n\n.. py:data:: {name}\n   :value: {shown}\n\n{example}\n"


@functools.cache
def examples():
    """The code of each example, by the name that it is for."""
    return dict(EXAMPLE.findall(EXAMPLES.read_text(encoding="utf-8")))


def example_of(name):
    """The lines of reStructuredText that show a public name's example; none where it has none."""
    code = examples().get(name, "").splitlines()
    lines = (f"   {line}".rstrip() for line in code)
    return [".. rubric:: Example", "", ".. code-block:: python", "", *lines, ""] if code else []


def docstring(app, what, name, value, options, lines):
    """Sphinx's event ``autodoc-process-docstring``: ``lines`` are those of the docstring of ``name``."""
    lines[:] = [DOCUMENT.sub(r":doc:`/docs/\1`", line) for line in lines]
    if re.fullmatch(r"attncore\.(slots\.)?\w+", name):
        lines += ["", *example_of(name.rpartition(".")[2])]


def read(app, page, source):
    """Sphinx's event ``source-read``: ``source`` holds the text of ``page``."""
    if page == "README":
        source[0] = source[0].replace("# attncore\n", "# README\n", 1)  # as docs/index.md calls it
    source[0] = FOLDER.sub(r"](\1index.md)", source[0])  # on a code host the link shows the folder
    source[0] = NAMED.sub(r"[]\2", source[0])  # a link that is called by its file gets the title of the page
    if page.endswith("/index"):
        source[0] = contents(source[0], captions=page == app.config.root_doc)
    elif page == "docs/api":
        source[0] = SIGNATURES.sub(documented, source[0])
    elif page in ADDED:
        source[0] = source[0].replace("\n## ", f"\n```{{raw}} html\n{ADDED[page]}```\n\n## ", 1)


def setup(app):
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", docstring)
    return {"parallel_read_safe": True}
