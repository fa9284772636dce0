"""Plans: how requests become sentences for the search, and hypotheses become translations."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_models import WORDS, lines_of_words, make_model, train_tokenizer

from transformer_jax.decoding.search import Hypothesis
from transformer_jax.settings.config import DecodingConfig, TokenizerConfig
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.alignment import Alignment, align_texts, concatenate_alignments
from transformer_jax.translation.plan import Plan
from transformer_jax.translation.requests import Request, Translation
from transformer_jax.translation.translator import Translator

CONFIG = DecodingConfig(beam_size=2, max_extra_length=6, max_source_length=16, batch_size=4)


@pytest.fixture(scope="module")
def translator():
    tokenizer = train_tokenizer([f"{line}. {line.title()}!" for line in lines_of_words(23)])
    return Translator(make_model(tokenizer), tokenizer, CONFIG)


def copied(plan: Plan) -> str:
    """The text with every part translated as itself."""
    parts = [[Translation(part.source, -1.0, -1.0, 2, ("x",))] for part in plan.parts]
    [translation] = plan.join_parts(parts)
    return translation.text


def sources(plan: Plan) -> list[str]:
    return [part.source for part in plan.parts]


TEXT = "One two.\u00a0Three four!  Five six?\n\n* * *\n Seven."


@pytest.mark.parametrize("text", [TEXT, "", " \n", "* * *", "One.Two", " One.\u3000Two. "])
def test_white_space_between_sentences_survives(translator, text):
    """A no-break space too. A text that is not divided loses line breaks."""
    assert copied(translator.plan(Request(text), split_sentences=True)) == text
    assert copied(translator.plan(Request(text), split_sentences=False)).split() == text.split()


@given(st.lists(st.sampled_from(["One two. ", "Three!", "\n", "\u00a0", "* ", "Four? ", "五。"])))
def test_a_copy_of_the_sentences_is_the_text(translator, pieces):
    text = "".join(pieces)
    assert copied(translator.plan(Request(text), split_sentences=True)) == text


def test_what_is_divided(translator):
    """A document and, on request, a text. A plain line is one sentence, unless it is too long."""
    line = "One two three. Four five six."
    assert sources(translator.plan(Request(line))) == [line]
    both = ["One two three.", "Four five six."]
    assert sources(translator.plan(Request(line), split_sentences=True)) == both
    page = Request(f"<p>{line}</p><p>Seven</p>", format="html")
    assert sources(translator.plan(page)) == [*both, "Seven"]
    assert sources(translator.plan(page, split_sentences=False)) == [line, "Seven"]
    long = translator.plan(Request(" ".join([line] * 3)))
    assert sources(long) == [" ".join([line] * 3)]
    assert [each.source for each in long.parts[0].segments] == [
        "One two three.",
        "Four five six.",
    ] * 3
    assert len(long.sentences) == 6


def test_sentences_end_by_the_rules_of_the_declared_language(translator):
    text = "Am 3. Mai kam Hr. Maier. Ja."
    for page, options, count in (
        (f"<p>{text}</p>", {}, 3),
        (f'<html lang="de"><p>{text}</p>', {}, 2),
        (f"<r xml:lang='de-AT'><p>{text}</p></r>", {}, 2),
        (f'<html lang="en"><p>{text}</p>', {"language": "deu_Latn"}, 2),
    ):
        plan = translator.plan(Request(page, format="html"), **options)
        assert len(plan.parts) == count, (page, sources(plan))


def test_a_paragraph_of_any_length_is_never_cut_within_a_sentence(translator):
    sentences = ["One two three four.", "Five six seven!"] * 200
    plan = translator.plan(Request(f"<p>{' '.join(sentences)}</p>", format="html"))
    assert sources(plan) == sentences
    assert copied(plan) == plan.request.text


@pytest.mark.parametrize(
    ("request_", "options"),
    [
        (Request("One two. Three four.", prefix="SIX"), {"split_sentences": True}),
        (Request("<p>One two. Three</p><p>Four</p>", prefix="SIX", format="html"), {}),
        (Request(" ".join(["One two."] * 20), prefix="SIX"), {}),
    ],
    ids=["text", "document", "long line"],
)
def test_only_the_first_sentence_has_the_prefix(translator, request_, options):
    first, *others = translator.plan(request_, **options).sentences
    assert first.prefix and others and not any(sentence.prefix for sentence in others)


def test_every_part_of_a_tagged_text_begins_with_the_tag():
    lines = lines_of_words(23)
    settings = TokenizerConfig(vocab_size=52, algorithm="unigram", user_defined_symbols=("<2de>",))
    tokenizer = Tokenizer.train([(line, line.upper()) for line in lines], settings)
    translator = Translator(make_model(tokenizer), tokenizer, CONFIG)
    [tag] = tokenizer.source.ids(["<2de>"])
    for request in (
        Request("<2de> One two. Three."),
        Request("<2de> <p>One two. Three.</p>", format="html"),
    ):
        plan = translator.plan(request, split_sentences=True)
        assert sources(plan) == ["One two.", "Three."]
        assert all(sentence.tokens[:2].count(tag) == 1 for sentence in plan.sentences)
        assert "<2de>" not in copied(plan)


def test_the_tags_of_a_document_follow_the_words_without_the_language():
    """The language tag begins every sentence, but is not in the document."""
    lines = lines_of_words(23)
    settings = TokenizerConfig(vocab_size=52, algorithm="unigram", user_defined_symbols=("<2de>",))
    tokenizer = Tokenizer.train([(line, line.upper()) for line in lines], settings)
    translator = Translator(make_model(tokenizer), tokenizer, CONFIG)
    page = Request("<2de> <p>one two. three <b>four</b> five.</p>", format="html")
    plan = translator.plan(page, split_sentences=True)
    translations = []
    for part in plan.parts:
        target = part.source.upper()
        source_ids, target_ids = (
            side.encode([text])[0]
            for side, text in ((tokenizer.source, part.request.text), (tokenizer.target, target))
        )
        texts = (part.request.text, target)
        size = len(target_ids) + 1, len(source_ids) + 1
        weights_TS = np.eye(*size, k=len(source_ids) - len(target_ids))
        found = align_texts(tokenizer, texts, (source_ids, target_ids), weights_TS)
        tokens = tuple(tokenizer.target.tokens(target_ids))
        translations.append([Translation(target, 0, 0, len(tokens) + 1, tokens, alignment=found)])
    [joined] = plan.join_parts(translations)
    assert joined.text == "<p>ONE TWO. THREE <b>FOUR</b> FIVE.</p>"


def test_an_element_can_go_beyond_a_sentence(translator):
    page = "<p>one <b>two. Three</b> four.</p>"
    plan = translator.plan(Request(page, format="html"))
    assert sources(plan) == ["one two.", "Three four."]
    assert all(part.needs_alignment for part in plan.parts)
    assert copied(plan) == page or sorted(re.findall("<.*?>", copied(plan))) == sorted(
        re.findall("<.*?>", page)
    )
    [[translation]] = translator.stream([Request(page, format="html")])
    assert re.findall("<.*?>", translation.text) == re.findall("<.*?>", page)


def test_a_documents_sentences_are_translated_like_lines(translator):
    """All of them: a model that was trained on sentences ignores what follows the first one."""
    sentences = ["One two.", "Three four!", "Five."]
    page = f"<p>{' '.join(sentences[:2])}</p>\n<p>{sentences[2]}</p>"
    [[translation]] = translator.stream([Request(page, format="html")])
    expected = translator.translate(sentences)
    text = re.sub(r"\s+", " ", re.sub("<.*?>", "", translation.text))
    assert text == re.sub(r"\s+", " ", f"{expected[0]} {expected[1]}\n{expected[2]}")


def test_alignments_of_sentences_follow_each_other():
    first = Alignment(("a", "b", "</s>"), ("A", "</s>"), np.eye(3)[:2], [0, 1], [0])
    second = Alignment(("c", "</s>"), ("C", "D", "</s>"), np.ones((3, 2)) / 2, [0], [0, 1])
    both = concatenate_alignments([first, second])
    assert both.source == ("a", "b", "c", "</s>") and both.target == ("A", "</s>", "C", "D", "</s>")
    assert both.weights_TS.tolist() == [
        *([1, 0, 0, 0], [0, 1, 0, 0]),
        *([0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]),
    ]
    assert both.source_word_ids == [0, 1, 2] and both.target_word_ids == [0, -1, 1, 2]
    assert both.hard() == "0-0 2-1 2-2"


def test_ranks_of_parts_are_joined(translator):
    """A part with fewer translations repeats its last one."""
    plan = translator.plan(Request("One. Two."), 3, split_sentences=True)
    ids = translator.tokenizer.target.encode([word.upper() for word in WORDS[:4]])
    ranked = [[Hypothesis(ids[i], -1.0, -1.0, [])] for i in range(2)]
    [only] = plan.join(ranked)
    assert only.text.split() == ["ONE", "TWO"] and only.log_prob == -2.0
    ranked[1].append(Hypothesis(ids[2], -2.0, -2.0, []))
    assert [each.text.split()[-1] for each in plan.join(ranked)] == ["TWO", "THREE"]
