"""Optional packages: a one-line error names the missing extra."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from transformer_jax.errors import needs_extra

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
USES = {  # code that needs the packages of an extra
    "demo": "import runpy; runpy.run_path('examples/number_names.py')",
    "tfds": "from transformer_jax.data.sources import read_pairs\n"
    "[*read_pairs(transformer_jax.PairsConfig('tfds', ('x',), (), 'a', 'b'))]",
    "parquet": "from transformer_jax.data.sources import read_pairs\n"
    "[*read_pairs(transformer_jax.PairsConfig('parquet', ('README.md',), (), 'a', 'b'))]",
    "paper": "import runpy; runpy.run_path('examples/paper_bleu.py')['moses']('de')",
    "report": "from transformer_jax.report.__main__ import Arguments, _run\n"
    "_run(Arguments(('.',), 'report.html'))",
    "export": "from transformer_jax.pretrained.ctranslate2 import check_ctranslate2\n"
    "check_ctranslate2(transformer_jax.ModelConfig())",
    "gcs": "from transformer_jax.storage.files import to_path; to_path('gs://bucket/run')",
    "s3": "from transformer_jax.storage.files import to_path; to_path('s3://bucket/run')",
}


def names(extra: str) -> list[str]:
    """Modules of an extra's packages."""
    return [re.split("[>=]", each)[0].replace("-", "_") for each in EXTRAS[extra]]


PROGRAM = """
import json, sys, transformer_jax
packages, uses = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(packages))  # not installed, as far as Python knows
for use in uses:
    assert transformer_jax.run_program(lambda: exec(use)) == 2
"""


def test_a_missing_package_is_an_error_that_names_its_extra() -> None:
    packages = [name for extra in USES for name in names(extra)]
    arguments = json.dumps([packages, list(USES.values())])
    command = [sys.executable, "-c", PROGRAM, arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    for extra, line in zip(USES, result.stderr.splitlines(), strict=True):
        package = line.removeprefix("error: ").partition(" ")[0]
        assert package in names(extra)
        install = f"Install it with: pip install '.[{extra}]' (in a clone; for a wheel: "
        install += f"'transformer-jax[{extra}]')."
        assert line == f"error: {package} is not installed. {install}"


def test_all_has_every_extra_but_accelerators_and_object_stores() -> None:
    [everything] = EXTRAS["all"]
    where_it_runs = {"cuda", "tpu", "gcs", "s3"}
    assert set(re.findall(r"\w+", everything.partition("[")[2])) == (
        set(EXTRAS) - {"all"} - where_it_runs
    )
    assert len(PROJECT["dependencies"]) <= 15


def test_a_missing_module_of_the_package_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing"), needs_extra("serve"):
        import transformer_jax.nothing  # noqa: F401
