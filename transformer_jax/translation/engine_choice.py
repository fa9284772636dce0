"""Choice of the engine: our own search in JAX, or CTranslate2."""

from __future__ import annotations

import logging
from pathlib import Path

import jax

from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.errors import UserError, one_line
from transformer_jax.model.transformer import Transformer
from transformer_jax.pretrained.ctranslate2 import check_ctranslate2
from transformer_jax.pretrained.ctranslate2_cache import current_export
from transformer_jax.settings.config import Config, DecodingConfig, EngineName
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.ctranslate2_engine import (
    COMPUTE_TYPES,
    CTranslate2Engine,
    check_search,
)

logger = logging.getLogger(__name__)


def choose_engine(
    name: EngineName,
    workdir: str | Path,
    model: Transformer | Ensemble,
    tokenizer: Tokenizer,
    config: DecodingConfig,
    *,
    jax_only: str = "",
) -> CTranslate2Engine | None:
    """Load CTranslate2 for a model, or return None for JAX, with one log message.

    ``auto`` is CTranslate2 on a CPU, if it is installed and can do what is asked.

    Args:
      workdir: local folder of the model, which keeps the export.
      jax_only: what is asked that only JAX can do, as the beginning of a sentence; '': nothing.

    Raises:
      UserError: ``name`` is ctranslate2, which cannot do what is asked.
    """
    if name == "jax":
        return None
    try:
        if name == "auto" and jax.default_backend() != "cpu":
            raise UserError(f"JAX has a {jax.default_backend().upper()}.")
        if jax_only:
            raise UserError(f"{jax_only} only with JAX.")
        engine = _load(Path(workdir), model, tokenizer, config)
    except UserError as error:
        if name == "ctranslate2":
            raise UserError(f"--engine ctranslate2: {error} Or use --engine jax.") from None
        logger.info("Engine jax. %s", error)
        return None
    logger.info(
        "Engine ctranslate2, in %s. Some translations differ from --engine jax: it stops earlier, "
        "and computes in another precision.",
        engine.compute_type,
    )
    return engine


def _load(
    workdir: Path, model: Transformer | Ensemble, tokenizer: Tokenizer, config: DecodingConfig
) -> CTranslate2Engine:
    """Export the model if necessary, and load the export."""
    if isinstance(model, Ensemble):
        raise UserError("There are several models; expected one. CTranslate2 has no ensembles.")
    check_search(config)
    check_ctranslate2(model.config)
    settings = Config(model=model.config, decoding=config)
    weights_type = COMPUTE_TYPES[config.weights]
    try:
        with current_export(workdir, settings, model, tokenizer, weights_type) as folder:
            return CTranslate2Engine(folder, settings, tokenizer)
    except UserError:
        raise
    except Exception as error:  # a full disk, or another version of CTranslate2
        raise UserError(
            f"The export to CTranslate2 in {str(workdir)!r} failed: {one_line(error)}."
        ) from error
