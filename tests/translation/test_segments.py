"""Positions where long lines are split."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import WORDS, lines_of_words, train_tokenizer

from transformer_jax.settings.config import TokenizerConfig
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.segments import cut_into_segments
from transformer_jax.translation.sentences import divide

LINES = lines_of_words(23)


@functools.cache
def small_tokenizer() -> Tokenizer:
    return train_tokenizer(lines_of_words(60))


def test_each_sentence_of_a_long_line_is_a_segment(tokenizer):
    sentences = ["one two.", "three four five six!", "seven eight nine ten one two?", "three."]
    line = " ".join(sentences)
    segments = [segment.tokens for segment in cut_into_segments(line, 23, tokenizer)[0]]
    assert len(segments) > 1 and all(len(segment) <= 23 for segment in segments)
    joined = [token for segment in segments for token in segment]
    assert joined == tokenizer.source.encode([line])[0]
    assert segments == tokenizer.source.encode(sentences)


@pytest.mark.parametrize(
    "sentences",
    [
        ["「行こう！？」", "そうだ。", "え？！", "おわり"],
        ["他说：“好。”", "我们走吧！", "真的？！", "是"],
        ["बच्चे खेलते हैं।", "कहाँ?", "यहाँ ॥", "X"],
        ["كيف حالك؟", "بخير.", "وہ گیا۔", "X"],
        ["Say “yes.”", "No 3.5 or e.g.x here.", "« Oui ! »", '"Why?"', "X"],
    ],
)
def test_sentences_end_after_all_their_punctuation(sentences):
    spaced = sentences[-1] == "X"
    assert divide((" " * spaced).join(sentences)).sentences == sentences


def test_ten_thousand_words_in_one_line(tokenizer):
    line = " ".join(WORDS * 1000)
    segments = [segment.tokens for segment in cut_into_segments(line, 23, tokenizer)[0]]
    assert max(map(len, segments)) <= 23
    assert [*itertools.chain(*segments)] == tokenizer.source.encode([line])[0]


WORDS_AND_SPACES = st.sampled_from(
    [
        "one",
        "two",
        "three.",
        "four!",
        "日本語。",
        "été",
        "😀",
        "a" * 30,
        "ﬁ",
        "½",
        "\t",
        "  ",
        "\u3000",
    ]
)


@settings(deadline=None, max_examples=200)
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.lists(WORDS_AND_SPACES, max_size=20).map(" ".join),
        st.lists(WORDS_AND_SPACES, max_size=20).map("".join),
    ),
    limit=st.integers(1, 24),
)
def test_no_segment_of_any_text_is_above_the_limit_and_none_is_lost(text, limit):
    segments, after = cut_into_segments(text, limit, small_tokenizer())
    assert all(len(segment.tokens) <= limit for segment in segments)
    joined = "".join(segment.before + segment.source for segment in segments) + after
    assert re.sub(r"\s+", " ", joined) == re.sub(r"\s+", " ", text)  # no space inside a word


def test_leading_tags_begin_each_segment():
    tags = ("<2de>", "<BT>")
    settings = TokenizerConfig(vocab_size=52, algorithm="unigram", user_defined_symbols=tags)
    tokenizer = Tokenizer.train([(line, line.upper()) for line in LINES], settings)

    def encode(text):
        return tokenizer.source.encode([text])[0]

    line, tags = "<2de> <BT> " + " ".join(WORDS * 3), encode("<2de> <BT>")
    segments = [segment.tokens for segment in cut_into_segments(line, 15, tokenizer)[0]]
    assert len(segments) > 3 and all(len(segment) <= 15 for segment in segments)
    assert all(segment[: len(tags)] == tags for segment in segments)
    rest = [segment[len(tags) :] for segment in segments]
    assert [*itertools.chain(*rest)] == encode(line)[len(tags) :]
    many = "<2de> " * 30 + "one two"  # longer than a segment, so treated as text
    assert [
        id for segment in cut_into_segments(many, 15, tokenizer)[0] for id in segment.tokens
    ] == encode(many)


CHINESE = ["我们去学校。", "「你好！」", "他说。", "今天很好？！", "我不去…。"]


@pytest.fixture(scope="module")
def chinese():
    lines = [sentence for sentence in CHINESE for _ in range(5)]
    return Tokenizer.train(
        zip(lines, lines, strict=True), TokenizerConfig(vocab_size=32, algorithm="bpe")
    )


def test_text_without_spaces_is_split_between_sentences(chinese):
    """A sentence that is too long is cut anywhere. Segments contain no space tokens."""
    line = "".join(CHINESE) * 3 + "我们去学校" * 9
    segments = [segment.tokens for segment in cut_into_segments(line, 20, chinese)[0]]
    texts = [chinese.source.decode(segment) for segment in segments]
    assert "".join(texts) == chinese.source.decode(chinese.source.encode([line])[0])
    assert segments == chinese.source.encode(texts)
    assert max(map(len, segments)) <= 20
    assert all("▁" not in "".join(chinese.source.tokens(segment))[1:] for segment in segments)
    assert texts[:5] == [chinese.source.decode(ids) for ids in chinese.source.encode(CHINESE)]
