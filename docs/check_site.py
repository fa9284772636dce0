"""Checks of the documentation site, which `make docs` runs: every document but README.md is a
page, local links lead somewhere, newcomers' terms are in the search index, and the API reference
has the names that the package offers.

    python docs/check_site.py build/site
"""

import ast
import html
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def check_links(site: Path) -> None:
    documents = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "README.md"}
    pages = {site / path.relative_to(ROOT).with_suffix(".html") for path in documents}
    assert not (missing := pages - set(site.rglob("*.html"))), f"no pages: {missing}"
    for page in pages | {site / "index.html"}:
        text = page.read_text()
        for link in set(re.findall(r'(?:href|src|url)="?([^"]*)"', text)):
            name, _, anchor = html.unescape(link).partition("#")
            if ":" in name or name.startswith("data"):
                continue
            target = page.parent / name.partition("?")[0] if name else page
            assert target.exists(), f"{page.name} links to {link}"
            if anchor and target.suffix == ".html":
                assert f'id="{anchor}"' in target.read_text(), f"{page.name} links to {link}"


def check_api(site: Path) -> None:
    stub = ast.parse((ROOT / "transformer_jax" / "__init__.pyi").read_text())
    [names] = [ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign)]
    pages = "".join((site / "docs" / f"{name}.html").read_text() for name in ("api", "settings"))
    anchors = set(re.findall(r'id="transformer_jax\.(\w+)"', pages))
    differences = anchors.symmetric_difference(names)
    assert not differences, f"in the API reference or in __init__.pyi alone: {differences}"
    assert "Size of the source vocabulary if it is separate; None: one" in pages


def check_search(site: Path) -> None:
    """The search finds terms by which newcomers look."""
    index = (site / "searchindex.js").read_text()
    terms = set(re.findall(r'"?([\w-]+)"?:', index[index.index("terms:") :]))
    for word in ("cache", "accumul", "precis", "penalti", "loader", "prefetch", "checkpoint"):
        assert word in terms, f"the search index lacks {word}"


if __name__ == "__main__":
    check_links(Path(sys.argv[1]))
    check_api(Path(sys.argv[1]))
