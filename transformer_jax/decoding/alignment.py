"""Word alignments between a source and its translation, from cross-attention."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.tokenization.tokenizer import Tokenizer


class Alignment(NamedTuple):
    """Attention weights of each target token over the source tokens; EOS is last on both sides."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights_TS: np.ndarray
    source_words: Sequence[int]
    """Word index of each source token except EOS; -1 for a language."""
    target_words: Sequence[int]

    def hard(self) -> str:
        """Return word pairs such as ``0-0 1-2`` (source-target), which link each target token to
        the source token with the highest attention weight.
        """
        if min(self.weights_TS.shape) < 2:
            return ""
        is_word_S = np.array(self.source_words) >= 0
        best_T = np.where(is_word_S, self.weights_TS[:-1, :-1], -1).argmax(axis=1)
        tokens = zip(self.target, self.target_words, best_T)  # </s> separates segments
        pairs = {
            (self.source_words[best], word)
            for token, word, best in tokens
            if token != "</s>" and word >= 0 and is_word_S[best]
        }
        return " ".join(f"{i}-{j}" for i, j in sorted(pairs))


def alignment(
    tokenizer: Tokenizer,
    texts: tuple[str, str],
    tokens: tuple[Sequence[int], Sequence[int]],
    weights_TS: np.ndarray,
) -> Alignment:
    """Align a (source, target) pair of texts, given their token ids and attention weights."""
    sides, words = [], []
    for text, ids, side in zip(texts, tokens, (tokenizer.source, tokenizer.target)):
        sides.append(tuple(side.tokens(ids)))
        words.append(token_words(side, sides[-1], text.split()))
    source, target = sides
    return Alignment((*source, "</s>"), (*target, "</s>"), weights_TS, *words)


def token_words(side: SubwordModel, tokens: Sequence[str], words: Sequence[str]) -> list[int]:
    """Map each token of a text to the zero-based index of the word in which it ends; -1 for a
    language. ``words`` are the text's words, or smaller parts.
    """
    encoded = [
        # SentencePiece decodes <unk> to ⁇, which it may encode as two question marks.
        ["<unk>"] if word == "⁇" else side.tokens(ids)
        for word, ids in zip(words, side.encode(words, first=()))
    ]
    is_first = [token in side.first_tokens for token in tokens]
    spelled = ["</s>" if first else token for first, token in zip(is_first, tokens)]
    numbers = word_numbers(spelled, encoded)
    return [-1 if first else number for first, number in zip(is_first, numbers)]


def word_numbers(tokens: Sequence[str], words: Iterable[Sequence[str]]) -> list[int]:
    """Map each token of a text to the zero-based index of the word in which it ends.

    Words are separated by whitespace. Normalization can split a word or remove it, so ``words``
    holds the tokens of each word encoded on its own. Together they spell the same characters as
    ``tokens``.
    """
    ends = list(accumulate(map(_letters, words)))
    so_far = accumulate(_letters([token]) for token in tokens)
    return [min(bisect_left(ends, max(1, end)), max(0, len(ends) - 1)) for end in so_far]


def _letters(tokens: Sequence[str]) -> int:
    """Count the characters in tokens, without spaces; an unknown token counts as one."""
    special = {"</s>": 0, "<unk>": 1}
    return sum(special.get(token, len(token.replace("▁", ""))) for token in tokens)
