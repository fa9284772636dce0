"""Positions where long lines are split."""

from __future__ import annotations

import itertools

import pytest

from transformer_jax.config import TokenizerConfig
from transformer_jax.decoding.segments import _SENTENCE_END, split
from transformer_jax.tokenizer import Tokenizer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LINES = [" ".join(WORDS[(3 * i + j) % 10] for j in range(i % 9 + 1)) for i in range(23)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(
        ((line, line.upper()) for line in LINES),
        TokenizerConfig(vocab_size=50, algorithm="unigram"),
    )


def test_long_lines_are_split_at_sentence_ends(tokenizer):
    sentences = ["one two.", "three four five six!", "seven eight nine ten one two?", "three."]
    line = " ".join(sentences)
    segments = split(line, 23, tokenizer)
    assert len(segments) > 1 and all(len(segment) <= 23 for segment in segments)
    joined = [token for segment in segments for token in segment]
    assert joined == tokenizer.source.encode([line])[0]
    ends = {tokenizer.source.encode([sentence])[0][-1] for sentence in sentences}
    assert {segment[-1] for segment in segments} <= ends


def cut(line):
    """Sentences as _SENTENCE_END separates them."""
    ends = [0, *(found.end() for found in _SENTENCE_END.finditer(line)), len(line)]
    return [
        line[start:end].strip()
        for start, end in itertools.pairwise(ends)
        if line[start:end].strip()
    ]


@pytest.mark.parametrize(
    "sentences",
    [
        ["「行こう！？」", "そうだ。", "え？！", "（はい。）", "おわり"],
        ["他说：“好。”", "我们走吧！", "真的？！…", "是"],
        ["बच्चे खेलते हैं।", "कहाँ?", "यहाँ ॥", "x"],
        ["كيف حالك؟", "بخير.", "وہ گیا۔", "x"],
        ["Say “yes.”", "No 3.5 or e.g.x here…", "Quoi ? !", "« Oui ! »", '"Why?"', "(End.)", "x"],
    ],
)
def test_ends_of_sentences_stand_behind_all_their_marks(sentences):
    spaced = sentences[-1] == "x"
    assert cut((" " * spaced).join(sentences)) == sentences


CHINESE = ["我们去学校。", "「你好！」", "他说。", "今天很好？！", "我不去…。"]


@pytest.fixture(scope="module")
def chinese():
    lines = [sentence for sentence in CHINESE for _ in range(5)]
    return Tokenizer.train(
        zip(lines, lines, strict=True), TokenizerConfig(vocab_size=32, algorithm="bpe")
    )


def test_segments_without_spaces_have_the_tokens_of_their_text(chinese):
    """No token for a space stands inside a segment, and a sentence that is too long itself is cut
    anywhere.
    """
    line = "".join(CHINESE) * 3 + "我们去学校" * 9
    segments = split(line, 20, chinese)
    texts = [chinese.source.decode(segment) for segment in segments]
    assert "".join(texts) == chinese.source.decode(chinese.source.encode([line])[0])
    assert segments == chinese.source.encode(texts) and all(
        len(segment) <= 20 for segment in segments
    )
    assert all("▁" not in "".join(chinese.source.tokens(segment))[1:] for segment in segments)
    assert [text[-1] for text in texts[:3]] == ["!", "。", "」"]  # as many sentences as fit
