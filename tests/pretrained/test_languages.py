"""Languages of a many-to-many model: programs, requests, scores, segments and fine-tuning."""

from __future__ import annotations

import dataclasses
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pretrained import families
from transformer_jax import (
    DecodingConfig,
    Request,
    Scorer,
    Tokenizer,
    Translator,
    UserError,
    load_model,
    save_model,
    train,
)
from transformer_jax.data.corpus import open_corpus
from transformer_jax.pretrained.loading import import_into
from transformer_jax.report.attention import sentence_attention
from transformer_jax.serving.flags import _all_pairs
from transformer_jax.settings.config import (
    BatchConfig,
    DataConfig,
    PairsConfig,
    TrainingConfig,
)
from transformer_jax.settings.config_files import load_config_file
from transformer_jax.translation.__main__ import main
from transformer_jax.translation.loading import load_models

LINES = ["w1 w2 w3", "w4 w5", "w9 w8 w7 w6"]
ENGLISH, GERMAN = {"source_language": "eng_Latn"}, {"target_language": "deu_Latn"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    theirs = tmp_path_factory.mktemp("nllb")
    families.write("nllb", theirs)
    (theirs / "tokenizer_config.json").write_text('{"src_lang": "deu_Latn"}')
    ours = tmp_path_factory.mktemp("model")
    import_into(theirs, ours)
    return ours


@pytest.fixture(scope="module")
def translator(folder) -> Translator:
    return Translator.from_workdir(folder)


def _requests(**languages: str) -> list[Request]:
    return [Request(line, **languages) for line in LINES]


def _found(translator: Translator, requests: list[Any]) -> list[tuple[tuple[str, ...], float]]:
    return [(best.tokens, round(best.log_prob, 4)) for [best] in translator.stream(requests)]


def test_each_line_has_its_own_languages(translator) -> None:
    pairs = [(s, t) for s in ("eng_Latn", "deu_Latn") for t in ("eng_Latn", "deu_Latn")]
    each = [_requests(source_language=s, target_language=t) for s, t in pairs]
    alone = [_found(translator, requests) for requests in each]
    assert len(set(map(tuple, alone))) == 4
    assert [tokens[0] for found in alone for tokens, _ in found[:1]] == [t for _, t in pairs]
    assert _found(translator, [*chain(*each)]) == [*chain(*alone)]
    assert _found(translator, _requests(**GERMAN)) == alone[3]  # the default of the source


def test_unknown_and_missing_languages_are_errors(translator) -> None:
    with pytest.raises(UserError, match=r"target_language is ''; expected one of: eng_Latn, deu"):
        translator.translate(LINES)
    with pytest.raises(UserError, match=r"source_language is 'xx'; expected one of: eng_Latn"):
        translator.translate([Request("w1", source_language="xx", **GERMAN)])
    with pytest.raises(UserError, match=r"target_language is 'xx'; expected one of: eng_Latn"):
        translator.translate([Request("w1", target_language="xx")])


def test_each_segment_begins_with_the_languages(folder) -> None:
    translator = Translator.from_workdir(folder, max_source_length=8)
    text = " ".join(f"w{i % 24}" for i in range(40))
    sentences = translator.plan(Request(text, **ENGLISH, **GERMAN)).sentences
    [source], _, [target] = translator.tokenizer.affixes("eng_Latn", "deu_Latn")
    assert len(sentences) > 4
    assert {sentence.tokens[0] for sentence in sentences} == {source}
    assert all(len(sentence.tokens) <= 7 for sentence in sentences)
    assert {tuple(sentence.prefix) for sentence in sentences} == {(target,)}
    joined = [i for sentence in sentences for i in sentence.tokens[1:]]
    assert joined == translator.tokenizer.source.encode([text])[0]


@pytest.mark.parametrize("tool", ["flags", "fields"])
def test_decode_takes_flags_and_fields(tool, folder, translator, tmp_path, capsys) -> None:
    expected = translator.translate(_requests(**ENGLISH, **GERMAN))
    command = [
        "--workdir",
        str(folder),
        "--output",
        str(tmp_path / "out.jsonl"),
        "--alignments",
        "hard",
    ]
    command += ["--format", "jsonl"]
    if tool == "flags":
        (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "{x}"}}\n' for x in LINES))
        command += ["--source-language", "eng_Latn", "--target-language", "deu_Latn"]
    else:
        records = ({"text": line, **ENGLISH, **GERMAN} for line in LINES)
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    assert main([*command, "--input", str(tmp_path / "in.jsonl")]) == 0
    written = [json.loads(x) for x in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["translation"] for record in written] == expected
    for line, record in zip(LINES, written):  # links are between words of the text
        links = [tuple(map(int, link.split("-"))) for link in record["alignment"].split()]
        assert {j for _, j in links} == set(range(len(record["translation"].split())))
        assert {i for i, _ in links} <= set(range(len(line.split())))
    command = command[:8]
    bad = ["--target-language", "xx", "--input", str(tmp_path / "in.jsonl"), "--resume"]
    assert main([*command, *bad]) == 2
    assert "expected one of: eng_Latn, deu_Latn" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tagged(tmp_path_factory) -> Path:
    """A model as MADLAD-400: a source line begins with the language of its target."""
    theirs, ours = tmp_path_factory.mktemp("madlad"), tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "languages", lambda case: ["<2en>", "<2de>"])
        families.write("t5 1.1", theirs)
    import_into(theirs, ours)
    return ours


