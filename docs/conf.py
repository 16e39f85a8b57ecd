"""Settings of the site: Sphinx reads the Markdown documents of the whole checkout (``make docs``).

The source folder is the root, so that the documents' relative links hold here as on a code host.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs" / "site"), str(ROOT)]

from attncore import __version__  # noqa: E402

project = "attncore"
author = "The attncore developers"
copyright = "The attncore developers. Apache-2.0"  # noqa: A001
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "pages", "accessible"]
source_suffix = {".md": "markdown"}
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "plugins/*/README.md"]
exclude_patterns = [".*", "build", "attncore", "tests", "benchmarks", "examples", "plugins/*/src", "plugins/*/tests"]

myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # a page may begin with a heading of the second level
nitpicky = False
# The shell's lines and outputs of commands are indented blocks, which have no language.
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
toc_object_entries_show_parents = "hide"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

pygments_dark_style = "a11y-high-contrast-dark"  # the theme's own has a comment of too little contrast
html_theme = "furo"
html_title = f"attncore {release}"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs" / "site" / "search.js")
html_extra_path = ["site/root"]
html_copy_source = False
html_show_sourcelink = False

linkcheck_anchors = False
linkcheck_timeout = 20
