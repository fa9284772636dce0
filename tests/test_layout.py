"""Imports point up the list of modules only, as docs/design.md promises."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDER = [
    "errors",
    "config",
    "config_files",
    "subwords",
    "tokenizer",
    "sharding",
    "data.sources",
    "data.tokenising",
    "data.corpus",
    "data.packing",
    "data.batching",
    "data.evaluation_batches",
    "data.loader",
    "model.attention",
    "model.layers",
    "model.transformer",
    "saved_model",
    "decoding.beam_search",
    "decoding.translator",
    "evaluation",
    "training.loss",
    "training.optimizer",
    "training.step",
    "training.checkpoint",
    "training.metrics",
    "training.workdir",
    "training.loop",
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
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer_jax"):
                imported = (node.module or "").removeprefix("transformer_jax").lstrip(".")
                targets = [imported] if imported in files else [alias.name for alias in node.names]
                for target in targets:
                    assert ORDER.index(target) < ORDER.index(name), f"{name} imports {target}"
