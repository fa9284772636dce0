"""The documentation site: what it is made of, and that it is made without a warning."""

import ast
import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, as `make docs` makes them."""
    pytest.importorskip("myst_nb", reason="needs the packages of requirements-docs.txt")
    folder = tmp_path_factory.mktemp("site")
    makefile = (ROOT / "Makefile").read_text()
    [arguments] = re.findall(r"^\t\$\(RUN\) -m sphinx (.*) build/site$", makefile, re.MULTILINE)
    made = subprocess.run(
        [sys.executable, "-m", "sphinx", *arguments.split(), str(folder)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert made.returncode == 0 and not made.stdout, made.stdout
    return folder


def test_every_document_is_a_page_and_local_links_lead_somewhere(site: Path) -> None:
    documents = {*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")}
    pages = {site / path.relative_to(ROOT).with_suffix(".html") for path in documents}
    assert pages < set(site.rglob("*.html"))
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


def test_the_api_pages_have_what_the_package_offers(site: Path) -> None:
    stub = ast.parse((ROOT / "transformer_jax" / "__init__.pyi").read_text())
    [names] = [ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign)]
    pages = "".join((site / "docs" / f"{name}.html").read_text() for name in ("api", "settings"))
    anchors = re.findall(r'id="transformer_jax\.(\w+)"', pages)
    assert sorted(anchors) == sorted(names)
    assert "Number of source tokens where the vocabularies are separate; None: one" in pages
