"""Over-long lines: cut into segments before the search, joined after it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from transformer_jax.tokenizer import Tokenizer

# Closing quotation marks and brackets, and further end marks, belong to the sentence before.
_SENTENCE_END = re.compile(
    r"[.!?…؟۔।॥።](?:[\"'”’»)\]]|\s[”’»)\]])*\s++(?![.!?…؟۔।॥።”’»)\]])"  # here a space must follow
    r"|[。！？｡][。！？｡….!?」』）】〉》”’\"')\]]*\s*"
)
_SPACE = re.compile(r"\s+")
# The end of a text whose last letter is Chinese or Japanese (or that has only their signs).
_UNSPACED_END = re.compile(r"[\u3001-\u30ff\u3400-\u9fff\uff00-\uffef\U00020000-\U0003ffff]\W*$")


def split(line: str, limit: int, tokenizer: Tokenizer) -> list[list[int]]:
    """The source tokens of a line in segments of at most ``limit``: as many whole sentences as fit.

    An over-long sentence is cut between words, an over-long word anywhere. A tag that the line
    begins with goes before each segment.
    """
    tag, rest = tokenizer.source.split_tag(line)
    if len(tag) <= limit // 2:  # otherwise it is no tag, whatever it is
        line, limit = rest, limit - len(tag)
    else:
        tag = []
    texts, tokens = [""], list[list[int]]([[]])
    for text, its_tokens in _units(line, limit, tokenizer):
        if len(tokens[-1]) + len(its_tokens) > limit:
            texts.append("")
            tokens.append([])
        texts[-1] += text
        tokens[-1] += its_tokens
    # Encoded as one text a segment has its own tokens, as a rule no more: a sentence that no space
    # precedes begins with one for it.
    whole = tokenizer.source.encode([text.strip() for text in texts])
    return [
        tag + (segment if len(segment) <= limit else units)
        for segment, units in zip(whole, tokens, strict=True)
    ]


def _units(text: str, limit: int, tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """``text`` cut as seldom as possible into stretches of at most ``limit`` tokens."""
    [tokens] = tokenizer.source.encode([text.strip()])
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
    """What joins a segment's translation to the next: a space, but nothing after Chinese or
    Japanese.
    """
    return "" if not before or _UNSPACED_END.search(before) else " "
