"""Bring a Hugging Face MarianMT model here: python -m transformer_jax.interop.import_huggingface
--input F --workdir W.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from transformer_jax.cli import run_program

logger = logging.getLogger("transformer_jax.import")


@dataclass(frozen=True)
class Arguments:
    """Make a work directory, for decode.py and train.py, of a Hugging Face MarianMT folder (OPUS-MT
    models, for example).
    """

    input: str
    """Folder with config.json, vocab.json, source.spm, target.spm, and model.safetensors or
    pytorch_model.bin.
    """
    workdir: str
    """Work directory to write; it must not exist, or be empty."""


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status, as ``run_program`` has it."""
    return run_program(lambda: _import(argv))


def _import(argv: list[str] | None) -> None:
    import tyro  # here, and what follows, so that Ctrl-C is quiet from the start

    arguments = tyro.cli(
        Arguments, prog="python -m transformer_jax.interop.import_huggingface", args=argv
    )
    from transformer_jax.interop.new_folder import new_folder
    from transformer_jax.interop.read_huggingface import read_marian
    from transformer_jax.remote_workdir import require_folder
    from transformer_jax.training.saver import save_imported

    workdir = require_folder(arguments.workdir)
    with new_folder(workdir, "workdir") as folder:
        imported = read_marian(Path(arguments.input))
        save_imported(folder, imported.config, imported.tokenizer, imported.parameters)
    for note in imported.notes:
        logger.info("note: %s", note)
    logger.info("translate:  python decode.py --workdir %s", workdir)
    logger.info(
        "train on:   python train.py --config %s --workdir %s --data...",
        workdir / "config.json",
        workdir,
    )


if __name__ == "__main__":
    sys.exit(main())
