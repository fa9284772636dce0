"""What a search refuses, with a message for its user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformer_jax.config import DecodingConfig
from transformer_jax.errors import UserError
from transformer_jax.special_ids import EOS_ID
from transformer_jax.tokenizer import Tokenizer


def check_decoding(config: DecodingConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of ``config.suppress``, as ``Engine`` takes them; no model is needed.

    Raises:
      UserError: a token to suppress that the target vocabulary lacks, or EOS; a beam wider than the
        vocabulary.
    """
    suppress = tuple(tokenizer.target.require_ids(config.suppress, "decoding.suppress"))
    if EOS_ID in suppress:
        [end] = tokenizer.target.tokens([EOS_ID])
        raise UserError(
            f"decoding.suppress has {end!r}, without which no translation ends before its longest "
            "length; expected other tokens (decoding.min_length asks for longer translations)."
        )
    if config.method == "beam" and config.beam_size > tokenizer.target.vocab_size:
        raise UserError(
            f"decoding.beam_size is {config.beam_size}; expected at most "
            f"{tokenizer.target.vocab_size}, the tokens of the vocabulary."
        )
    return suppress


def vocabulary_sizes(models: Sequence[Any]) -> tuple[int, int]:
    """The source and target vocabulary sizes of models that work together; ``UserError`` unless all
    have the same.
    """
    sizes = [
        (model.config.source_vocab_size or model.config.vocab_size, model.config.vocab_size)
        for model in models
    ]
    if len(set(sizes)) != 1:
        raise UserError(
            f"The models have {sizes} source and target tokens; expected one or more models of one "
            "vocabulary."
        )
    return sizes[0]
