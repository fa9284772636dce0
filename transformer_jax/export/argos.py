"""Packages for Argos Translate and LibreTranslate, around an export to CTranslate2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from transformer_jax import Config, Tokenizer, UserError
from transformer_jax.tokenization.languages import Languages
from transformer_jax.tokenization.segmenters import SentencePieceSegmenter

_METADATA = "from_code", "from_name", "to_code", "to_name"
_PLACES = {"README.md": "README.md", "source.spm": "sentencepiece.model"}  # others: model/


def pack_argos(
    config: Config, tokenizer: Tokenizer, folder: Path, languages: Sequence[str], sentences: str
) -> None:
    """Replace the export in ``folder`` by translate-en_de.argosmodel, for Argos Translate.

    Args:
      config: used to check that the lines need no tags.
      tokenizer: must be one SentencePiece model for both languages.
      folder: contains the files of ``export_ctranslate2``, and README.md.
      languages: code and name of the source language, then of the target language.
      sentences: file of a MiniSBD model, which splits text into sentences; '': none.
    """
    tags = config.data.train.tags
    is_tagged = bool(tags and all(tags)) or tokenizer.languages != Languages()
    is_sentencepiece = isinstance(tokenizer.source.segmenter, SentencePieceSegmenter)
    if tokenizer.source is not tokenizer.target or is_tagged or not is_sentencepiece:
        raise UserError(
            f"tokenizer.joint is {tokenizer.joint}, and data.train.tags is {tags}; expected one "
            "SentencePiece model for both languages and source lines without tags or language "
            "tokens, because Argos Translate supports nothing else. Export to ctranslate2 instead."
        )
    files = [*folder.iterdir()]
    name = "translate-{}_{}".format(*languages[::2])
    with ZipFile(folder / f"{name}.argosmodel", "w", ZIP_DEFLATED) as archive:
        # Packages with older versions are replaced by those in Argos Translate's index.
        metadata = dict(zip(_METADATA, languages), package_version="100.0", argos_version="1.9")
        archive.writestr(f"{name}/metadata.json", json.dumps(metadata))
        if sentences:
            archive.write(sentences, f"{name}/minisbd/model.onnx")
        for file in files:
            archive.write(file, f"{name}/{_PLACES.get(file.name, f'model/{file.name}')}")
            file.unlink()
