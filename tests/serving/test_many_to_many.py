"""The service with a many-to-many model: all its language pairs, in one search."""

import json
from collections.abc import Iterator
from pathlib import Path

import families
import pytest
from random_models import lines_of_words, train_tokenizer
from servers import Server, serving

from transformer_jax.errors import UserError
from transformer_jax.pretrained.loading import import_into
from transformer_jax.serving.__main__ import _load
from transformer_jax.serving.flags import Pair, checked_flags
from transformer_jax.translation.output_formats import output_values
from transformer_jax.translation.requests import Request
from transformer_jax.translation.scoring import Scorer
from transformer_jax.translation.translator import Translator

SEARCH = ["--batch-size", "4", "--max-source-length", "16", "--max-extra-length", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    families.write("m2m_100", folder / "theirs")
    (folder / "ours").mkdir()
    import_into(folder / "theirs", folder / "ours")
    return folder / "ours"


@pytest.fixture(scope="module", params=["jax", "ctranslate2"])
def server(folder, request) -> Iterator[Server]:
    flags = ["--workdir", str(folder), "--languages", "all", "--engine", request.param, *SEARCH]
    arguments, served = checked_flags(flags)
    service = _load(arguments, served)
    service.start()
    try:
        search = vars(served[0].search)
        translator = Translator.from_workdir(folder, engine=request.param, **search)
        with serving(service, translator) as found:
            yield found
    finally:
        service.close()


def test_all_pairs_are_served_by_one_search(server) -> None:
    listed = server.request("GET", "/languages").json
    assert {each["code"]: each["targets"] for each in listed} == {"en": ["de"], "de": ["en"]}
    assert len({id(model) for model in server.service.models.values()}) == 1
    text = "w1 w2 w3 w4"
    answers = {}
    for source, target in (("en", "de"), ("de", "en")):
        reply = server.ask(q=text, source=source, target=target)
        request = Request(text, source_language=source, target_language=target)
        answers[source] = reply.json["translatedText"]
        assert [answers[source]] == server.translator.translate([request])
    assert answers["en"] != answers["de"]


def test_attention_is_that_of_the_chosen_languages(server) -> None:
    translator, text = server.translator, "w1 w2 w3 w4"
    request = Request(text, source_language="de", target_language="en")
    [[translation]] = translator.stream([request])
    scorer = Scorer(translator.model, translator.tokenizer, translator.config)
    [expected] = scorer.align_and_score([(request, translation)])
    assert expected.token_log_probs[0] == 0 > expected.token_log_probs[1]  # the language is free
    reply = server.ask(q=text, source="de", target="en", attention=True)
    [[sentence]] = reply.json["sentences"]
    values = output_values(expected, token_scores=True, alignments="soft")
    assert sentence == sentence | json.loads(json.dumps(values))


def test_other_languages_are_refused(server) -> None:
    reply = server.ask(q="w1", source="en", target="fr")
    assert reply.status == 400 and "expected one of en-de, de-en" in reply.json["error"]


def test_pairs_of_the_model_can_be_chosen(folder) -> None:
    _, [served] = checked_flags(["--workdir", str(folder), "--languages", "de-en"])
    assert served.pairs == [Pair("de", "en")]
    both = ["--workdir", str(folder), str(folder), "--languages", "all"]
    with pytest.raises(UserError, match="both translate de-en; expected one model per"):
        checked_flags([*both, "de-en"])


def test_unknown_languages_are_refused_at_the_start(folder) -> None:
    flags = ["--workdir", str(folder), "--languages", "en-fr", *SEARCH]
    with pytest.raises(UserError, match="--languages: target_language is 'fr'; expected one of: "):
        _load(*checked_flags(flags))


def test_all_needs_a_many_to_many_model(folder, tmp_path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    train_tokenizer(lines_of_words(20)).save(tmp_path)
    with pytest.raises(UserError, match="which is not a many-to-many model; expected a pair"):
        checked_flags(["--workdir", str(tmp_path), "--languages", "all"])
