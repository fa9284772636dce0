"""GitHub workflows: valid schema, pinned actions, minimal permissions, existing commands."""

import ast
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize(
    "tool",
    ["check-jsonschema --builtin-schema vendor.github-workflows", "zizmor --offline --pedantic"],
    ids=lambda tool: tool.split()[0],
)
def test_linters_pass(tool: str) -> None:
    names = ["pages.yml", "release.yml", "test-all.yml", "test.yml"]
    assert [path.name for path in WORKFLOWS] == names
    name, *flags = tool.split()
    program = Path(sysconfig.get_path("scripts"), name)
    run = subprocess.run([program, *flags, *WORKFLOWS], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_depend_on_existing_jobs_and_targets(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    assert {job["needs"] for job in jobs.values() if "needs" in job} <= set(jobs)
    targets = " ".join(re.findall(r"run: make ([\w -]+)", path.read_text())).split()
    for job in jobs.values():
        targets += job.get("strategy", {}).get("matrix", {}).get("tests", [])
    assert all(f"\n{target}: " in (ROOT / "Makefile").read_text() for target in targets)


def test_named_test_files_exist() -> None:
    """In the Makefile, and in the order of slow files."""
    files = [ROOT / "Makefile", ROOT / "tests" / "conftest.py"]
    makefile, conftest = (file.read_text() for file in files)
    slow = re.findall(r'^        "([\w/]+)",$', conftest, re.MULTILINE)
    names = re.findall(r"\btests(?:/\w+)+(?:\.\w+)?", makefile)
    names += [f"tests/{name}.py" for name in slow]
    assert len(slow) > 10 and len(names) > len(slow) + 10
    assert not [name for name in names if not (ROOT / name).exists()]


def test_every_file_has_a_test_in_make_test() -> None:
    """Not all of its tests are marked as exhaustive."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        functions = [x for x in ast.parse(path.read_text()).body if hasattr(x, "decorator_list")]
        tests = [x for x in functions if x.name.startswith("test_")]
        marks = [{ast.unparse(mark) for mark in test.decorator_list} for test in tests]
        assert any("pytest.mark.exhaustive" not in of_test for of_test in marks), path


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == project["version"]
    assert f"] {project['version']}" in (ROOT / "CHANGELOG.md").read_text()
