"""Search settings under the names of transformers and CTranslate2, and where searches differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformer_jax import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    Config,
    DecodingConfig,
    Tokenizer,
    UserError,
)

_NAMES = {
    # ours: transformers, its default, CTranslate2
    "beam_size": ("num_beams", 1, "beam_size"),
    "length_penalty": ("length_penalty", 1.0, "length_penalty"),
    "min_length": ("min_new_tokens", 0, "min_decoding_length"),
    "no_repeat_ngram": ("no_repeat_ngram_size", 0, "no_repeat_ngram_size"),
}
# Other settings of generation_config.json that are read, or that do not matter here.
_OTHERS = {
    *("bad_words_ids", "max_length", "max_new_tokens", "renormalize_logits", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("forced_eos_token_id", "transformers_version", "_from_model_config"),
}
SEARCH_SETTINGS = {theirs for theirs, _, _ in _NAMES.values()} | _OTHERS
"""Names in transformers."""

# CTranslate2 ends a search with a length penalty once beam size x patience translations are
# finished, however poor, even while a better one is still being written. With 1, its default, its
# beam search can fall behind greedy search; docs/interop.md has what was measured.
_PATIENCE = 2.0


def for_transformers(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of ``generation_config.json``."""
    decoding = config.decoding
    return {
        **{theirs: getattr(decoding, ours) for ours, (theirs, _, _) in _NAMES.items()},
        "max_length": length_limits(config)[1] + 1,  # BOS counts there
        "bad_words_ids": [[token] for token in _forbidden(decoding, tokenizer)],
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "decoder_start_token_id": BOS_ID,
        "forced_eos_token_id": EOS_ID,
    }


def for_ctranslate2(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """The keywords of ``translate_batch``."""
    decoding = config.decoding
    longest_source, longest_target = length_limits(config)
    forbidden = tokenizer.target.tokens(_forbidden(decoding, tokenizer))
    return {
        **{theirs: getattr(decoding, ours) for ours, (_, _, theirs) in _NAMES.items()},
        "patience": _PATIENCE,
        "max_input_length": longest_source,
        "max_decoding_length": longest_target,
        "suppress_sequences": [[token] for token in forbidden],
    }


def from_transformers(
    settings: Mapping[str, Any], tokens: Mapping[int, str], file: Path
) -> DecodingConfig:
    """Our search settings from those of transformers in ``file``.

    Args:
      settings: by their names; None is the default.
      tokens: tokens that may be forbidden, by their ids in transformers.
      file: named in messages.

    Raises:
      UserError: the search here does not have a setting, or not its value.
    """
    for name, value in settings.items():
        several = name == "bad_words_ids" and any(len(ids) != 1 for ids in value or [])
        is_off = not value or (value == 1 and value is not True)
        if several or not (is_off or name in SEARCH_SETTINGS):
            raise UserError(
                f"{name} in {str(file)!r} is {value!r}, which the search here does not support. "
                "Remove it there."
            )
    given = {name: value for name, value in settings.items() if value is not None}
    fields: dict[str, Any] = {
        ours: given.get(theirs, default) for ours, (theirs, default, _) in _NAMES.items()
    }
    suppress = [tokens[i] for [i] in settings.get("bad_words_ids") or [] if i in tokens]
    return DecodingConfig(**fields, length_offset=0.0, suppress=tuple(dict.fromkeys(suppress)))


def length_limits(config: Config) -> tuple[int, int]:
    """The longest source and the longest translation in tokens, end symbols included, that decoding
    allows.
    """
    source, limit = config.decoding.max_source_length, config.model.position_limit
    return min(source, limit), min(source + config.decoding.max_extra_length, limit)


def search_notes(config: Config, library: str) -> list[str]:
    """Where the search of ``library`` ranks otherwise by these settings; docs/interop.md has the
    differences that all searches have.
    """
    decoding, notes = config.decoding, []
    alpha, c = f"{decoding.length_penalty:g}", decoding.length_offset
    if decoding.length_penalty and c and decoding.beam_size > 1:
        notes.append(
            f"{library} divides log P by length^{alpha}, decoding here by (({c:g} + length) / "
            f"{c + 1:g})^{alpha}: hypotheses of different lengths may rank otherwise. Set "
            "decoding.length_offset to 0 for the same formula."
        )
    if decoding.method == "sample":
        notes.append(f"decoding.method is 'sample' here; {library} gets the beam search.")
    return notes


def _forbidden(decoding: DecodingConfig, tokenizer: Tokenizer) -> list[int]:
    return [PAD_ID, *tokenizer.target.require_ids(decoding.suppress, "decoding.suppress")]
