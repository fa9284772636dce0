"""Splits overlong lines into segments and joins the segments' translations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from transformer_jax.tokenization.tokenizer import Tokenizer

# Closing quotation marks and brackets, and repeated end marks, belong to the preceding sentence.
_SENTENCE_END = re.compile(
    r"[.!?…؟۔।॥።](?:[\"'”’»)\]]|\s[”’»)\]])*\s++(?![.!?…؟۔।॥።”’»)\]])"  # must precede a space
    r"|[。！？｡][。！？｡….!?」』）】〉》”’\"')\]]*\s*"
)
_SPACE = re.compile(r"\s+")
# The end of a text whose last letter is Chinese or Japanese (or a text of only CJK punctuation).
_UNSPACED_END = re.compile(r"[\u3001-\u30ff\u3400-\u9fff\uff00-\uffef\U00020000-\U0003ffff]\W*$")


def split(
    line: str, limit: int, tokenizer: Tokenizer, first: Sequence[int] | None = None
) -> list[tuple[str, list[int]]]:
    """Split a line into segments of at most ``limit`` source tokens. Each segment has as many whole
    sentences as fit. Returns the text and the token ids of each.

    An overlong sentence is split between words, and an overlong word in the middle. A tag at the
    beginning of the line, such as ``>>deu<<``, is repeated before each segment, as is ``first``
    (``SubwordModel.encode``).
    """
    tag, rest = tokenizer.source.split_tag(line, first)
    if len(tag) > limit // 2:  # too long for a tag
        tag, rest = [], line
    limit -= len(tag)
    texts, tokens = [""], list[list[int]]([[]])
    for text, its_tokens in _units(rest, limit, tokenizer):
        if len(tokens[-1]) + len(its_tokens) > limit:
            texts.append("")
            tokens.append([])
        texts[-1] += text
        tokens[-1] += its_tokens
    # Encode each segment as a whole. This rarely takes more tokens than encoding its units, because
    # every unit starts with a space token, even if it has no leading space.
    prefix = line.removesuffix(rest.lstrip()) if tag else ""
    whole = tokenizer.source.encode([prefix + text.strip() for text in texts], first=first)
    return [
        (text, segment if len(segment) <= len(tag) + limit else tag + units)
        for text, segment, units in zip(texts, whole, tokens)
    ]


def _units(text: str, limit: int, tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Split ``text`` into as few units as possible, each of at most ``limit`` tokens."""
    [tokens] = tokenizer.source.encode([text.strip()], first=())
    if len(tokens) <= limit or len(text) == 1:
        yield text, tokens[:limit]
        return
    for places in (_SENTENCE_END.finditer(text), _SPACE.finditer(text)):
        ends = [place.end() for place in places if place.end() < len(text)]
        if ends:
            break
    else:
        ends = [len(text) // 2]
    for start, end in pairwise([0, *ends, len(text)]):
        yield from _units(text[start:end], limit, tokenizer)


def joint(before: str) -> str:
    """Return the separator after a translation: a space, or nothing after Chinese or Japanese."""
    return "" if not before or _UNSPACED_END.search(before) else " "
