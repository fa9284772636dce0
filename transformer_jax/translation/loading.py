"""Loading one model or an ensemble, with the tokenizer and the decoding settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer_jax.decoding.ensemble import Ensemble, vocabulary_sizes
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.pretrained.loading import load_model
from transformer_jax.settings.config import DecodingConfig
from transformer_jax.tokenization.tokenizer import Tokenizer


def load_models(
    workdir: str | Path | Sequence[str | Path],
    *,
    source_language: str = "",
    target_language: str = "",
    **settings: Any,
) -> tuple[Transformer | Ensemble, Tokenizer, DecodingConfig]:
    """Load the model of a training run, or an ensemble of several runs, with the tokenizer and
    decoding settings of the (first) run.

    Args:
      workdir: path or URL of a work directory, a model folder or a checkpoint.
      source_language, target_language: default codes of a many-to-many model.
      settings: override fields of the run's ``decoding`` config.

    Raises:
      UserError: runs have different tokenizers; see also ``load_model``.
    """
    workdirs = [workdir] if isinstance(workdir, str | Path) else list(workdir)
    if not workdirs:
        raise UserError("workdir is empty; expected one or more work directories.")
    configs, models, loaded = zip(*map(load_model, workdirs))
    # A fine-tuned model has the languages of its run by default, its ancestor others.
    tokenizers = [each.with_languages(source_language, target_language) for each in loaded]
    for other, tokenizer in zip(workdirs, tokenizers):
        if tokenizer.fingerprint != tokenizers[0].fingerprint:
            raise UserError(
                f"{str(other)!r} has a different vocabulary than {str(workdirs[0])!r}, or other "
                "default languages; expected models that were trained with the same tokenizer "
                "(train.py --tokenizer.model, --tokenizer.target-model). For many-to-many models, "
                "choose source_language and target_language."
            )
    decoding = replace(configs[0].decoding, **settings)
    model = models[0] if len(models) == 1 else Ensemble(models)
    return model, tokenizers[0], decoding


def check_vocabulary(model: Transformer | Ensemble, tokenizer: Tokenizer) -> None:
    """Raise ``UserError`` unless model and tokenizer have the same vocabulary sizes."""
    tokens = tokenizer.source.vocab_size, tokenizer.target.vocab_size
    if tokens != vocabulary_sizes(model):
        raise UserError(
            f"The tokenizer has {tokens} source and target tokens, but the model has "
            f"{vocabulary_sizes(model)}; expected both from the same training run."
        )
