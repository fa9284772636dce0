"""Checks and files shared by the exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformer_jax import ModelConfig, Tokenizer, UserError, local_workdir


def check_fields(shape: ModelConfig, library: str, **allowed: tuple[object, ...]) -> None:
    """Raise ``UserError`` for a field whose value ``library`` does not support.

    Both exports support only the paper's value of some fields.
    """
    paper = "position_offset", "embedding_norm", "attention_scale", "output_scale"
    allowed = {name: (getattr(ModelConfig(), name),) for name in paper} | allowed
    scales = ("all", "tokens") if shape.positions == "interleaved" else ("all",)
    for name, values in ({"embedding_scale": scales} | allowed).items():
        if getattr(shape, name) not in values:
            raise UserError(
                f"model.{name} is {getattr(shape, name)!r}; expected "
                f"{' or '.join(map(repr, values))}. {library} supports no other value."
            )


def write_sentencepiece(tokenizer: Tokenizer, folder: Path) -> tuple[list[str], list[str]]:
    """Write source.spm and target.spm to ``folder``. Returns the source and target tokens in id
    order.
    """
    sides = {"source.spm": tokenizer.source, "target.spm": tokenizer.target}
    for name, side in sides.items():
        (folder / name).write_bytes(side.model)
    source, target = (side.tokens(range(side.vocab_size)) for side in sides.values())
    return source, target


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an indented JSON object, in UTF-8."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model_card(workdir: str, codes: tuple[str, ...], folder: Path) -> None:
    """Write README.md: language codes, and a finished run's test scores with their signatures."""
    run = local_workdir(workdir)
    rows = ""
    summary = run / "summary.json"
    if (run / "model").is_dir() and summary.exists():  # without model/, the scores are old
        scores = json.loads(summary.read_text()).get("test", {})
        rows = "\n".join(f"- {name}: `{value}`" for name, value in scores.items())
    text = f"""---
language: {[*codes]}
pipeline_tag: translation
tags: [transformer_jax]
---

# {run.resolve().name}

Exported by transformer_jax. Scores on its test set, if it has one:

{rows}
"""
    (folder / "README.md").write_text(text, encoding="utf-8")
