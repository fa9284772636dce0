"""Whitespace words of a text and the tokens that spell them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.tokenization.tokenizer import Tokenizer


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
    # A space on its own begins the next word.
    marks = [end + (token == "▁") for token, end in zip(tokens, so_far)]
    return [min(bisect_left(ends, max(1, end)), max(0, len(ends) - 1)) for end in marks]


def _letters(tokens: Sequence[str]) -> int:
    """Count the characters in tokens, without spaces; an unknown token counts as one."""
    special = {"</s>": 0, "<unk>": 1}
    return sum(special.get(token, len(token.replace("▁", ""))) for token in tokens)


def token_links(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    encoded: tuple[Sequence[int], Sequence[int]],
    links: set[tuple[int, int]],
) -> list[int]:
    """Convert links between (source, target) words to links of tokens: for each target token, EOS
    included, the position of one source token, counted from 1; 0: none.

    The tokens of a target word are spread evenly over the tokens of all linked source words. EOS
    links to EOS.
    """
    sides = zip((tokenizer.source, tokenizer.target), encoded, texts)
    source, target = (token_words(side, side.tokens(ids), x.split()) for side, ids, x in sides)
    found = list[int]()
    for j, same in groupby(target):
        count = len(list(same))
        linked = [at for at, i in enumerate(source, 1) if (i, j) in links] or [0]
        found += (linked[n * len(linked) // count] for n in range(count))
    return [*found, len(source) + 1]
