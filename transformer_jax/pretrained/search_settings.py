"""Converts search settings to and from transformers, and to CTranslate2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError, short_repr
from transformer_jax.settings.config import Config, DecodingConfig
from transformer_jax.tokenization.tokenizer import Tokenizer

_SETTING_NAMES = {
    # name here: name in transformers, its default, name in CTranslate2
    "beam_size": ("num_beams", 1, "beam_size"),
    "length_penalty": ("length_penalty", 1.0, "length_penalty"),
    "min_length": ("min_new_tokens", 0, "min_decoding_length"),
    "no_repeat_ngram": ("no_repeat_ngram_size", 0, "no_repeat_ngram_size"),
}
# Other settings in generation_config.json that are handled elsewhere or irrelevant here.
_IGNORED_SETTINGS = {
    # of sampling (do_sample is an error)
    "temperature",
    "top_k",
    "top_p",
    "top_h",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    # of all searches
    "bad_words_ids",
    "max_length",
    "max_new_tokens",
    "min_length",
    "renormalize_logits",
    "remove_invalid_values",
    "use_cache",
    "cache_implementation",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "early_stopping",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "return_dict_in_generate",
    "disable_compile",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "transformers_version",
    "_from_model_config",
}
_SUPPORTED_SETTINGS = {
    foreign_name for foreign_name, _, _ in _SETTING_NAMES.values()
} | _IGNORED_SETTINGS
# Values, besides None, False and 0, with which other settings are off.
_OFF_AT_1 = {
    "repetition_penalty",
    "encoder_repetition_penalty",
    "num_beam_groups",
    "num_return_sequences",
    "guidance_scale",
}
SEARCH_SETTING_PATTERN = re.compile(
    "beam|penalty|ngram|bad_words|min_|do_sample|early_stop|forced?_bos|suppress"
)
"""Search settings in config.json, where older versions of transformers write them."""

# With a length penalty, CTranslate2 stops once beam size x patience hypotheses are finished, even
# if an unfinished one would score higher. With its default patience of 1, beam search can be worse
# than greedy search (measured in docs/export.md).
_CTRANSLATE2_PATIENCE = 2.0


def to_transformers(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the contents of ``generation_config.json``."""
    decoding = config.decoding
    return {
        **{
            foreign_name: getattr(decoding, name)
            for name, (foreign_name, _, _) in _SETTING_NAMES.items()
        },
        "max_length": length_limits(config)[1] + 1,  # includes BOS
        "bad_words_ids": [[token] for token in _suppressed_ids(decoding, tokenizer)],
        "pad_token_id": config.model.pad_id,
        "bos_token_id": tokenizer.target.bos_id,
        "eos_token_id": config.model.eos_id,
        "decoder_start_token_id": config.model.decoder_start_id,
        "early_stopping": decoding.patience == 1,
        "forced_eos_token_id": config.model.eos_id,
    }


def to_ctranslate2(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return keyword arguments for ``translate_batch``."""
    decoding = config.decoding
    max_source_length, max_target_length = length_limits(config)
    suppressed_tokens = tokenizer.target.tokens(_suppressed_ids(decoding, tokenizer))
    return {
        **{
            foreign_name: getattr(decoding, name)
            for name, (_, _, foreign_name) in _SETTING_NAMES.items()
        },
        "patience": decoding.patience or _CTRANSLATE2_PATIENCE,
        "max_input_length": max_source_length,
        "max_decoding_length": max_target_length,
        "suppress_sequences": [[token] for token in suppressed_tokens],
    }


def from_transformers(
    settings: Mapping[str, Any], tokens: Mapping[int, str], file: Path, eos_id: int
) -> DecodingConfig:
    """Convert search settings from transformers to a ``DecodingConfig``.

    Args:
      settings: values by name, read from ``file``; None means the default.
      tokens: tokens that may be suppressed, by id.
      file: used in error messages.
      eos_id: token id of EOS, which transformers never suppresses.

    Raises:
      UserError: a setting or value is unsupported.
    """
    for name, value in settings.items():
        is_off = not value or (name in _OFF_AT_1 and value == 1)
        if not is_off and name not in _SUPPORTED_SETTINGS:
            raise _unsupported(name, value, file)
    for name in ("forced_bos_token_id", "eos_token_id", "decoder_start_token_id"):
        value = settings.get(name)
        is_single = isinstance(value, list) and len(value) == 1 and name == "eos_token_id"
        if value is not None and type(value) is not int and not is_single:
            raise _unsupported(name, value, file)
    suppressed = []
    sequences = settings.get("bad_words_ids") or []
    if not isinstance(sequences, list):
        raise _unsupported("bad_words_ids", sequences, file)
    for sequence in sequences:
        if not isinstance(sequence, list) or len(sequence) != 1 or type(sequence[0]) is not int:
            raise _unsupported("bad_words_ids", sequences, file)
        if sequence[0] != eos_id and sequence[0] in tokens:
            suppressed.append(tokens[sequence[0]])
    fields: dict[str, Any] = {
        name: default if settings.get(foreign_name) is None else settings[foreign_name]
        for name, (foreign_name, default, _) in _SETTING_NAMES.items()
    }
    try:
        if settings.get("min_length"):  # which counts the first decoder input
            fields["min_length"] = max(fields["min_length"], settings["min_length"] - 1)
        longest = DecodingConfig().max_extra_length
        if type(fields["min_length"]) is int:
            longest = max(longest, fields["min_length"])
        return DecodingConfig(
            **fields,
            max_extra_length=longest,
            length_offset=0.0,
            patience=1.0 if settings.get("early_stopping") is True else None,
            suppress=tuple(dict.fromkeys(suppressed)),
        )
    except (UserError, TypeError) as error:
        raise UserError(f"{str(file)!r} is not supported: {error}") from None


def _unsupported(name: str, value: Any, file: Path) -> UserError:
    return UserError(
        f"{name} in {str(file)!r} is {short_repr(value)}, which is not supported. "
        "Remove it from the file."
    )


def length_limits(config: Config) -> tuple[int, int]:
    """Return the maximum source and target lengths for decoding, in tokens including EOS."""
    decoding = config.decoding
    positions = config.model.position_limit
    source = decoding.max_source_length
    return min(source, positions), decoding.max_target_length(source, positions)


def _suppressed_ids(decoding: DecodingConfig, tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.target.pad_id, *tokenizer.target.suppressed_ids(decoding.suppress)]
