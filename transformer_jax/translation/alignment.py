"""Word alignments between a source and its translation, from cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from transformer_jax.tokenization.rows import with_eos
from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.tokenization.words import token_words


class Alignment(NamedTuple):
    """Attention weights of each target token over the source tokens; EOS is last on both sides."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights_TS: np.ndarray
    source_word_ids: Sequence[int]
    """Word index of each source token except EOS; -1 for a language."""
    target_word_ids: Sequence[int]

    def hard(self) -> str:
        """Return word pairs such as ``0-0 1-2`` (source-target), which link each target token to
        the source token with the highest attention weight.
        """
        if min(self.weights_TS.shape) < 2:
            return ""
        is_word_S = np.array(self.source_word_ids) >= 0
        best_T = np.where(is_word_S, self.weights_TS[:-1, :-1], -1).argmax(axis=1)
        eos_token = self.target[-1]  # also separates segments
        tokens = zip(self.target, self.target_word_ids, best_T)
        pairs = {
            (self.source_word_ids[best], word)
            for token, word, best in tokens
            if token != eos_token and word >= 0 and is_word_S[best]
        }
        return " ".join(f"{i}-{j}" for i, j in sorted(pairs))


def concatenate_alignments(alignments: Sequence[Alignment]) -> Alignment:
    """Return the alignment of consecutive sentences. EOS separates them in the target only."""
    sources = [alignment.source[:-1] for alignment in alignments]
    targets = [alignment.target for alignment in alignments]
    num_source = sum(map(len, sources))
    weights_TS = np.zeros((sum(map(len, targets)), num_source + 1), np.float32)
    source_word_ids = list[int]()
    target_word_ids = list[int]()
    row = 0
    column = 0
    for alignment, source, target in zip(alignments, sources, targets):
        rows = slice(row, row + len(target))
        weights_TS[rows, column : column + len(source)] = alignment.weights_TS[:, :-1]
        weights_TS[rows, num_source] = alignment.weights_TS[:, -1]
        row += len(target)
        column += len(source)
        source_word_ids += _number_after(source_word_ids, alignment.source_word_ids)
        target_word_ids += [*_number_after(target_word_ids, alignment.target_word_ids), -1]
    return Alignment(
        tuple(chain(*sources, alignments[-1].source[-1:])),
        tuple(chain(*targets)),
        weights_TS,
        source_word_ids,
        target_word_ids[:-1],
    )


def _number_after(previous_word_ids: Sequence[int], word_ids: Sequence[int]) -> list[int]:
    """Number words after those of the previous sentences."""
    first = max(previous_word_ids, default=-1) + 1
    return [word + first if word >= 0 else word for word in word_ids]


def align_texts(
    tokenizer: Tokenizer,
    texts: tuple[str, str],
    tokens: tuple[Sequence[int], Sequence[int]],
    weights_TS: np.ndarray,
) -> Alignment:
    """Align a (source, target) pair of texts, given their token ids and attention weights."""
    eos_id = tokenizer.source.eos_id
    source_ids = with_eos(tokens[0], eos_id)
    source, source_word_ids = _words(tokenizer.source, source_ids, texts[0])
    source_word_ids = [-1 if i == eos_id else word for i, word in zip(source_ids, source_word_ids)]
    target, target_word_ids = _words(tokenizer.target, [*tokens[1], eos_id], texts[1])
    weights_TS = weights_TS[:, : len(source)]
    return Alignment(source, target, weights_TS, source_word_ids[:-1], target_word_ids[:-1])


def _words(side: SubwordModel, ids: Sequence[int], text: str) -> tuple[tuple[str, ...], list[int]]:
    """Return tokens, and the word of each."""
    names = side.tokens(ids)
    word_ids = token_words(side, names, text.split())
    return tuple(names), word_ids
