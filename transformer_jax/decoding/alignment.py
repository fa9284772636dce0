"""Word alignments of a translation with its source, by the model's attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.decoding.segments import joint
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
        """``0-0 1-2``: each token's best source token, EOS apart, as the words they belong to."""
        if min(self.weights_TS.shape) < 2:
            return ""
        best_T = self.weights_TS[:-1, :-1].argmax(axis=1)
        tokens = zip(self.target, self.target_words, best_T)  # </s> stands between segments
        pairs = {(self.source_words[best], word) for token, word, best in tokens if token != "</s>"}
        return " ".join(f"{i}-{j}" for i, j in sorted(pairs))


def alignment(
    tokenizer: Tokenizer,
    texts: tuple[str, str],
    tokens: tuple[Sequence[int], Sequence[int]],
    weights_TS: np.ndarray,
) -> Alignment:
    """The alignment of (source, target) texts, given the token ids of both and their weights."""
    sides, words = [], []
    for text, ids, encode, names in (
        (texts[0], tokens[0], tokenizer.encode_source, tokenizer.source_tokens),
        (texts[1], tokens[1], tokenizer.encode_target, tokenizer.target_tokens),
    ):
        sides.append(tuple(names(ids)))
        words.append(word_numbers(sides[-1], map(names, encode(text.split()))))
    source, target = sides
    return Alignment((*source, "</s>"), (*target, "</s>"), weights_TS, *words)


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
