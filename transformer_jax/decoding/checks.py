"""What a search refuses, with a message for its user."""

from __future__ import annotations

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
