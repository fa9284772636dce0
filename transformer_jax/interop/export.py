"""What all exports share: limits of lengths, what cannot travel exactly, and the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from transformer_jax import Config, ModelConfig, Tokenizer, UserError


def length_limits(config: Config) -> tuple[int, int]:
    """The longest source and the longest translation in tokens, end symbols included, that decoding
    allows.
    """
    source, limit = config.decoding.max_source_length, config.model.position_limit
    return min(source, limit), min(source + config.decoding.max_extra_length, limit)


def search_notes(
    config: Config,
    library: str,
    *,
    stops: str,
    long_lines: str = "cuts them off",
) -> list[str]:
    """Where the search of ``library`` differs from ours, though it gets the same settings.

    Args:
        config: the settings.
        library: its name.
        stops: when it ends a search with a length penalty.
        long_lines: what it does with too long a source.
    """
    decoding = config.decoding
    longest_source, longest_target = length_limits(config)
    notes = [
        f"translations end at {longest_target} tokens at the latest in {library}, at source length "
        f"+ {decoding.max_extra_length} here.",
        f"lines of more than {longest_source} tokens are translated in segments here; {library} "
        f"{long_lines}.",
    ]
    if decoding.length_penalty and decoding.length_offset and decoding.beam_size > 1:
        c, alpha = decoding.length_offset, f"{decoding.length_penalty:g}"
        notes.append(
            f"{library} divides log P by length^{alpha}, decoding here by (({c:g} + length) / "
            f"{c + 1:g})^{alpha}: hypotheses of different lengths may rank otherwise. Set "
            "decoding.length_offset to 0 for the same formula."
        )
    if decoding.length_penalty and decoding.beam_size > 1:
        notes.append(
            f"{library} ends a search {stops}; decoding here ends it when no other translation can "
            "still score better."
        )
    left_out = {
        "decoding.method 'sample'": decoding.method == "sample",
    }
    return notes + [f"{name} is left out." for name, given in left_out.items() if given]


def check_fields(shape: ModelConfig, library: str, **allowed: tuple[object, ...]) -> None:
    """``UserError`` for a field whose value is none of those that ``library`` can hold."""
    for name, values in allowed.items():
        if getattr(shape, name) not in values:
            instead = "" if library == "CTranslate2" else " Export to ctranslate2 instead."
            raise UserError(
                f"model.{name} is {getattr(shape, name)!r}; expected "
                f"{' or '.join(map(repr, values))}: {library} computes nothing else.{instead}"
            )


def square_head_width(config: ModelConfig, library: str) -> int:
    """d_model / num_heads, for a library that knows no other width; ``UserError`` where the model's
    heads are wider.
    """
    width = config.d_model // config.num_heads
    for name, ours in (("d_k", config.head_width_k), ("d_v", config.head_width_v)):
        if ours > width or config.d_model % config.num_heads:
            raise UserError(
                f"model.{name} is {ours}; expected at most model.d_model / model.num_heads = "
                f"{config.d_model} / {config.num_heads}, the only head width that {library} has. "
                "Narrower heads can be exported."
            )
    return width


def check_epsilon(config: ModelConfig, theirs: float, library: str) -> list[str]:
    """A note where layer norm adds another epsilon there; ``UserError`` where that would show in
    the output.
    """
    if config.norm_epsilon > 1e-5:
        raise UserError(
            f"model.norm_epsilon is {config.norm_epsilon:g}; expected at most 1e-05: {library} "
            f"always adds {theirs:g}."
        )
    if config.norm_epsilon == theirs:
        return []
    return [
        f"layer norm adds {theirs:g} to the variance in {library}, {config.norm_epsilon:g} here: "
        "its output differs by a few 1e-6."
    ]


def write_sentencepiece(tokenizer: Tokenizer, folder: Path) -> tuple[list[str], list[str]]:
    """Write source.spm and target.spm into ``folder``; returns the source and the target tokens, by
    their ids.
    """
    (folder / "source.spm").write_bytes(tokenizer.source_model)
    (folder / "target.spm").write_bytes(tokenizer.target_model or tokenizer.source_model)
    source, target = range(tokenizer.source_vocab_size), range(tokenizer.target_vocab_size)
    return tokenizer.source_tokens(source), tokenizer.target_tokens(target)


def tags_of(tokens: Sequence[str]) -> list[str]:
    """The tokens like ``>>deu<<``, which MarianTokenizer knows at the beginning of a line."""
    return [token for token in tokens if re.fullmatch(">>.*<<", token)]
