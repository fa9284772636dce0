"""Trained models with their tokenizers and decoding settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_jax.checkpoint import load_model
from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.ensemble import Ensemble, as_one, vocabulary_sizes
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.special_ids import EOS_ID
from transformer_jax.tokenizer import Tokenizer


def load_models(
    workdir: str | Path | Sequence[str | Path],
    **settings: Any,
) -> tuple[Transformer | Ensemble, Tokenizer, DecodingConfig]:
    """Load the model of a training run, or an ensemble of several runs, with the tokenizer and
    decoding settings of the (first) run.

    ``workdir`` is the path or URL of a work directory or of one of its checkpoints. ``settings``
    override fields of the run's ``decoding`` config.

    Raises:
      UserError: runs have different tokenizers; see also ``load_model``.
    """
    workdirs = [workdir] if isinstance(workdir, str | Path) else list(workdir)
    if not workdirs:
        raise UserError("workdir is empty; expected one or more work directories.")
    configs, models, tokenizers = zip(
        *(load_model(local_workdir(each)) for each in workdirs), strict=True
    )
    for other, tokenizer in zip(workdirs, tokenizers, strict=True):
        if tokenizer.fingerprint != tokenizers[0].fingerprint:
            raise UserError(
                f"{str(other)!r} has a different vocabulary than {str(workdirs[0])!r}; expected "
                "models that were trained with the same tokenizer (train.py --tokenizer.model, "
                "--tokenizer.target-model)."
            )
    decoding = dataclasses.replace(configs[0].decoding, **settings)
    return as_one(models), tokenizers[0], decoding


def check_vocabulary(model: Transformer | Ensemble, tokenizer: Tokenizer) -> None:
    """Raise ``UserError`` unless model and tokenizer have the same vocabulary sizes."""
    tokens = tokenizer.source.vocab_size, tokenizer.target.vocab_size
    if tokens != vocabulary_sizes(model):
        raise UserError(
            f"The tokenizer has {tokens} source and target tokens, but the model has "
            f"{vocabulary_sizes(model)}; expected both from the same training run."
        )


def check_decoding(config: DecodingConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Check decoding settings without a model. Returns the token ids of ``config.suppress``.

    Raises:
      UserError: a suppressed token is EOS or not in the target vocabulary; the beam is wider than
        the vocabulary.
    """
    suppress = tuple(tokenizer.target.require_ids(config.suppress, "decoding.suppress"))
    if EOS_ID in suppress:
        [end] = tokenizer.target.tokens([EOS_ID])
        raise UserError(
            f"decoding.suppress contains {end!r}, but without it every translation has the "
            "maximum length. Remove it; for longer translations, set decoding.min_length."
        )
    if config.method == "beam" and config.beam_size > tokenizer.target.vocab_size:
        raise UserError(
            f"decoding.beam_size is {config.beam_size}; expected at most "
            f"{tokenizer.target.vocab_size}, the size of the vocabulary."
        )
    return suppress
