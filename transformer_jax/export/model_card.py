"""README.md of an export, a model card for the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path

from transformer_jax import local_workdir


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
