"""Imports point up the list of modules only, as docs/design.md promises; the package's names are
there, when asked for.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_jax

ROOT = Path(__file__).resolve().parents[1]
ORDER = [
    "errors",
    "special_ids",
    "machine",
    "storage",
    "config_checks",
    "config",
    "config_io",
    "cli",
    "subword_sampling",
    "subword_model",
    "imported_vocabulary",
    "tokenizer",
    "sharding",
    "distributed",
    "data.files",
    "data.sources",
    "data.tokenize",
    "data.shards",
    "data.corpus",
    "data.packing",
    "data.windows",
    "data.bucketing",
    "data.batching",
    "data.loader",
    "model.dropout",
    "model.attention",
    "model.cache",
    "model.layers",
    "model.transformer",
    "checkpoint",
    "remote_workdir",
    "decoding.constraints",
    "decoding.search",
    "decoding.beam_search",
    "decoding.sampling",
    "decoding.models",
    "decoding.continuous_batching",
    "decoding.buckets",
    "decoding.lexicon",
    "decoding.shortlist",
    "decoding.learn_shortlist",
    "decoding.engine",
    "decoding.segments",
    "decoding.translator",
    "decoding.scoring",
    "decoding.records",
    "decoding.alignment",
    "decoding.output_file",
    "evaluation",
    "decoding.flags",
    "decoding.job",
    "decoding.__main__",
    "training.resuming",
    "training.loss",
    "training.optimizer",
    "training.step",
    "training.progress",
    "training.early_stopping",
    "training.saver",
    "training.prepare",
    "training.tokenize_ahead",
    "training.reporting",
    "training.summary",
    "training.watchdog",
    "training.signals",
    "training.evaluator",
    "training.loop",
    "training.__main__",
    "parsing.trees",
    "parsing.bracketing",
    "parsing.__main__",
    "interop.vocabulary",
    "interop.weights",
    "interop.export",
    "interop.huggingface",
    "interop.ctranslate2",
    "interop.marian",
    "interop.__main__",
]


def test_every_module_is_listed_and_imports_only_earlier_ones() -> None:
    package = ROOT / "transformer_jax"
    files = {
        ".".join(path.relative_to(package).with_suffix("").parts): path
        for path in package.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert sorted(files) == sorted(ORDER)
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "transformer_jax"
            ):
                imported = (node.module or "").removeprefix("transformer_jax").lstrip(".")
                targets = (
                    [imported]
                    if imported in files
                    else [f"{imported}.{alias.name}".lstrip(".") for alias in node.names]
                )
                for target in targets:
                    assert ORDER.index(target) < ORDER.index(name), f"{name} imports {target}"


@pytest.mark.parametrize("program", ["train.py", "decode.py"])
def test_help_needs_no_jax(program: str) -> None:
    code = f"import runpy, sys; sys.argv = [{program!r}, '--help']\ntry: runpy.run_path({program!r}, run_name='__main__')\n"
    code += "except SystemExit: sys.exit('jax' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL).returncode
        == 0
    )


def test_the_package_offers_what_its_stub_lists() -> None:
    stub = ast.parse((ROOT / "transformer_jax" / "__init__.pyi").read_text())
    [listed] = [ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign)]
    assert sorted(transformer_jax.__all__) == sorted(listed)
    for name in listed:
        offered = getattr(transformer_jax, name)
        assert isinstance(offered, int) or offered.__module__.startswith("transformer_jax.")


def test_make_quick_names_tests_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    [quick] = re.findall(r"^QUICK := (.*)", makefile, re.MULTILINE)
    assert all((ROOT / name).exists() for name in quick.split())
