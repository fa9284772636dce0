"""SentencePiece models trained elsewhere, with any of SentencePiece's flags, and BPE-dropout."""

import functools
import io
import random
from collections import Counter
from itertools import pairwise

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.errors import UserError
from transformer_jax.tokenization.segmenters import model_proto
from transformer_jax.tokenization.special_ids import EOS_ID, UNK_ID
from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.tokenization.subword_sampling import BpeDropout
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.tokenization.vocabulary import Vocabulary
from transformer_jax.translation.segments import cut_into_segments

TEXT = ["one hundred and two", "  two  ones and a hundred", "three and two hundred", "tw  onetwo"]
SPAN = {"split_by_whitespace": False}
SUFFIX = {"treat_whitespace_as_suffix": True}
KEEP = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
BARE = {"add_dummy_prefix": False}
SYMBOLS = {"user_defined_symbols": ["<2de>", "<2de-formal>", "an"], "vocab_size": 54}
MODELS = {
    "default": {},
    "suffix": SUFFIX,
    "span": SPAN,
    "suffix, span": SUFFIX | SPAN,
    "no dummy prefix": BARE,
    "no dummy prefix, suffix": BARE | SUFFIX,
    "no dummy prefix, span": BARE | SPAN,
    "extra whitespace": KEEP,
    "extra whitespace, span": KEEP | SPAN,
    "extra whitespace, no dummy prefix, suffix": KEEP | BARE | SUFFIX,
    "whitespace-only pieces": KEEP | {"allow_whitespace_only_pieces": True},
    "bytes": {"byte_fallback": True, "vocab_size": 310},
    "bytes, suffix, span": SUFFIX | SPAN | {"byte_fallback": True, "vocab_size": 310},
    "symbols": SYMBOLS,
    "symbols, suffix": SYMBOLS | SUFFIX,
    "symbols, span": SYMBOLS | SPAN,
    "symbols, no dummy prefix": SYMBOLS | BARE,
    "no split by script or number": {"split_by_unicode_script": False, "split_by_number": False},
    "digits": {"split_digits": True, "normalization_rule_name": "nfkc_cf"},
}
WORDS = ["one", "two", "hundred", "a", "and"]
EXAMPLES = settings(max_examples=25, deadline=None)
PARTS = [*"  ontwhudrea1é中<>", *TEXT, "one ", "hundred", "<2de>", "<unk>"]
LINES = st.lists(st.lists(st.sampled_from(PARTS)).map("".join), min_size=1, max_size=4)


@functools.cache
def model(name: str) -> SubwordModel:
    flags = {"model_type": "bpe", "vocab_size": 48} | MODELS[name]
    return SubwordModel(train(TEXT * 20, **flags))


def train(lines: list[str], **flags: object) -> bytes:
    writer = io.BytesIO()
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=writer, minloglevel=2, **ids, **flags
    )
    return writer.getvalue()


def own(tokens: list[str]) -> Vocabulary:
    """A vocabulary with the ids of models trained here."""
    return Vocabulary(tuple(tokens), pad_id=0, eos_id=2, unk_id=3, bos_id=1)


def pieces(model: SubwordModel) -> list[str]:
    return model.tokens(range(model.vocab_size))


@pytest.mark.parametrize("name", MODELS)
@EXAMPLES
@given(lines=LINES, seed=st.integers(0, 9))
def test_rare_drops_give_the_segmentation_of_decoding(name, lines, seed):
    ours = model(name)
    foreign = SubwordModel(ours.model, own([*pieces(ours)[:4], *reversed(pieces(ours)[4:])]))
    for each in (ours, foreign):
        assert each.encode(lines, sampling=BpeDropout(1e-9), seed=seed) == each.encode(lines)


@pytest.mark.parametrize("name", MODELS)
@EXAMPLES
@given(words=st.lists(st.sampled_from(WORDS)), seed=st.integers(0, 9))
def test_decoding_inverts_encoding(name, words, seed):
    ours, line = model(name), " ".join(words)
    foreign = SubwordModel(ours.model, own(pieces(ours)))
    for each in (ours, foreign):
        for sampling in (None, BpeDropout(0.4)):
            [ids] = each.encode([line], sampling=sampling, seed=seed)
            assert each.decode(ids) == line


@pytest.mark.parametrize("name", MODELS)
@EXAMPLES
@given(words=st.lists(st.sampled_from(WORDS[:4])), limit=st.integers(9, 15))
def test_segments_of_a_long_line_are_encoded_like_lines(name, words, limit):
    ours = Tokenizer.from_models(model(name).model)
    tag = "<2de> " if "symbols" in name and words else ""
    segments = [
        segment.tokens for segment in cut_into_segments(tag + " ".join(words), limit, ours)[0]
    ]
    texts = [ours.source.decode(segment).removeprefix(tag) for segment in segments]
    assert " ".join(texts).split() == words
    assert segments == ours.source.encode([tag + text for text in texts])
    assert all(len(segment) <= limit for segment in segments)


@pytest.mark.parametrize("sampling", [None, BpeDropout(0.1)])
def test_special_tokens_in_a_text_are_words(sampling):
    """Neither < nor > is in the vocabulary, so the whole word is one unknown token."""
    lines = ["</s>", "one </s> two", "<s><pad>"]
    letters = train(["a b c d"] * 9, model_type="bpe", vocab_size=9)
    for vocabulary in (None, own([piece.piece for piece in model_proto(letters).pieces])):
        ids = SubwordModel(letters, vocabulary).encode(lines, sampling=sampling)
        assert {UNK_ID} < {token for line in ids for token in line}
        assert all(token > EOS_ID for line in ids for token in line)


def test_a_model_with_unused_tokens():
    proto = model_proto(model("default").model)
    proto.pieces[9].type = proto.pieces[9].UNUSED
    changed = SubwordModel(proto.SerializeToString())
    assert changed.encode(TEXT)
    with pytest.raises(
        UserError,
        match="without unused tokens; set tokenizer.bpe_dropout to 0",
    ):
        changed.encode(TEXT, sampling=BpeDropout(0.1))


# Algorithm 1


def algorithm_1(text: str, ranks: dict[str, float], dropout: float, generator) -> tuple[str, ...]:
    """BPE-dropout exactly as Algorithm 1 says it."""
    split = list(text)
    while True:
        merges = [
            (ranks[left + right], place)
            for place, (left, right) in enumerate(pairwise(split))
            if left + right in ranks and generator.random() >= dropout
        ]
        if not merges:
            return tuple(split)
        _, place = min(merges)
        split[place : place + 2] = [split[place] + split[place + 1]]


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    ("name", "line"),
    [("default", "hundred"), ("suffix", "hundred"), ("span", "and two"), ("default", "onetwo")],
)
def test_sampling_has_the_papers_distribution(name, line, dropout):
    ours, n = model(name), 4000
    ranks = {p.piece: -p.score for p in model_proto(ours.model).pieces if p.type == p.NORMAL}
    text = sentencepiece.SentencePieceProcessor(model_proto=ours.model).normalize(line)
    generator = random.Random(0)
    expected = Counter(algorithm_1(text, ranks, dropout, generator) for _ in range(n))
    found = Counter(
        tuple(ours.tokens(ids))
        for ids in ours.encode([line] * n, sampling=BpeDropout(dropout), seed=1)
    )
    assert len(expected) > 4
    distance = sum(abs(found[each] - expected[each]) for each in found | expected) / (2 * n)
    assert distance < 0.5 * (len(expected) / n) ** 0.5 + 0.01
