"""Warnings of missing and unknown tags."""

from __future__ import annotations

import pytest
from random_models import lines_of_words, make_model

from transformer_jax.settings.config import DecodingConfig, TokenizerConfig
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.requests import Request
from transformer_jax.translation.translator import Translator

LINES = lines_of_words(23)


def translator(*symbols: str) -> Translator:
    settings = TokenizerConfig(vocab_size=52, algorithm="unigram", user_defined_symbols=symbols)
    tokenizer = Tokenizer.train([(line, line.upper()) for line in LINES], settings)
    return Translator(make_model(tokenizer), tokenizer, DecodingConfig(batch_size=4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one", "Line 7 has no tag for the target language, so the model chooses the language; "),
        ("one <2de>", "Line 7 has no tag"),
        ("<2es> one", "Line 7 has the unknown tag '<2es>'"),
        (">>deu<< one", "Line 7 has the unknown tag '>>deu<<'"),
        *(("<2de> one", ""), (" <2fr>one", ""), ("", ""), (" ", "")),
    ],
)
def test_a_line_needs_a_known_tag(caplog, text, message):
    tagged = translator("<2de>", "<2fr>")
    for _ in range(3):
        tagged.plan(Request(text, line_number=7))
    assert len(caplog.messages) == bool(message)
    if message:
        assert caplog.messages[0].startswith(message) and "one of: <2de>, <2fr>." in caplog.text


@pytest.mark.parametrize("symbols", [(), ("<2de>",), ("<BT>", "<sep>")])
def test_other_models_need_none(caplog, symbols):
    translator(*symbols).plan(Request("one"))
    assert not caplog.messages
