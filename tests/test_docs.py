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


def test_flags_of_decode_exist() -> None:
    programs = ROOT / "decode.py", ROOT / "transformer_jax" / "decoding" / "shortlist.py"  # the page is about both
    fields = [name for file in programs for name in re.findall(r"^    (\w+): .* = ", file.read_text(), re.MULTILINE)]
    flags = {field.replace("_", "-") for field in fields} | {"help"}
    text = re.sub(r"srun .*? sh", "", (ROOT / "docs" / "decoding.md").read_text())
    commands = "\n".join(line for line in text.replace("\\\n", "").split("\n") if "decode.py" in line or "`--" in line)
    named = set(re.findall(r"--([a-z-]+)", commands))
    assert len(named) > 20 and not named - flags, f"docs/decoding.md names {named - flags}"
