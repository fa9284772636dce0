"""Glossaries: files, terms in a text, translations that contain the target terms."""

from __future__ import annotations

import dataclasses
import logging
import time

import pytest
from random_models import WORDS, lines_of_words, make_model

from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.search import Hypothesis
from transformer_jax.errors import UserError
from transformer_jax.settings.config import DecodingConfig, TokenizerConfig
from transformer_jax.tokenization.special_ids import UNK_ID
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.glossary import (
    MAX_WORDS,
    Glossary,
    TargetTerm,
    find_repetition,
    read_glossary,
    unmet_terms,
)
from transformer_jax.translation.output_formats import output_values
from transformer_jax.translation.requests import Request
from transformer_jax.translation.translator import Translator

LINES = lines_of_words(23)
CONFIG = DecodingConfig(beam_size=3, max_extra_length=12, max_source_length=24, batch_size=4)
# Random models never translate these as the glossary does.
TERMS = {"one": "TWO", "three four": ["FIVE SIX", "TEN"], "nine": "NINE", "zero": "ONE"}


@pytest.fixture(scope="module")
def translator(model, tokenizer):
    return Translator(model, tokenizer, CONFIG)


@pytest.fixture(scope="module")
def with_glossary(model, tokenizer):
    return Translator(model, tokenizer, CONFIG, glossary=TERMS)


def assert_met(line: str, text: str) -> None:
    words = f" {text}"
    assert "one" not in line.split() or " TWO" in words
    assert "three four" not in line or " FIVE SIX" in words or " TEN" in words
    assert "nine" not in line.split() or " NINE" in words


def test_translations_contain_the_terms(with_glossary, translator):
    """All n-best translations do. Lines without terms are translated bit-exactly as without."""
    found = list(with_glossary.stream(LINES, num_hypotheses=3))
    plain = list(translator.stream(LINES, num_hypotheses=3))
    num_changed = 0
    for line, its, without in zip(LINES, found, plain):
        if not {"one", "nine"} & {*line.split()} and "three four" not in line:
            assert its == without
        for each in its:
            assert_met(line, each.text)
            assert not each.unmet
        num_changed += its[0].text != without[0].text
    assert num_changed > 5


def test_the_neighbors_of_a_line_do_not_matter(with_glossary):
    together = list(with_glossary.stream(LINES, num_hypotheses=2))
    reverse = list(with_glossary.stream(LINES[::-1], num_hypotheses=2))
    assert together == reverse[::-1]


def test_the_glossary_of_a_line_adds_to_the_translators(with_glossary):
    """A source term of both has the line's target terms."""
    request = Request("one two", glossary={"two": "SEVEN", "one": ["EIGHT", "TEN"]})
    [text] = with_glossary.translate([request])
    assert " SEVEN" in f" {text}" and (" EIGHT" in f" {text}" or " TEN" in f" {text}")
    # Terms of both that overlap: the leftmost, then the longest, as in one glossary.
    for line, glossary, terms in (
        ("six nine", {"six nine": "TEN"}, {"six nine"}),
        ("three four", {"four": "TEN"}, {"three four"}),
        ("three four one", {"two three": "TEN"}, {"three four", "one"}),
    ):
        assert {*with_glossary.plan(Request(line, glossary=glossary)).parts[0].terms} == terms


def test_a_prefix_can_contain_a_term(with_glossary):
    [text] = with_glossary.translate([Request("one nine", prefix="SIX TWO")])
    assert text.startswith("SIX TWO") and " NINE" in text


def test_an_ensemble_meets_the_terms(model, tokenizer):
    models = Ensemble([model, make_model(tokenizer, seed=9)])
    translator = Translator(models, tokenizer, CONFIG, glossary={"one": "TWO"})
    lines = [line for line in LINES if "one" in line.split()]  # one size of table to compile
    assert len(lines) > 5
    for text in translator.translate(lines):
        assert " TWO" in f" {text}"


def test_each_segment_of_a_long_line_has_its_terms(with_glossary):
    line = " ".join(["two six ten"] * 9 + ["one"])
    sentences = with_glossary.plan(Request(line)).sentences
    assert len(sentences) > 1 and sentences[-1].terms is not None
    [text] = with_glossary.translate([line])
    assert " TWO" in f" {text}"


def test_terms_are_found_in_the_text_of_a_segment(with_glossary):
    """Not in what the source tokenizer makes of it, which has no token for 8."""
    line = " ".join(["two six ten"] * 9 + ["8 two"])
    sentences = with_glossary.plan(Request(line, glossary={"8": "NINE"})).sentences
    assert [each.terms is None for each in sentences] == [True] * (len(sentences) - 1) + [False]


