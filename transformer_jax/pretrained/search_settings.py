"""Converts search settings to and from transformers, and to CTranslate2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.settings.config import Config, DecodingConfig
from transformer_jax.tokenization.tokenizer import Tokenizer

_NAMES = {
    # ours: transformers, its default, CTranslate2
    "beam_size": ("num_beams", 1, "beam_size"),
    "length_penalty": ("length_penalty", 1.0, "length_penalty"),
    "min_length": ("min_new_tokens", 0, "min_decoding_length"),
    "no_repeat_ngram": ("no_repeat_ngram_size", 0, "no_repeat_ngram_size"),
}
# Other settings in generation_config.json that are handled elsewhere or irrelevant here.
_OTHERS = {
    "bad_words_ids",
    "max_length",
    "max_new_tokens",
    "min_length",
    "renormalize_logits",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "early_stopping",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "transformers_version",
    "_from_model_config",
}
_KNOWN = {theirs for theirs, _, _ in _NAMES.values()} | _OTHERS
_SINGLE_IDS = re.compile(r"\[(\[\d+\](, )?)*\]")  # [[7], [9]]
IN_CONFIG = re.compile("beam|penalty|ngram|bad_words|min_|do_sample|early_stop|forced_bos|suppress")
"""Search settings in config.json, where older versions of transformers write them."""

# With a length penalty, CTranslate2 stops once beam size x patience hypotheses are finished, even
# if an unfinished one would score higher. With its default patience of 1, beam search can be worse
# than greedy search (measured in docs/export.md).
_PATIENCE = 2.0


def for_transformers(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the contents of ``generation_config.json``."""
    decoding = config.decoding
    return {
        **{theirs: getattr(decoding, ours) for ours, (theirs, _, _) in _NAMES.items()},
        "max_length": length_limits(config)[1] + 1,  # includes BOS
        "bad_words_ids": [[token] for token in _forbidden(decoding, tokenizer)],
        "pad_token_id": config.model.pad_id,
        "bos_token_id": tokenizer.target.bos_id,
        "eos_token_id": config.model.eos_id,
        "decoder_start_token_id": config.model.decoder_start_id,
        "early_stopping": decoding.patience == 1,
        "forced_eos_token_id": config.model.eos_id,
    }


def for_ctranslate2(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return keyword arguments for ``translate_batch``."""
    decoding = config.decoding
    longest_source, longest_target = length_limits(config)
    forbidden = tokenizer.target.tokens(_forbidden(decoding, tokenizer))
    return {
        **{theirs: getattr(decoding, ours) for ours, (_, _, theirs) in _NAMES.items()},
        "patience": decoding.patience or _PATIENCE,
        "max_input_length": longest_source,
        "max_decoding_length": longest_target,
        "suppress_sequences": [[token] for token in forbidden],
    }


def from_transformers(
    settings: Mapping[str, Any], tokens: Mapping[int, str], file: Path
) -> DecodingConfig:
    """Convert search settings from transformers to a ``DecodingConfig``.

    Args:
      settings: values by name, read from ``file``; None means the default.
      tokens: tokens that may be suppressed, by their ids in transformers.
      file: used in error messages.

    Raises:
      UserError: a setting or value is unsupported.
    """
    forbidden = settings.get("bad_words_ids") or []
    for name, value in settings.items():
        is_off = not value or (value == 1 and value is not True)
        several = name == "bad_words_ids" and not _SINGLE_IDS.fullmatch(repr(forbidden))
        if several or not (is_off or name in _KNOWN):
            raise UserError(
                f"{name} in {str(file)!r} is {value!r}, which is not supported. "
                "Remove it from the file."
            )
    fields: dict[str, Any] = {
        ours: default if settings.get(theirs) is None else settings[theirs]
        for ours, (theirs, default, _) in _NAMES.items()
    }
    if settings.get("min_length"):  # which counts the first decoder input
        fields["min_length"] = max(fields["min_length"], settings["min_length"] - 1)
    fields["patience"] = 1.0 if settings.get("early_stopping") is True else None
    suppress = dict.fromkeys(tokens[i] for [i] in forbidden if i in tokens)
    try:
        return DecodingConfig(**fields, length_offset=0.0, suppress=tuple(suppress))
    except UserError as error:
        raise UserError(f"{str(file)!r} is not supported: {error}") from None


def length_limits(config: Config) -> tuple[int, int]:
    """Return the maximum source and target lengths for decoding, in tokens including EOS."""
    decoding, positions = config.decoding, config.model.position_limit
    source = decoding.max_source_length
    return min(source, positions), decoding.longest_target(source, positions)


def _forbidden(decoding: DecodingConfig, tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.target.pad_id, *tokenizer.target.suppressed_ids(decoding.suppress)]
