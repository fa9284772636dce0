"""Alignments: in order, over the words of the original text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from random_models import lines_of_words, make_model, train_tokenizer

from transformer_jax.settings.config import DecodingConfig
from transformer_jax.tokenization.special_ids import UNK_ID
from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.tokenization.words import word_numbers
from transformer_jax.translation.alignment import Alignment, align_texts, concatenate_alignments
from transformer_jax.translation.output_formats import output_values
from transformer_jax.translation.requests import Translation
from transformer_jax.translation.scoring import Scorer

LINES = lines_of_words(12)
TARGETS = [line.upper() for line in reversed(LINES)]
CONFIG = DecodingConfig(beam_size=2, max_extra_length=6, max_source_length=16, batch_size=4)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES)


@pytest.fixture(scope="module")
def scorer(tokenizer):
    return Scorer(make_model(tokenizer), tokenizer, CONFIG)


def test_translations_are_aligned_in_order(scorer):
    def translation(text):
        tokens = scorer.tokenizer.target.tokens(scorer.tokenizer.target.encode([text])[0])
        return Translation(text, 0.0, 0.0, len(tokens) + 1, tuple(tokens))

    pairs = [("one two", translation("ONE TWO")), ("one two", translation("TWO"))]
    pairs += [("", Translation("", 0, 0, 0))]
    pairs += [(LINES[i], translation(TARGETS[i])) for i in range(2, 9)]
    found = scorer.align(pairs)
    assert [t.alignment is None for t in found] == [False, False, True] + [False] * 7
    for (text, unaligned), t in zip(pairs, found, strict=True):
        assert t == unaligned
        if (alignment := t.alignment) is not None:
            assert alignment.target == (*t.tokens, "</s>") and alignment.source[-1] == "</s>"
            source, target = alignment.source[:-1], scorer.tokenizer.target.ids(t.tokens)
            [expected] = scorer.align_tokens([(scorer.tokenizer.source.encode([text])[0], target)])
            np.testing.assert_allclose(alignment.weights_TS, expected, atol=1e-6)
            assert "".join(source).replace("▁", " ").strip() == text
            for i, j in (map(int, pair.split("-")) for pair in alignment.hard().split()):
                assert i < len(text.split()) and j < len(t.text.split())


def test_hard_alignments_join_words():
    weights_TS = np.array(  # the third token attends most to EOS, which is not a word
        [[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.6, 0.1], [0.1, 0.3, 0.2, 0.4], [0, 0, 0, 1]]
    )
    source, target = ("▁gr", "een", "▁room"), ("▁grün", "e", "▁Wand")
    alignment = Alignment((*source, "</s>"), (*target, "</s>"), weights_TS, [0, 0, 1], [0, 0, 1])
    assert alignment.hard() == "0-0 0-1 1-0"
    for tokens in (source, target):
        assert word_numbers(tokens, [tokens[:2], tokens[2:]]) == [0, 0, 1]
    parts = ("▁x", "<unk>", "y", "</s>", "▁z")
    numbers = word_numbers(parts, [("▁x",), ("<unk>",), ("▁y",), ("▁z",)])
    joined = Alignment(
        ("▁a", "▁b", "</s>"), (*parts, "</s>"), np.eye(3)[[0, 0, 1, 2, 1, 2]], [0, 1], numbers
    )
    assert joined.hard() == "0-0 0-1 1-2 1-3"  # x ⁇ y z
    assert Alignment(("</s>",), ("▁x", "</s>"), np.ones((2, 1)), [], [0]).hard() == ""


def test_a_space_on_its_own_belongs_to_the_next_word():
    tokens = ("▁", "a", "b", "▁", "x", "▁")
    assert word_numbers(tokens, [("▁", "a", "b"), ("▁", "x")]) == [0, 0, 0, 1, 1, 1]


def test_segments_in_chinese_are_one_word():
    tokens = ("▁我", "。", "</s>", "▁你", "▁x")
    assert word_numbers(tokens, [("▁我", "。", "你"), ("▁x",)]) == [0, 0, 0, 0, 1]


def test_hard_alignments_count_words_of_the_original_text(scorer, tokenizer):
    """Normalization splits ONE´TWO into two words and removes a zero-width space."""
    text = "one´two \u200b three"
    [source] = tokenizer.source.encode([text])
    assert "".join(tokenizer.source.tokens(source)).count("▁") == 3
    [translation] = scorer.score([(text, text.upper())])
    [alignment] = [t.alignment for t in scorer.align([(text, translation)])]
    tokens = zip(alignment.source, alignment.source_word_ids, strict=False)
    assert {number for token, number in tokens if token != "▁"} == {0, 2}
    assert set(alignment.target_word_ids) == {0, 2}


def test_an_unknown_token_is_a_separate_word():
    """It is decoded as ⁇, which this vocabulary would encode as two question marks."""
    tokenizer = train_tokenizer(["why ? who ?? what ???", *LINES])
    one, a_two, marks = tokenizer.target.encode(["ONE", "A TWO", "⁇"])
    tokens = [*one, UNK_ID, *a_two]
    text = tokenizer.target.decode(tokens)
    assert text.split() == ["ONE", "⁇", "A", "TWO"] and UNK_ID not in marks
    found = align_texts(tokenizer, ("", text), ([], tokens), np.ones((len(tokens) + 1, 1)))
    names = zip(found.target, found.target_word_ids, strict=False)
    assert [number for name, number in names if name == "<unk>"] == [1]
    assert found.target_word_ids == sorted(found.target_word_ids)
    assert set(found.target_word_ids) == {0, 1, 2, 3}


def test_eos_has_the_name_that_the_vocabulary_gives_it(tokenizer):
    """As in BERT's vocabulary, where EOS is [SEP]. It is the word of no token."""
    letters = tokenizer.source
    tokens = tuple("[SEP]" if token == "</s>" else token for token in letters.vocabulary.tokens)
    vocabulary = replace(letters.vocabulary, tokens=tokens)
    side = SubwordModel(letters.segmenter, vocabulary)
    [ids] = side.encode([LINES[0]])
    weights_TS = np.eye(len(ids) + 1)
    texts = (LINES[0], LINES[0])
    pair = align_texts(Tokenizer(side, side), texts, (ids, ids), weights_TS)
    assert pair.source[-1] == pair.target[-1] == side.eos_token == "[SEP]"
    both = concatenate_alignments([pair, pair])
    assert both.source.count("[SEP]") == 1 and both.target.count("[SEP]") == 2
    count = len(LINES[0].split())
    assert pair.hard() == " ".join(f"{i}-{i}" for i in range(count))
    assert both.hard() == " ".join(f"{i}-{i}" for i in range(2 * count))
    translation = Translation("c d", 0.0, 0.0, 3, ("c", "d"), (0.0,) * 3, eos_token="[SEP]")
    assert output_values(translation, token_scores=True)["tokens"] == ["c", "d", "[SEP]"]