def test_a_term_that_does_not_fit_is_reported(model, tokenizer, caplog):
    short = dataclasses.replace(CONFIG, max_extra_length=1)
    glossary = {"one": "SEVEN " * 10, "two": "TWO"}
    with caplog.at_level(logging.WARNING):
        found = list(Translator(model, tokenizer, short, glossary=glossary).stream(["one two"]))
    [[best]] = found
    assert best.unmet == ("one",) and best.text
    assert output_values(best)["unmet"] == ("one",)
    assert "Line 1: the translation lacks the glossary's terms for: one." in caplog.text
    request = Request("<p>two</p><p>one <b>two</b></p><p>one</p>", format="html")
    [page] = Translator(model, tokenizer, short, glossary=glossary).documents([request])
    assert page.unmet == ("one",)


def test_sampling_does_not_support_terms(model, tokenizer):
    sampling = dataclasses.replace(CONFIG, method="sample")
    translator = Translator(model, tokenizer, sampling, glossary=TERMS)
    assert translator.translate(["two"])
    with pytest.raises(UserError, match="method is 'sample'; expected 'beam'"):
        translator.translate(["one"])


@pytest.mark.parametrize(
    ("glossary", "message"),
    [
        (["one"], r"glossary is \['one'\]; expected target terms by source term"),
        ({"one": 5}, "glossary: 'one' is 5; expected target terms"),
        ({"one": []}, r"glossary: 'one' is \[\]; expected target terms"),
        ({"one": [5]}, "glossary: 'one' is 5; expected text"),
        ({"one": " "}, "glossary: 'one' has the blank term ' '"),
        ({" ": "ONE"}, "glossary: ' ' has the blank term ' '"),
        ({"one": "\ud800"}, "glossary: 'one' is not valid Unicode"),
        (
            {"one": "日本"},
            r"glossary: 'one': the target term '日本' has tokens that cannot .*<unk>",
        ),
        ({"one": "ONE " * 40}, "glossary: 'one': 1 terms with up to 1 alternatives of up to"),
        ({"one": [*map(str.upper, WORDS)]}, "glossary: 'one': 1 terms with up to 10 alternatives"),
        ({"one " * 65: "ONE"}, "glossary: '.*' has 65 words; expected a source term of at most 64"),
        ({"\u200b": "ONE"}, "glossary: '.u200b' has no visible character"),
    ],
)
def test_an_invalid_glossary(translator, glossary, message):
    with pytest.raises(UserError, match=f"^Line 1: {message}"):
        translator.translate([Request("two", glossary=glossary)])


def test_a_suppressed_token(model, tokenizer):
    config = dataclasses.replace(CONFIG, suppress=tuple(tokenizer.target.tokens([7])))
    term = tokenizer.target.decode([7])
    with pytest.raises(UserError, match=r"^The glossary: 'one': .* cannot be generated"):
        Translator(model, tokenizer, config, glossary={"one": [term]})


def test_a_thousand_terms(model, tokenizer):
    """The glossary may be of any size, but not the number of terms in a sentence."""
    many = {f"{a} {b} {c}": "ONE" for a in WORDS for b in WORDS for c in WORDS}
    translator = Translator(model, tokenizer, CONFIG, glossary=many)
    assert "ONE" in translator.translate(["six one two"])[0]
    longer = dataclasses.replace(CONFIG, max_source_length=1024)
    translator = Translator(model, tokenizer, longer, glossary=many)
    line = " ".join(sorted(many)[::14])
    with pytest.raises(UserError, match=r"^Line 1: glossary: 7\d terms .* at most 64 terms"):
        translator.translate([line])


def test_terms_in_a_text(tokenizer):
    """The longest match wins, from left to right, and only whole words match. White space does not
    matter.
    """
    terms = {"one": "ONE", "one two": "TWO", "two three": "THREE", "don't": "FOUR", "東京": "FIVE"}
    terms[" six \t seven "] = "SIX"
    glossary = Glossary(terms, tokenizer.target, "", [UNK_ID])
    for text, found in (
        ("one two three", ["one two"]),
        ("one (two three)", ["one", "two three"]),
        ("onetwo tone One one_two", []),
        ("I don't, one.", ["don't", "one"]),
        ("私は東京にいます", ["東京"]),
        ("one  two, six\u00a0seven", ["one two", "six seven"]),
        ("", []),
        ("one\u0301 two\u093f", []),  # an accent, a vowel sign of Hindi
    ):
        assert sorted(glossary.find_terms(text)) == sorted(found)


