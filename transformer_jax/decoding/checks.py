"""What a search refuses, with a message for its user."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.shortlist import Shortlist
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import EOS_ID
from transformer_jax.tokenizer import Tokenizer


def check_decoding(
    config: DecodingConfig, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], Shortlist | None]:
    """The ids of ``config.suppress`` and the shortlist in the file ``config.shortlist``, as
    ``Engine`` takes them; no model is needed.

    Raises:
      UserError: a token to suppress that the target vocabulary lacks, or EOS; a shortlist that is
        missing, damaged or made for another tokenizer; a beam wider than the vocabulary.
    """
    suppress = tuple(tokenizer.require_target_ids(config.suppress, "decoding.suppress"))
    if EOS_ID in suppress:
        [end] = tokenizer.target_tokens([EOS_ID])
        raise UserError(
            f"decoding.suppress has {end!r}, without which no translation ends before its longest "
            "length; expected other tokens (decoding.min_length asks for longer translations)."
        )
    shortlist = Shortlist.load(config.shortlist, tokenizer) if config.shortlist else None
    shared_C = None if shortlist is None else shortlist.shared(suppress)
    check_beam(config, tokenizer.target_vocab_size, shared_C)
    return suppress, shortlist


def vocabulary_sizes(models: Sequence[Transformer]) -> tuple[int, int]:
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


def check_beam(config: DecodingConfig, vocab_size: int, shared_C: np.ndarray | None) -> None:
    """``UserError`` if the beam is wider than the tokens to choose from: ``shared_C``, or all."""
    num_tokens = vocab_size if shared_C is None else len(shared_C)
    if config.method == "beam" and config.beam_size > num_tokens:
        which = "of the vocabulary" if shared_C is None else "that every sentence may use"
        raise UserError(
            f"decoding.beam_size is {config.beam_size}; expected at most {num_tokens}, "
            f"the tokens {which}."
        )
