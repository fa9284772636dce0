"""Which words of a translation come from which words of its source, by the model's attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from transformer_jax.decoding.records import Alignment, Record
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.segments import joint
from transformer_jax.decoding.translator import Translation
from transformer_jax.tokenizer import Tokenizer


def align(
    results: Sequence[tuple[Record, Sequence[Translation]]], scorer: Scorer, *, layer: int = -1
) -> Iterator[list[Alignment | None]]:
    """The alignments of each record's translations, by attention in a second, forced pass.

    Works on ``scorer.config.batch_size`` records at a time. An empty translation has no alignment,
    nor has one that is, or whose source is, too long for the scorer.
    """
    for first in range(0, len(results), scorer.config.batch_size):
        yield from _align(results[first : first + scorer.config.batch_size], scorer, layer)


def _align(
    results: Sequence[tuple[Record, Sequence[Translation]]], scorer: Scorer, layer: int
) -> Iterator[list[Alignment | None]]:
    tokenizer = scorer.tokenizer
    sources = tokenizer.encode_source([record.text for record, _ in results])
    pairs = {
        (i, k): (source, tokenizer.target_ids(translation.tokens))
        for i, (source, (_, translations)) in enumerate(zip(sources, results, strict=True))
        for k, translation in enumerate(translations)
    }
    pairs = {place: pair for place, pair in pairs.items() if pair[1] and scorer.fits(pair)}
    found = scorer.align_tokens(list(pairs.values()), layer=layer)
    weights = dict(zip(pairs, found, strict=True))
    for i, (record, translations) in enumerate(results):
        yield [
            _alignment(tokenizer, record, translation, sources[i], weights[i, k])
            if (i, k) in weights
            else None
            for k, translation in enumerate(translations)
        ]


def _alignment(
    tokenizer: Tokenizer,
    record: Record,
    translation: Translation,
    source: Sequence[int],
    weights_TS: np.ndarray,
) -> Alignment:
    source_tokens, target_tokens = tuple(tokenizer.source_tokens(source)), translation.tokens
    source_words = map(tokenizer.source_tokens, tokenizer.encode_source(record.text.split()))
    target_words = map(tokenizer.target_tokens, tokenizer.encode_target(translation.text.split()))
    return Alignment(
        (*source_tokens, "</s>"),
        (*target_tokens, "</s>"),
        weights_TS,
        word_numbers(source_tokens, source_words),
        word_numbers(target_tokens, target_words),
    )


def word_numbers(tokens: Sequence[str], words: Iterable[Sequence[str]]) -> list[int]:
    """The number, from 0, of the word of a text that each of its tokens ends in.

    Words are what white space separates. Tokens are those of normalised text, where a word may have
    become several or none; so ``words`` has the tokens of each word, encoded by itself.
    """
    numbers = [
        number
        for number, its_tokens in enumerate(words)
        for _ in range(max(_normalized_words(its_tokens), default=-1) + 1)
    ]
    return [
        numbers[min(max(word, 0), len(numbers) - 1)] if numbers else 0
        for word in _normalized_words(tokens)
    ]


def _normalized_words(tokens: Sequence[str]) -> list[int]:
    """``word_numbers`` in the normalised text that the tokens spell; -1 before the first word."""
    text, before, words = "", "", []
    for token in tokens:
        if token == "</s>":  # where segments of a long line are joined
            text += joint(text)
        elif token == "<unk>":
            text += " ⁇ "  # as SentencePiece writes it
        else:
            text += (token.removeprefix("▁") if before == "</s>" else token).replace("▁", " ")
        before = token
        words.append(len(text.split()) - 1)
    return words
