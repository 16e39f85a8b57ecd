"""What the site makes of the documents: tables of contents from lists of links, and docstrings in docs/api.md."""

import re

SECTION = re.compile(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"^- \[[^]]*\]\(([^)#]+\.md)\)", re.MULTILINE)
FOLDER = re.compile(r"\]\(((?!https?:)[^)#\s]*/)\)")
NAMED = re.compile(r"\[[\w./-]*?([\w-]+\.md)\](\((?!https?:)[^)\s]*\1(#[^)]*)?\))")
SIGNATURES = re.compile(r"<!-- api: (.*?) -->\n.*?<!-- end -->", re.DOTALL)


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
    if isinstance(value, type):
        kind = "exception" if issubclass(value, BaseException) else "class"
        own = any(base.__module__.startswith("attncore.") for base in value.__bases__)
        inherits = "   :inherited-members:\n" if own and kind == "class" else ""  # from parts of a class, and from ABCs
        return f".. auto{kind}:: attncore.{name}\n{inherits}"
    if callable(value):
        return f".. autofunction:: attncore.{name}\n"
    return f".. py:data:: attncore.{name}\n   :value: {value!r}\n"


def read(app, page, source):
    """Sphinx's event ``source-read``: ``source`` holds the text of ``page``."""
    source[0] = FOLDER.sub(r"](\1index.md)", source[0])  # on a code host the link shows the folder
    source[0] = NAMED.sub(r"[]\2", source[0])  # a link that is called by its file gets the title of the page
    if page.endswith("/index"):
        source[0] = contents(source[0], captions=page == app.config.root_doc)
    elif page == "docs/api":
        source[0] = SIGNATURES.sub(documented, source[0])


def setup(app):
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