def test_a_tag_is_the_language_of_the_target(tagged) -> None:
    translator = Translator.from_workdir(tagged)
    german = {"source_language": "en", "target_language": "de"}
    found = _found(translator, _requests(**german))
    assert found == _found(translator, [f"<2de> {line}" for line in LINES])
    assert found == _found(Translator.from_pretrained(tagged, target_language="de"), LINES)
    assert found != _found(translator, _requests(target_language="en"))
    [best], *_ = translator.stream(_requests(**german))
    assert best.token_log_probs[0] < 0  # no forced token, so none is free
    scorer = Scorer(translator.model, translator.tokenizer, translator.config)
    sources = _requests(**german), [f"<2de> {line}" for line in LINES]
    scored, as_text = (scorer.score(list(zip(each, LINES))) for each in sources)
    assert scored == as_text and all(each.token_log_probs[0] < 0 for each in scored)
    limited = Translator.from_workdir(tagged, max_source_length=8)
    text = " ".join(f"w{i % 24}" for i in range(40))
    sentences = limited.plan(Request(text, "w1", target_language="de")).sentences
    [tag] = translator.tokenizer.source.ids(["<2de>"])
    assert len(sentences) > 4
    assert {sentence.tokens[0] for sentence in sentences} == {tag}
    assert [len(sentence.prefix) for sentence in sentences] == [1] + [0] * (len(sentences) - 1)
    assert _all_pairs(str(tagged)) == [("en", "de"), ("de", "en")]


def test_the_default_language_of_a_tagged_source_divides_it_into_sentences(tagged) -> None:
    text = "Am 3. Mai kam Hr. Maier. Ja."
    for source_language, count in (("", 3), ("en", 3), ("de", 2)):
        translator = Translator.from_workdir(
            tagged, source_language=source_language, target_language="en"
        )
        plan = translator.plan(Request(text), split_sentences=True)
        assert len(plan.parts) == count
        assert plan.sentences[0].tokens[0] == translator.tokenizer.source.ids(["<2en>"])[0]


def test_scores_and_attention_are_those_of_the_search(folder, translator) -> None:
    model, tokenizer, config = _load_search(folder)
    ours, scorer = Translator(model, tokenizer, config), Scorer(model, tokenizer, config)
    requests = _requests(**ENGLISH, **GERMAN)
    assert _found(ours, LINES) == _found(translator, requests)
    for line, [best] in zip(LINES, ours.stream(LINES)):
        source = tokenizer.affixes().source(tokenizer.source.encode([line])[0])
        pair = source, tokenizer.target.ids(best.tokens)
        [log_probs] = scorer.score_tokens([pair])
        np.testing.assert_allclose(log_probs[1:].sum(), best.log_prob, atol=1e-4)
    attention = sentence_attention(ours, LINES[0])
    assert attention.source[0] == "eng_Latn" and attention.target[0] == "deu_Latn"
    unset = Scorer(translator.model, translator.tokenizer, translator.config)
    pairs = list(zip(requests, LINES))
    scored = scorer.score(list(zip(LINES, LINES)))
    assert unset.score(pairs) == scored
    assert all(each.token_log_probs[0] == 0 for each in scored)
    reverse = _requests(source_language="deu_Latn", target_language="eng_Latn")
    assert all(a.score != b.score for a, b in zip(unset.score(list(zip(reverse, LINES))), scored))
    with pytest.raises(UserError, match="Line 1: target_language is ''"):
        unset.score([("w1", "w2")])
    with pytest.raises(UserError, match="target_language is ''"):
        sentence_attention(translator, LINES[0])


def _load_search(folder: Path) -> tuple[Any, Tokenizer, DecodingConfig]:
    model, tokenizer, config = load_models(folder)
    return model, tokenizer.with_languages("eng_Latn", "deu_Latn"), config


def test_models_with_other_default_languages_form_an_ensemble(folder, tmp_path) -> None:
    config, model, tokenizer = load_model(folder)
    save_model(tmp_path, config, model, tokenizer.with_languages("eng_Latn", "eng_Latn"))
    both: Any = [folder, tmp_path]
    ensemble = Translator.from_workdir(both, **ENGLISH, **GERMAN)
    alone = Translator.from_workdir(folder, **ENGLISH, **GERMAN)
    assert ensemble.translate(LINES) == alone.translate(LINES)
    with pytest.raises(UserError, match="other default languages; expected .* choose source_lang"):
        load_models(both)


def test_fine_tuning_puts_the_languages_first(folder, tmp_path) -> None:
    for name in ("source", "target"):
        (tmp_path / name).write_text("\n".join([*LINES * 8, ""]) + "\n")
    pairs = PairsConfig("text", ("source",), ("target",))
    config = load_config_file(folder / "config.json")
    config = dataclasses.replace(
        config,
        tokenizer=dataclasses.replace(config.tokenizer, **ENGLISH, **GERMAN),
        data=DataConfig(
            root=str(tmp_path), train=pairs, max_source_length=16, max_target_length=16, workers=1
        ),
        batch=BatchConfig(tokens=128, buckets=1),
        training=TrainingConfig(steps=2, start_from=str(folder)),
    )
    assert train(config, tmp_path / "run")["steps"] == 2
    _, _, tokenizer = load_model(tmp_path / "run")
    names = tokenizer.languages.source, tokenizer.languages.target
    assert names == ("eng_Latn", "deu_Latn")
    assert Translator.from_workdir(tmp_path / "run").translate(LINES)
    [folder] = (tmp_path / "run" / "corpus").glob("*/")
    corpus = open_corpus(folder.parent, folder.name)
    assert corpus is not None and corpus.num_pairs == 8 * len(LINES)  # empty lines are dropped
    for (tokens, offsets), name in zip(corpus.sides, names):
        assert set(tokens[offsets[:-1]]) == set(tokenizer.target.ids([name]))
