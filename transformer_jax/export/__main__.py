"""Export a trained model to another library.

python -m transformer_jax.export --workdir W --format F --output DIR
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Literal

from transformer_jax import UserError, parse_flags, run_program
from transformer_jax.storage.files import new_folder

logger = logging.getLogger("transformer_jax.export")


@dataclass(frozen=True)
class Export:
    """Export a trained model's weights, vocabulary and search settings to another library."""

    workdir: str
    """Work directory of a training run, the folder of one of its checkpoints, or a model folder."""
    format: Literal["argos", "ctranslate2", "huggingface", "marian"]
    """A package for Argos Translate and LibreTranslate, a CTranslate2 folder, a folder for Hugging
    Face transformers (MarianMT, or the class that a pretrained model came from), or Marian's own
    files, for a model that came from them."""
    output: str
    """New or empty folder to write to."""
    languages: tuple[str, ...] = ()
    """Codes and names of source and target language, such as `en English de German`: required for
    argos, and used in README.md."""
    quantization: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    """argos and ctranslate2: type of the weights in the file."""
    sentence_model: str = ""
    """argos: MiniSBD model (.onnx) that splits text into sentences. Default: Argos Translate
    downloads one for the source language when it first translates."""

    def run(self) -> None:
        """Write the folder."""
        if len(self.languages) != 4 and (self.languages or self.format == "argos"):
            raise UserError(
                f"--languages is {self.languages}; expected two codes and names, such as: "
                "--languages en English de German"
            )
        for name, value, formats in (
            ("quantization", self.quantization != "float32", ("argos", "ctranslate2")),
            ("sentence-model", self.sentence_model, ("argos",)),
        ):
            if value and self.format not in formats:
                raise UserError(
                    f"--{name} has no effect with --format {self.format}; expected --format "
                    f"{' or '.join(formats)}."
                )
        # Import late, so that flags are checked before JAX is loaded.
        from transformer_jax import load_model
        from transformer_jax.export.argos import pack_argos
        from transformer_jax.export.huggingface import export_huggingface
        from transformer_jax.export.marian import export_marian
        from transformer_jax.export.model_card import write_model_card
        from transformer_jax.pretrained.ctranslate2 import export_ctranslate2

        with new_folder(self.output, "output") as folder:
            config, model, tokenizer = load_model(self.workdir)
            if self.format == "huggingface":
                export_huggingface(config, model, tokenizer, folder)
            elif self.format == "marian":
                export_marian(model, tokenizer, folder)
            else:
                export_ctranslate2(config, model, tokenizer, folder, self.quantization)
            write_model_card(self.workdir, self.languages[::2], folder)
            if self.format == "argos":
                pack_argos(config, tokenizer, folder, self.languages, self.sentence_model)
        logger.info(
            "Wrote %s for %s. See docs/export.md for differences in search.",
            *(self.output, self.format),
        )


def main(argv: list[str] | None = None) -> int:
    """Run the program. Returns the exit status (see ``run_program``)."""
    return run_program(lambda: parse_flags(Export, argv).run())


if __name__ == "__main__":
    sys.exit(main())
