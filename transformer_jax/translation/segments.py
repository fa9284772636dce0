"""Cuts text that is too long for the model: between sentences, then between words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from transformer_jax.tokenization.languages import NO_AFFIXES, Affixes
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.sentences import divide

_SPACE = re.compile(r"\s+")


class Segment(NamedTuple):
    """A part of a text that the model translates at once."""

    source: str
    """The text without the tag that begins every segment."""
    tokens: list[int]
    """Source tokens, with the tag."""
    before: str = ""
    """Text between the previous segment and this one, usually whitespace."""


def cut_into_segments(
    text: str,
    limit: int,
    tokenizer: Tokenizer,
    affixes: Affixes = NO_AFFIXES,
    language: str = "",
) -> tuple[list[Segment], str]:
    """Cut a text into segments of at most ``limit`` source tokens. Returns them, and the text after
    the last one.

    A segment is a sentence. An overlong sentence is cut between words, and an overlong word in the
    middle. A tag at the beginning of the text, such as ``>>deu<<``, is repeated before each
    segment, and ``affixes`` stand around each. ``language`` is for ``divide``.
    """
    limit -= len(affixes.source([]))
    tag_tokens, untagged = tokenizer.source.split_tag(text)
    if len(tag_tokens) > limit // 2:  # too long for a tag
        tag_tokens = []
        untagged = text
    tag = tokenizer.source.tag(text) if tag_tokens else ""
    limit -= len(tag_tokens)
    segments = list[Segment]()
    divided = divide(untagged, language=language)
    for text_before, sentence in zip(divided.before, divided.sentences):
        for piece, piece_tokens in _pieces(sentence, limit, tokenizer):
            segments.append(Segment(piece.strip(), tag_tokens + piece_tokens, text_before))
            text_before = " " if piece[-1].isspace() else ""
    # Encode each segment as a whole. This rarely takes more tokens than encoding its words, because
    # every word starts with a space token, even if it has no leading space.
    encoded = tokenizer.source.encode([tag + segment.source for segment in segments])
    for index, (segment, tokens) in enumerate(zip(segments, encoded)):
        if len(tokens) > len(tag_tokens) + limit:
            tokens = segment.tokens
        segments[index] = segment._replace(tokens=affixes.source(tokens))
    return segments, divided.after


def _pieces(sentence: str, limit: int, tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Divide a sentence into texts of as many whole words as fit into ``limit`` tokens. Yields each
    with its tokens.
    """
    text = ""
    tokens = list[int]()
    for word, word_tokens in _words(sentence, limit, tokenizer):
        if text and len(tokens) + len(word_tokens) > limit:
            yield text, tokens
            text = ""
            tokens = []
        text += word
        tokens = tokens + word_tokens
    yield text, tokens


def _words(text: str, limit: int, tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Divide a text into words, and words in the middle, where it has more than ``limit`` tokens.
    Yields each word with its tokens.
    """
    [tokens] = tokenizer.source.encode([text.strip()])
    if len(tokens) <= limit or len(text) == 1:
        yield text, tokens[:limit]
        return
    ends = [space.end() for space in _SPACE.finditer(text) if space.end() < len(text)]
    for start, end in pairwise([0, *(ends or [len(text) // 2]), len(text)]):
        yield from _words(text[start:end], limit, tokenizer)
