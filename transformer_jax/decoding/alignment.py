"""Which words of a translation come from which of its source, as far as the model's attention
tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from transformer_jax.decoding.records import Record
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.translator import Translation, joint
from transformer_jax.tokenizer import Tokenizer


class Alignment(NamedTuple):
    """Where each token of a translation looked in its source; EOS is last on both sides."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights_TS: np.ndarray
    source_words: Sequence[int]
    """The number of the word that each source token ends in, EOS apart."""
    target_words: Sequence[int]

    def hard(self) -> str:
        """``0-0 1-2``: each token's best source token, EOS apart, by the words that the two belong
        to.
        """
        if min(self.weights_TS.shape) < 2:
            return ""
        best_T = self.weights_TS[:-1, :-1].argmax(axis=1)
        tokens = zip(self.target, self.target_words, best_T)  # </s> stands between parts
        pairs = {(self.source_words[best], word) for token, word, best in tokens if token != "</s>"}
        return " ".join(f"{i}-{j}" for i, j in sorted(pairs))


def aligned(
    results: Iterable[tuple[Record, list[Translation]]],
    scorer: Scorer | None,
    *,
    layer: int = -1,
    window: int | None = None,
) -> Iterator[tuple[Record, list[Translation], list[Alignment | None] | None]]:
    """Each result with its translations' alignments; without a scorer, with None.

    Works on ``scorer.config.batch_size`` results at a time, and on what is left of each ``window``.
    An empty translation has no alignment, nor has one that is, or whose source is, too long for the
    scorer.
    """
    results = iter(results)
    if scorer is None:
        yield from ((record, translations, None) for record, translations in results)
        return
    tokenizer = scorer.tokenizer
    batches, rest = divmod(window or scorer.config.batch_size, scorer.config.batch_size)
    sizes = cycle([scorer.config.batch_size] * batches + [rest] * (rest > 0))
    while batch := list(islice(results, next(sizes))):
        sources = tokenizer.encode_source([record.text for record, _ in batch])
        pairs = [
            (source, tokenizer.target_ids(translation.tokens))
            for source, (_, translations) in zip(sources, batch, strict=True)
            for translation in translations
        ]
        possible = [bool(pair[1]) and scorer.fits(pair) for pair in pairs]
        weights = iter(
            scorer.align_tokens([pair for pair, fits in zip(pairs, possible) if fits], layer=layer)
        )
        both = (
            (record, translation) for record, translations in batch for translation in translations
        )
        alignments = (
            _alignment(tokenizer, record, translation, source, next(weights)) if fits else None
            for (record, translation), (source, _), fits in zip(both, pairs, possible)
        )
        for record, translations in batch:
            yield record, translations, list(islice(alignments, len(translations)))


def _alignment(
    tokenizer: Tokenizer,
    record: Record,
    translation: Translation,
    source: Sequence[int],
    weights_TS: np.ndarray,
) -> Alignment:
    source_tokens, target_tokens = tuple(tokenizer.source_tokens(source)), translation.tokens
    source_alone = map(tokenizer.source_tokens, tokenizer.encode_source(record.text.split()))
    target_alone = map(tokenizer.target_tokens, tokenizer.encode_target(translation.text.split()))
    return Alignment(
        (*source_tokens, "</s>"),
        (*target_tokens, "</s>"),
        weights_TS,
        word_numbers(source_tokens, source_alone),
        word_numbers(target_tokens, target_alone),
    )


def word_numbers(tokens: Sequence[str], alone: Iterable[Sequence[str]]) -> list[int]:
    """The number, from 0, of the word of a text that each of its tokens ends in.

    Words are what white space parts. As tokens are those of normalised text, where a word may have
    become several or none, ``alone`` has the tokens of each word by itself.
    """
    numbers = [
        number
        for number, its_tokens in enumerate(alone)
        for _ in range(max(_normalized(its_tokens), default=-1) + 1)
    ]
    return [
        numbers[min(max(word, 0), len(numbers) - 1)] if numbers else 0
        for word in _normalized(tokens)
    ]


def _normalized(tokens: Sequence[str]) -> list[int]:
    """``word_numbers`` of the text that the tokens spell; -1 where no word has begun."""
    text, before, words = "", "", []
    for token in tokens:
        if token == "</s>":  # where parts of a long line are joined
            text += joint(text)
        elif token == "<unk>":
            text += " ⁇ "  # as SentencePiece writes it out
        else:
            text += (token.removeprefix("▁") if before == "</s>" else token).replace("▁", " ")
        before = token
        words.append(len(text.split()) - 1)
    return words
