"""Take a trained model to another library: python -m transformer_jax.interop.export --workdir W
--format F --output DIR.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Literal

from transformer_jax.cli import run_program

logger = logging.getLogger("transformer_jax.export")


@dataclass(frozen=True)
class Arguments:
    """Write a trained model in the format of another library: weights, vocabulary and search
    settings.
    """

    workdir: str
    """Work directory of a training run."""
    format: Literal["ctranslate2", "marian", "safetensors"]
    """CTranslate2's folder, Marian's model.npz, or a Hugging Face MarianMT folder with
    safetensors.
    """
    output: str
    """Folder to write; it must not exist, or be empty."""
    checkpoint: Literal["last", "best"] | int | None = None
    """The newest checkpoint, the best on dev, or that of a step. Default: the newest; the best if
    training.patience ended the run.
    """
    average: int | None = None
    """Take the mean of so many checkpoints, up to the chosen one. Default: the run's
    training.average; with --checkpoint best or a step, 1.
    """


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status, as ``run_program`` has it."""
    return run_program(lambda: _export(argv))


def _export(argv: list[str] | None) -> None:
    import tyro  # here, and what follows, so that Ctrl-C is quiet from the start

    arguments = tyro.cli(Arguments, prog="python -m transformer_jax.interop.export", args=argv)
    from transformer_jax.checkpoint import load_model
    from transformer_jax.interop.ctranslate2 import export_ctranslate2
    from transformer_jax.interop.huggingface import export_safetensors
    from transformer_jax.interop.marian import export_marian
    from transformer_jax.interop.new_folder import new_folder
    from transformer_jax.remote_workdir import local_workdir, require_folder

    exports = {
        "ctranslate2": export_ctranslate2,
        "marian": export_marian,
        "safetensors": export_safetensors,
    }
    with new_folder(require_folder(arguments.output, "output"), "output") as folder:
        config, model, tokenizer = load_model(
            local_workdir(arguments.workdir),
            average=arguments.average,
            checkpoint=arguments.checkpoint,
        )
        notes = exports[arguments.format](config, model, tokenizer, folder)
    for note in notes:
        logger.info("note: %s", note)
    logger.info("%s holds the model for %s.", arguments.output, arguments.format)


if __name__ == "__main__":
    sys.exit(main())
