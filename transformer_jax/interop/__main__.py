"""Export a trained model to another library, or import one.

python -m transformer_jax.interop export --workdir W --format F --output DIR
python -m transformer_jax.interop import --input DIR --workdir W
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformer_jax import UserError, parse_flags, run_program

logger = logging.getLogger("transformer_jax.interop")


@dataclass(frozen=True)
class Export:
    """Export a trained model's weights, vocabulary and search settings to another library."""

    workdir: str
    """Work directory of a training run, the folder of one of its checkpoints, or a model folder."""
    format: Literal["argos", "ctranslate2", "huggingface"]
    """A package for Argos Translate and LibreTranslate, a CTranslate2 folder, or a folder for
    Hugging Face transformers: MarianMT, or the class that a pretrained model came from."""
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
        from transformer_jax.interop.ctranslate2 import export_ctranslate2, pack_argos
        from transformer_jax.interop.export import write_model_card
        from transformer_jax.interop.huggingface import export_huggingface

        with _new_folder(self.output, "output") as folder:
            config, model, tokenizer = load_model(self.workdir)
            if self.format == "huggingface":
                export_huggingface(config, model, tokenizer, folder)
            else:
                export_ctranslate2(config, model, tokenizer, folder, self.quantization)
            write_model_card(self.workdir, self.languages[::2], folder)
            if self.format == "argos":
                pack_argos(config, tokenizer, folder, self.languages, self.sentence_model)
        logger.info(
            "Wrote %s for %s. See docs/interop.md for differences in search.",
            *(self.output, self.format),
        )


@dataclass(frozen=True)
class Import:
    """Convert a pretrained model in transformers' format (OPUS-MT, M2M100, NLLB, T5, BART, ...) to
    a model folder for decode.py and train.py --training.start-from.
    """

    input: str
    """Name of a model on the Hugging Face Hub, or a folder with config.json, model.safetensors or
    its shards, and the tokenizer's files.
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
        from transformer_jax.interop.huggingface_import import find_pretrained, import_into

        pickles, languages = self.allow_pickle, (self.source_language, self.target_language)
        with _new_folder(self.workdir, "workdir") as folder:
            source = find_pretrained(self.input, revision=self.revision, allow_pickle=pickles)
            import_into(source, folder, languages=languages, allow_pickle=pickles)
        logger.info("Translate:  python decode.py --workdir %s", self.workdir)
        start = f"--config {self.workdir}/config.json --training.start-from {self.workdir}"
        logger.info("Fine-tune:  python train.py %s --workdir NEW ...", start)


def main(argv: list[str] | None = None) -> int:
    """Run the program. Returns the exit status (see ``run_program``)."""
    tasks: Any = Export | Import
    return run_program(lambda: parse_flags(tasks, argv).run())


@contextmanager
def _new_folder(name: str, flag: str) -> Iterator[Path]:
    """Create a folder for the caller to fill; delete it if an error occurs.

    Raises a ``UserError`` that names ``flag`` if the folder is not empty.
    """
    folder = Path(name).expanduser()
    if "://" in name or (folder.exists() and any(folder.iterdir())):
        raise UserError(f"--{flag} is {name!r}; expected a new or empty folder on this machine.")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
