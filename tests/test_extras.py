"""Optional packages: a one-line error names the missing extra."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from transformer_jax import UserError, needs_extra

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
USES = {  # what fails without the packages of an extra
    "demo": "from transformer_jax.data.sources import read_pairs\n"
    "[*read_pairs(transformer_jax.PairsConfig('numbers'))]",
    "tfds": "from transformer_jax.data.sources import read_pairs\n"
    "[*read_pairs(transformer_jax.PairsConfig('tfds', ('x',), (), 'a', 'b'))]",
    "paper": "from transformer_jax.evaluation import check_bleu\ncheck_bleu('13a', 'de')",
    "figures": "from transformer_jax.figures.drawing import _figure; _figure(1, 1)",
    "report": "from transformer_jax.report.__main__ import _run\n"
    "_run(['--workdir', '.', '--output', 'report.html'])",
    "interop": "from transformer_jax.interop.huggingface import export_huggingface\n"
    "export_huggingface(None, None, None, None)",
    "gcs": "from transformer_jax.storage import to_path; to_path('gs://bucket/run')",
    "s3": "from transformer_jax.storage import to_path; to_path('s3://bucket/run')",
}


def names(extra: str) -> list[str]:
    """The packages of an extra, as they are imported."""
    return [re.split("[>=]", each)[0].replace("-", "_") for each in EXTRAS[extra]]


@pytest.mark.parametrize("extra", USES)
def test_each_missing_package_is_one_line(extra: str) -> None:
    code = "import sys, transformer_jax\n"
    for name in names(extra):
        code += f"sys.modules[{name!r}] = None\n"
    code += f"def use():\n    exec({USES[extra]!r})\n"
    code += "sys.exit(transformer_jax.run_program(use))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 2, result.stderr
    [line] = result.stderr.splitlines()
    assert re.search(rf"({'|'.join(names(extra))}) is not installed\. ", line)
    assert line.endswith(f"pip install 'transformer-jax[{extra}]'.")


def test_all_has_every_part_of_the_package() -> None:
    [everything] = EXTRAS["all"]
    where_it_runs = {"cuda", "tpu", "gcs", "s3"}
    assert set(re.findall(r"\w+", everything.partition("[")[2])) == (
        set(EXTRAS) - {"all"} - where_it_runs
    )
    assert len(PROJECT["dependencies"]) <= 14


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "num2words", None)
    with pytest.raises(UserError) as caught, needs_extra("demo"):
        import num2words  # noqa: F401
    assert str(caught.value) == (
        "num2words is not installed. Install it with: pip install 'transformer-jax[demo]'."
    )


def test_mistakes_in_own_modules_stay_import_errors() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing"), needs_extra("serve"):
        import transformer_jax.nothing  # noqa: F401
