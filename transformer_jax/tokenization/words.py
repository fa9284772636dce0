"""Whitespace words of a text and the tokens that spell them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
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
        for word, ids in zip(words, side.encode(words))
    ]
    special = {
        *side.tokens({*side.vocabulary.languages, *side.vocabulary.hidden_ids} - {side.eos_id})
    }
    numbers = word_numbers([_text_of_token(side, token, special) for token in tokens], encoded)
    return [-1 if token in special else number for token, number in zip(tokens, numbers)]


def _text_of_token(side: SubwordModel, token: str, special: Container[str]) -> str:
    """Return a token in SentencePiece's spelling."""
    if token in special or token == side.eos_token:
        return "</s>"
    is_unknown = side.unk_id is not None and token == side.vocabulary.name(side.unk_id)
    return "<unk>" if is_unknown else token


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
    sides = []
    for side, ids, text in zip((tokenizer.source, tokenizer.target), encoded, texts):
        sides.append(token_words(side, side.tokens(ids), text.split()))
    source, target = sides
    place_of_eos = len(source)
    if tokenizer.source.eos_id in encoded[0]:  # a language follows it
        place_of_eos = encoded[0].index(tokenizer.source.eos_id)
        source[place_of_eos] = -1
    positions = list[int]()
    for target_word, word_tokens in groupby(target):
        count = len(list(word_tokens))
        linked_positions = [
            position for position, word in enumerate(source, 1) if (word, target_word) in links
        ]
        linked_positions = linked_positions or [0]
        positions += (linked_positions[n * len(linked_positions) // count] for n in range(count))
    return [*positions, place_of_eos + 1]