@pytest.mark.parametrize(
    ("term", "text"),
    [
        ("café", "Le cafe\u0301 noir"),
        ("cafe\u0301", "Le café noir"),
        ("don't", "I don’t"),
        ("l’eau", "de l'eau"),
        ("well-known", "a well\u2011known man"),
        ("“quote”", 'a "quote" here'),
        ("data base", "a da\u00adta\u00a0base"),
        *(("ภาษาไทย", "ฉันพูดภาษาไทยได้"), ("ລາວ", "ພາສາລາວແມ່ນ"), ("မြန်မာ", "ကျွန်တော်မြန်မာစကား")),
        *(("ខ្មែរ", "ភាសាខ្មែរគឺ"), ("东京", "我在东京。"), ("トウキョウ", "私はトウキョウにいる")),
    ],
)
def test_a_term_is_found_however_it_is_spelled(tokenizer, term, text):
    glossary = Glossary({term: "ONE"}, tokenizer.target, "", [])
    assert list(glossary.find_terms(text)) == [term] and glossary.num_used == 1
    assert not glossary.find_terms(text.replace("a", "x").replace("e", "x")[::-1])


def test_two_spellings_of_a_term_are_alternatives(tokenizer):
    glossary = Glossary({"don't": "ONE", "don’t": ["TWO", "ONE"]}, tokenizer.target, "", [])
    assert [term.text for term in glossary["don't"]] == [" ONE", " TWO"] and len(glossary) == 1


def test_terms_are_found_in_linear_time(tokenizer):
    """However many terms begin with the same words."""
    terms = {" ".join(["one"] * count + ["two"]): "ONE" for count in range(1, MAX_WORDS)}
    glossary = Glossary(terms, tokenizer.target, "", [])
    start = time.process_time()
    assert not glossary.find_terms("one " * 20_000)
    assert time.process_time() - start < 2


def test_repetitions_are_noticed():
    assert (
        find_repetition(["▁yes", "▁", "n", "o", "▁", "n", "o", "▁", "n", "o", "▁", "n", "o"], {})
        == "no"
    )
    assert not find_repetition(["▁so", "▁so", "▁so", "▁good"], {})
    assert not find_repetition([], {})
    assert find_repetition(["▁"] * 5, {}) == " "
    assert not find_repetition(["▁ha"] * 4, {"laugh": [TargetTerm(" ha ha ha ha", [5] * 4)]})


def test_a_repetition_is_a_warning(translator, caplog):
    plan = translator.plan(Request("one", line_number=3, glossary={"one": "TWO"}))
    [ids] = translator.tokenizer.target.encode(["SIX SIX SIX SIX SIX TWO"])
    plan.join([[Hypothesis(ids, -1.0, -1.0, [])]])
    assert "Line 3: the translation repeats 'SIX'. This happens if the model would" in caplog.text


def test_a_long_translation_is_a_warning(translator, caplog):
    plan = translator.plan(Request("one", line_number=3, glossary={"one": "TWO"}))
    [ids] = translator.tokenizer.target.encode([" ".join([*WORDS[:9], "two"]).upper()])
    plan.join([[Hypothesis(ids, -1.0, -1.0, [])]])
    num_source = len(plan.sentences[0].tokens)
    message = f"Line 3: the translation has {len(ids) + 1} tokens, for {num_source} of the source"
    assert message in caplog.text


def test_unmet_terms(tokenizer):
    found = Glossary({"a": ["ONE", "TWO THREE"], "b": "FOUR"}, tokenizer.target, "", [])
    assert unmet_terms(found, "TWO THREE FOUR") == unmet_terms(found, "FOURS ONE") == ()
    assert unmet_terms(found, "TWO FOUR") == ("a",)
    assert unmet_terms(found, "xONE") == ("a", "b")


def test_a_chinese_or_japanese_term_also_occurs_without_a_space():
    lines = ["私は東京にいます", "東京は大きい", "大きい東京", "私は京都にいます"]
    tokenizer = Tokenizer.train([(line, line) for line in lines], TokenizerConfig(vocab_size=40))
    [(text, spaced), (same, bare)] = Glossary({"x": "東京"}, tokenizer.target, "", [])["x"]
    assert text == same == "東京"
    assert "".join(tokenizer.target.tokens(spaced)) == "▁東京"
    assert "".join(tokenizer.target.tokens(bare)) == "東京"


def test_files(tmp_path):
    path = tmp_path / "terms.tsv"
    path.write_text("dog\tHund\n\n dog \tKöter \tRüde\nNew York\tNew York\n", encoding="utf-8")
    assert read_glossary(path) == {"dog": ["Hund", "Köter", "Rüde"], "New York": ["New York"]}
    # Spreadsheets pad rows with tabs and repeat them.
    path.write_text("dog\tHund\t\t\n\t\t\ndog\tHund\t\ndog\t\tRüde\n", encoding="utf-8")
    assert read_glossary(path) == {"dog": ["Hund", "Rüde"]}
    for line in ("dog\t\t", "\tHund"):
        path.write_text(f"{line}\n")
        with pytest.raises(UserError, match=r"line 1 is .*; expected a source term and target"):
            read_glossary(path)
    path.write_text("dog\tHund\ncat Katze\n")
    with pytest.raises(UserError, match=r"terms.tsv, line 2 is 'cat Katze'; expected a source"):
        read_glossary(path)
