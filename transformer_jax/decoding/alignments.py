"""Which words of a translation come from which of its source, as far as the model's attention tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from transformer_jax.decoding.records import Record
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.translator import Translation

# How SentencePiece writes the unknown piece out, and where parts of a long line are joined.
_AS_TEXT = {"<unk>": " ⁇ ", "</s>": " "}


class Alignment(NamedTuple):
    """Where each piece of a translation looked in its source; EOS is last on both sides."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights_TS: np.ndarray

    def hard(self) -> str:
        """``0-0 1-2``: each piece's best source piece, EOS apart, by the words that the two belong to."""
        if min(self.weights_TS.shape) < 2:
            return ""
        source = _words(self.source[:-1])
        target = _words(_AS_TEXT.get(piece, piece) for piece in self.target[:-1])
        best_T = self.weights_TS[:-1, :-1].argmax(axis=1)
        pieces = zip(self.target, target, best_T)
        pairs = {(source[best], word) for piece, word, best in pieces if piece != "</s>"}  # it stands between parts
        return " ".join(f"{i}-{j}" for i, j in sorted(pairs))


def aligned(
    results: Iterable[tuple[Record, list[Translation]]], scorer: Scorer | None, *, layer: int = -1, window: int | None = None
) -> Iterator[tuple[Record, list[Translation], list[Alignment | None] | None]]:
    """Each result with its translations' alignments; without a scorer, with None.

    Works on ``scorer.config.batch_size`` results at a time, at most ``window``. An empty translation has no alignment, nor has
    one that is, or whose source is, too long for the scorer.
    """
    results = iter(results)
    if scorer is None:
        yield from ((record, translations, None) for record, translations in results)
        return
    tokenizer = scorer.tokenizer
    size = min(scorer.config.batch_size, window or scorer.config.batch_size)
    while batch := list(islice(results, size)):
        sources = tokenizer.encode_source([record.text for record, _ in batch])
        pairs = [
            (source, tokenizer.target_ids(translation.pieces))
            for source, (_, translations) in zip(sources, batch, strict=True)
            for translation in translations
        ]
        possible = [bool(pair[1]) and scorer.fits(pair) for pair in pairs]
        weights = iter(scorer.align_pieces([pair for pair, fits in zip(pairs, possible) if fits], layer=layer))
        alignments = (
            Alignment(_with_end(tokenizer.source_pieces(source)), _with_end(tokenizer.target_pieces(target)), next(weights))
            if fits
            else None
            for (source, target), fits in zip(pairs, possible)
        )
        for record, translations in batch:
            yield record, translations, list(islice(alignments, len(translations)))


def _with_end(pieces: list[str]) -> tuple[str, ...]:
    return (*pieces, "</s>")


def _words(pieces: Iterable[str]) -> list[int]:
    """The number of the white-space-separated word that each piece ends in."""
    words, word, inside = [], -1, False
    for piece in pieces:
        for character in piece:
            if character == "\u2581" or character.isspace():
                inside = False
            elif not inside:
                word, inside = word + 1, True
        words.append(max(word, 0))
    return words
