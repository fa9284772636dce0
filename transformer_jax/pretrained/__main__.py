"""Import pretrained models, or compare them with transformers.

python -m transformer_jax.pretrained import --input NAME --workdir W
python -m transformer_jax.pretrained verify NAME ...
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

import tyro

from transformer_jax.cli import run_program
from transformer_jax.errors import UserError
from transformer_jax.storage.files import new_folder

logger = logging.getLogger("transformer_jax.pretrained")


@dataclass(frozen=True)
class Import:
    """Convert a pretrained model in transformers' format (OPUS-MT, M2M100, NLLB, T5, BART, ...) or
    Marian's to a model folder for decode.py and train.py --training.start-from.
    """

    input: str
    """Name of a model on the Hugging Face Hub; a folder with config.json, model.safetensors or its
    shards, and the tokenizer's files; or a folder or zip archive of Marian's own files.
    """
    workdir: str
    """New or empty model folder to write to."""
    revision: str | None = None
    """Branch, tag or commit on the Hub. Default: the main branch."""
    source_language: str = ""
    """Many-to-many models: language code of the source by default."""
    target_language: str = ""
    """Many-to-many models: language code of the target by default."""
    allow_pickle: bool = False
    """Also read pytorch_model.bin, a pickle, if there is no model.safetensors."""

    def run(self) -> None:
        """Write the model folder."""
        from transformer_jax.pretrained.hub import find_pretrained
        from transformer_jax.pretrained.loading import import_into

        pickles = self.allow_pickle
        languages = (self.source_language, self.target_language)
        with new_folder(self.workdir, "workdir") as folder:
            source = find_pretrained(self.input, revision=self.revision, allow_pickle=pickles)
            import_into(source, folder, languages=languages, allow_pickle=pickles)
        logger.info("Translate:  python decode.py --workdir %s", self.workdir)
        start = f"--config {self.workdir}/config.json --training.start-from {self.workdir}"
        logger.info("Fine-tune:  python train.py %s --workdir NEW ...", start)


@dataclass(frozen=True)
class Verify:
    """Compare pretrained models with transformers: token ids, logits, and the beam searches of
    twenty sentences. Prints a table; exit status 2 if a model differs.
    """

    models: tyro.conf.Positional[tuple[str, ...]]
    """Names on the Hugging Face Hub, or folders in transformers' format."""
    source_language: str = ""
    """Many-to-many models: language code of the source. The sentences are English."""
    target_language: str = ""
    """Many-to-many models: language code of the target."""
    allow_pickle: bool = False
    """Also read pytorch_model.bin, a pickle, if there is no model.safetensors."""

    def run(self) -> None:
        """Print the table."""
        from transformer_jax.pretrained.verify import compare_with_transformers, table

        languages = (self.source_language, self.target_language)
        comparisons = []
        for name in self.models:
            comparison = compare_with_transformers(
                name, languages=languages, allow_pickle=self.allow_pickle
            )
            logger.info("%s is compared.", name)
            comparisons.append(comparison)
        print(table(comparisons))
        different_models = [x.name for x in comparisons if not x.is_equal]
        if different_models:
            raise UserError(
                f"{', '.join(different_models)}: results differ from those of transformers; "
                "expected equal ids and logits. Please report the table."
            )


def main(argv: list[str] | None = None) -> int:
    """Run the program. Returns the exit status (see ``run_program``)."""
    return run_program(lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    subcommands: dict[str, Callable[..., Import | Verify]] = {"import": Import, "verify": Verify}
    program = "python -m transformer_jax.pretrained"
    tyro.extras.subcommand_cli_from_dict(subcommands, prog=program, args=argv).run()


if __name__ == "__main__":
    sys.exit(main())
