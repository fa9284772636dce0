"""Imports point up the list of modules only, as docs/design.md promises."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDER = [
    "errors",
    "program",
    "config",
    "config_files",
    "subwords",
    "tokenizer",
    "sharding",
    "processes",
    "data.files",
    "data.sources",
    "data.tokenising",
    "data.joined",
    "data.corpus",
    "data.parts",
    "data.packing",
    "data.shapes",
    "data.windows",
    "data.batching",
    "data.evaluation_batches",
    "data.loader",
    "model.attention",
    "model.layers",
    "model.cache",
    "model.transformer",
    "model.alignment",
    "remote",
    "saved_model",
    "decoding.search",
    "decoding.constraints",
    "decoding.beam_search",
    "decoding.sampling",
    "decoding.queue",
    "decoding.reduced_softmax",
    "decoding.ensemble",
    "decoding.lexicon",
    "decoding.shortlist",
    "decoding.learn_shortlist",
    "decoding.engine",
    "decoding.translator",
    "decoding.scoring",
    "decoding.records",
    "decoding.alignments",
    "decoding.output",
    "decoding.resuming",
    "decoding.parts",
    "evaluation",
    "training.loss",
    "training.optimizer",
    "training.step",
    "training.checkpoint",
    "training.metrics",
    "training.workdir",
    "data.prepare",
    "training.watchdog",
    "training.evaluator",
    "training.loop",
    "parsing.trees",
    "parsing.bracketing",
    "parsing.__main__",
    "interop.generation",
    "interop.weights",
    "interop.vocabulary",
    "interop.huggingface_weights",
    "interop.huggingface",
    "interop.read_huggingface",
    "interop.ctranslate2",
    "interop.marian",
    "interop.export",
    "interop.import_marian",
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
                targets = [imported] if imported in files else [f"{imported}.{alias.name}".lstrip(".") for alias in node.names]
                for target in targets:
                    assert ORDER.index(target) < ORDER.index(name), f"{name} imports {target}"
