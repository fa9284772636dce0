"""What the documents name exists: files, config fields, links."""

import re
from pathlib import Path

import pytest

from transformer_jax.config import Config
from transformer_jax.config_files import flatten

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_named_files_and_fields_exist(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"\b(?:configs|benchmarks|docs)/\w+\.(?:py|md)", text):
        assert (ROOT / name).exists(), f"{path.name} names {name}"
    fields = set(flatten(Config()))
    sections = {field.split(".")[0] for field in fields if "." in field}
    for flag in re.findall(rf"--((?:{'|'.join(sections)})\.[\w.-]+)", text):
        assert flag.replace("-", "_").replace(".no_", ".") in fields, f"{path.name} names --{flag}"
