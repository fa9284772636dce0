"""Sphinx configuration of the documentation site, built by `make docs`."""

import re
import typing
from pathlib import Path

from sphinx.application import Sphinx

from transformer_jax.settings import checks

ROOT = Path(__file__).resolve().parents[1]

project = "transformer_jax"
extensions = [
    "myst_nb",  # Markdown pages and notebooks
    "sphinx_external_toc",  # page order from _toc.yml; docs/index.md is the home page
    "sphinx.ext.autodoc",  # docs/api.md, docs/settings.md
    "sphinx.ext.napoleon",  # docstrings in Google's style
    "sphinx.ext.viewcode",
]
include_patterns = ["C*.md", "SECURITY.md", "docs/*.md", "docs/log/*.md"]
include_patterns += ["docs/tutorials/*.md", "notebooks/*.ipynb"]
exclude_patterns = [  # folders without pages: .venv, runs, ...
    path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("docs", "notebooks")
]
external_toc_path = "docs/_toc.yml"
myst_enable_extensions = ["attrs_inline"]  # CSS classes on images
myst_heading_anchors = 4  # anchors like GitHub's
nb_execution_mode = "off"  # notebooks are stored with their output
highlight_language = "none"  # as on GitHub

autodoc_default_options = {"members": True, "member-order": "bysource", "exclude-members": "rules"}
autodoc_type_aliases = {  # show ranges by name
    name: name for name, kind in vars(checks).items() if typing.get_origin(kind) is typing.Annotated
}

add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = project
html_theme_options = {"top_of_page_buttons": []}
html_copy_source = False
html_show_copyright = False  # see LICENSE
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_redirect"]

PICTURE = re.compile(
    r'<picture>.*?srcset="(.*?)".*?src="(.*?)" alt="(.*?)".*?</picture>', re.DOTALL
)


def setup(app: Sphinx) -> None:
    """Keep Napoleon from parsing the text before a colon in a field's first line as its type, by
    adding an empty comment as the first line. Fields also have no emphasis (*) and no links (_), as
    --help shows them. Switch each <picture> with the site's theme. Pages of the log are reached by
    links alone.
    """

    def add_line(_: Sphinx, kind: str, *rest: list[str]) -> None:
        if kind in ("attribute", "property", "data"):
            escaped = [re.sub(r"\*|_(?=\s)", r"\\\g<0>", line) for line in rest[-1]]
            rest[-1][:] = ["..", "", *escaped]

    def adapt(_: Sphinx, name: str, source: list[str]) -> None:
        source[0] = PICTURE.sub(r"![\3](\1){.only-dark} ![\3](\2){.only-light}", source[0])
        if name.startswith("docs/log/"):
            source[0] = f"---\norphan: true\n---\n{source[0]}"

    app.connect("autodoc-process-docstring", add_line, priority=100)
    app.connect("source-read", adapt)
