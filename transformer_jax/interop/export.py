"""Take a trained model to another library: python -m transformer_jax.interop.export --workdir W --format F --output DIR."""

from __future__ import annotations

import logging
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformer_jax.errors import UserError
from transformer_jax.program import run_program

logger = logging.getLogger("transformer_jax.export")


@dataclass(frozen=True)
class Arguments:
    """Write a trained model in the format of another library: weights, vocabulary and search settings."""

    workdir: str
    """Work directory of a training run."""
    format: Literal["ctranslate2", "marian", "safetensors"]
    """CTranslate2's folder, Marian's model.npz, or a Hugging Face MarianMT folder with safetensors."""
    output: str
    """Folder to write; it must not exist, or be empty."""
    checkpoint: Literal["last", "best"] | int = "last"
    """The newest checkpoint, the best on dev, or that of a step."""
    average: int | None = None
    """Take the mean of so many checkpoints, up to the chosen one. Default: the run's training.average, 1 unless last."""


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status, as ``run_program`` has it."""
    return run_program(lambda: _export(argv))


def _export(argv: list[str] | None) -> None:
    import tyro  # here, and what follows, so that Ctrl-C is quiet from the start

    arguments = tyro.cli(Arguments, prog="python -m transformer_jax.interop.export", args=argv)
    from transformer_jax.interop.ctranslate2 import export_ctranslate2
    from transformer_jax.interop.huggingface import export_safetensors
    from transformer_jax.interop.marian import export_marian
    from transformer_jax.saved_model import load_model

    output = Path(arguments.output).absolute()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"output is {arguments.output!r}, which is there already; expected a new or empty folder.")
    config, model, tokenizer = load_model(arguments.workdir, average=arguments.average, checkpoint=arguments.checkpoint)
    exports = {"ctranslate2": export_ctranslate2, "marian": export_marian, "safetensors": export_safetensors}
    unfinished = output.with_name(f".{output.name}.unfinished")  # a folder appears whole or not at all
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        notes = exports[arguments.format](config, model, tokenizer, unfinished)
        unfinished.rename(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for note in notes:
        logger.info("note: %s", note)
    logger.info("%s holds the model for %s.", arguments.output, arguments.format)


if __name__ == "__main__":
    sys.exit(main())
