"""AsyncTranslator matches Translator, whenever requests arrive or are canceled."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import pytest
from random_models import lines_of_words, make_model, train_tokenizer, write_run

from transformer_jax import (
    AsyncTranslator,
    Config,
    DecodingConfig,
    Request,
    Scorer,
    SearchFailed,
    Translator,
    devices_for_rows,
)
from transformer_jax.errors import UserError

LINES = lines_of_words(30)
CONFIG = DecodingConfig(beam_size=3, max_extra_length=8, max_source_length=24, batch_size=2)


@pytest.fixture(scope="module")
def translator() -> Translator:
    tokenizer = train_tokenizer(LINES)
    devices = devices_for_rows(CONFIG.batch_size)
    return Translator(make_model(tokenizer), tokenizer, CONFIG, devices=devices)


@pytest.fixture(scope="module")
def shared(translator: Translator) -> Iterator[AsyncTranslator]:
    found = AsyncTranslator(translator)
    found.start()
    yield found
    found.close()


def test_each_task_gets_the_translators_result(translator, shared) -> None:
    long = " ".join(LINES[:6])  # translated in segments
    lines = [*LINES, "", long, Request("one two", prefix="SIX")]

    async def all_at_once():
        tasks = [asyncio.create_task(shared.translate(x, num_hypotheses=2)) for x in lines]
        leaving = [asyncio.create_task(shared.translate(x)) for x in LINES]
        await asyncio.sleep(0.01)
        for task in leaving:
            task.cancel()
        return await asyncio.gather(*tasks)

    found = asyncio.run(all_at_once())
    for got, expected in zip(found, translator.stream(lines, num_hypotheses=2), strict=True):
        assert [each.text for each in got] == [each.text for each in expected]
        assert got[0].tokens == expected[0].tokens
        assert got[0].log_prob == pytest.approx(expected[0].log_prob, abs=1e-4)


def test_terms_travel_with_their_sentences(translator, shared) -> None:
    """Sentences with terms and without are in progress together. More terms are refused."""
    terms = {"one": "TWO", "nine": ["TEN", "SIX"]}
    lines = [Request(line, glossary=terms if i % 2 else {}) for i, line in enumerate(LINES)]
    limited = AsyncTranslator(translator, max_terms=4)
    limited.start()

    async def all_at_once():
        return await asyncio.gather(*map(limited.translate, lines))

    found = [best for [best] in asyncio.run(all_at_once())]
    limited.close()
    expected = [best for [best] in translator.stream(lines)]
    assert [each.text for each in found] == [each.text for each in expected]
    assert not any(each.unmet for each in found)
    with pytest.raises(UserError, match=r"needs \(terms, .*\) \(1, 1, 8\); expected one of none"):
        asyncio.run(shared.translate(Request("one", glossary=terms)))


def test_alignments_equal_the_scorers(translator, shared) -> None:
    [plain] = asyncio.run(shared.translate(LINES[3]))
    assert plain.alignment is None
    [found] = asyncio.run(shared.translate(LINES[3], alignments=True))
    scorer = Scorer(translator.model, translator.tokenizer, CONFIG)
    [expected] = scorer.align([(LINES[3], plain)])
    assert found.alignment.source == expected.alignment.source
    assert found.alignment.weights_TS == pytest.approx(expected.alignment.weights_TS, abs=1e-4)
    [empty] = asyncio.run(shared.translate("", alignments=True))
    assert empty.alignment is None


def test_few_functions_are_compiled(shared, caplog) -> None:
    """Whatever the lengths of texts and translations: after all searches, only one alignment
    function for each padded length. A part that is too long is not aligned.
    """
    shared.workers.wait_until_compiled()
    many = " ".join(["one", *[f"<b>{word}</b>" for line in LINES for word in line.split()]])
    requests = [Request(many, format="html"), Request("<i>one</i>", prefix="SIX", format="html")]
    requests += [Request(f"<p>{line} <b>two</b></p>", format="html") for line in LINES]
    with caplog.at_level("INFO", "transformer_jax"):
        for request in requests:
            [found] = asyncio.run(shared.translate(request))
            assert found.text.count("<b>") == request.text.count("<b>")
    messages = [message for message in caplog.messages if "Compiling" in message]
    assert len(set(messages)) == len(messages) <= 4
    assert all("alignment function for 4 pairs" in message for message in messages)


def test_errors_name_only_numbered_lines(translator, shared) -> None:
    with pytest.raises(UserError, match="Line 1 is 5; expected text"):
        asyncio.run(shared.translate(5))
    with pytest.raises(UserError, match=r"^The text: prefix '日本' has tokens outside the voc"):
        translator.plan(Request("one", prefix="日本"))
    with pytest.raises(UserError, match=r"^The text is not valid Unicode"):
        translator.plan(Request("\ud800"))
    translator.plan(Request("one", prefix="SIX"))


def test_settings_override_those_of_the_run(translator, tmp_path) -> None:
    model = translator.model
    config = Config(model=model.config, decoding=CONFIG)
    write_run(tmp_path, config, translator.tokenizer, {1: model}, best_step=1)
    found = AsyncTranslator.from_workdir(tmp_path, beam_size=2)
    assert found.config == dataclasses.replace(CONFIG, beam_size=2)
    assert found.workers.num_rows == CONFIG.batch_size


def test_it_starts_once(translator) -> None:
    found = AsyncTranslator(translator)
    with pytest.raises(UserError, match=r"has not started; call start\(\)"):
        asyncio.run(found.translate("one"))
    for _ in range(2):
        found.start()
    assert len(found.workers._threads) == len(translator.engines)
    for _ in range(2):
        found.close()
    with pytest.raises(SearchFailed, match="closed"):
        asyncio.run(found.translate("one"))
