"""Pairs of languages in one corpus: of the items of source, or in a column."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from transformer_jax.data.corpus import Corpus, build_corpus
from transformer_jax.data.sources import ParallelText, TextPair, first_pairs
from transformer_jax.errors import UserError
from transformer_jax.settings.config import DataConfig, PairsConfig, TokenizerConfig
from transformer_jax.tokenization.tokenizer import Tokenizer

LINES = {
    "en": ["one", "two", "one two", "two one one"],
    "de": ["eins", "zwei", "eins zwei", "zwei eins eins"],
    "fr": ["un", "deux", "un deux", "deux un un"],
}
CODES = [("en", "de"), ("de", "en"), ("en", "fr")]
FIELDS = {"source_language_field": "from", "target_language_field": "to"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for code, lines in LINES.items():
        (folder / code).write_text("".join(f"{line}\n" for line in lines))
    rows = [
        {"a": source, "b": target, "from": codes[0], "to": codes[1]}
        for codes in CODES
        for source, target in zip(LINES[codes[0]], LINES[codes[1]])
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.tsv").write_text("".join("\t".join(row.values()) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    text = ParallelText(items(), str(folder))
    return Tokenizer.train(
        text.pairs(), TokenizerConfig(vocab_size=34, new_languages=("de", "en", "fr"))
    )


def items(**settings: Any) -> PairsConfig:
    sources, targets = zip(*CODES)
    languages = {"source_languages": sources, "target_languages": targets}
    return PairsConfig("text", sources, targets, **(languages | settings))


def in_fields(kind: str) -> PairsConfig:
    fields = {"source_field": "a", "target_field": "b", **FIELDS}
    if kind == "tsv":
        fields = {"source_language_field": "3", "target_language_field": "4"}
    return PairsConfig(kind, (f"rows.{kind}",), **fields)


def corpus_of(config: PairsConfig, folder: Path, tokenizer: Tokenizer, out: Path) -> Corpus:
    return build_corpus(config, tokenizer, DataConfig(root=str(folder)), out)


@pytest.mark.parametrize("kind", ["tsv", "jsonl", "parquet"])
def test_a_column_of_codes_gives_the_corpus_of_items_with_languages(
    kind: str, folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = ParallelText(in_fields(kind), str(folder))
    assert list(text.text_pairs()) == list(ParallelText(items(), str(folder)).text_pairs())
    found, expected = (
        corpus_of(config, folder, tokenizer, tmp_path) for config in (in_fields(kind), items())
    )
    chex.assert_trees_all_equal(found.sides, expected.sides)
    assert list(expected.sizes) == [4, 4, 4] and list(found.sizes) == [12]
    assert found.fingerprint != expected.fingerprint


def test_target_languages_of_a_model_trained_here_are_tags_before_the_source(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tags = tuple(f"<2{target}>" for _, target in CODES)
    assert {*tags} <= {*tokenizer.source.tokens(range(34))}
    tagged = items(source_languages=(), target_languages=(), tags=tags)
    found, expected = (
        corpus_of(config, folder, tokenizer, tmp_path) for config in (items(), tagged)
    )
    chex.assert_trees_all_equal(found.sides, expected.sides)


def test_languages_tags_and_limits_combine(folder: Path) -> None:
    config = items(tags=("<a>", "", ""), limit=1)
    pairs = list(ParallelText(config, str(folder)).text_pairs())
    assert [(pair.source, pair.languages) for pair in pairs] == list(
        zip(["<a> one", "eins", "one"], CODES)
    )


def test_any_list_or_a_temperature_makes_each_item_a_part(folder: Path) -> None:
    sources, targets = zip(*CODES)
    settings: dict[str, Any] = {
        "tags": ("<a>", "<b>", "<c>"),
        "source_languages": sources,
        "target_languages": targets,
        "weights": (1.0, 2.0, 3.0),
        "temperature": 2.0,
    }
    nothing: dict[str, Any] = {"source_languages": (), "target_languages": ()}
    assert not items(**nothing).parts
    for chosen in product([False, True], repeat=len(settings)):
        given = {name: value for (name, value), is_in in zip(settings.items(), chosen) if is_in}
        if not given or {"weights", "temperature"} <= given.keys():
            continue
        config = items(**(nothing | given), limit=2)
        assert len(config.parts) == len(CODES), given
        no_codes = ("",) * len(CODES)
        codes = [given.get(name, no_codes) for name in ("source_languages", "target_languages")]
        tags = [f"{tag} " for tag in given["tags"]] if "tags" in given else no_codes
        expected = [
            (tag + source, target, languages)
            for file, tag, languages in zip(CODES, tags, zip(*codes))
            for source, target in zip(*(LINES[code][:2] for code in file))
        ]
        pairs = ParallelText(config, str(folder)).text_pairs()
        assert [(pair.source, pair.target, pair.languages) for pair in pairs] == expected, given


def test_languages_are_a_part_of_no_word(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Alignments count the words of the text, whether a tag is in it or not."""
    (folder / "links").write_text("0-0\n0-0\n0-0 1-1\n0-0 1-1 2-2\n")
    linked = {"alignments": ("links",) * 3, "weights": (1.0, 1.0, 1.0)}
    corpus = corpus_of(items(**linked), folder, tokenizer, tmp_path)
    links, lengths = corpus.read(2, np.arange(corpus.num_pairs))
    sources, _ = corpus.read(0, np.arange(corpus.num_pairs))
    starts = np.repeat(np.cumsum(corpus.lengths()[0]) - corpus.lengths()[0], lengths)
    linked_tokens = tokenizer.source.tokens(sources[starts + links - 1])
    assert (links > 0).all() and not any(token.startswith("<2") for token in linked_tokens)


def test_new_symbols_and_languages_keep_the_others(tokenizer: Tokenizer, tmp_path: Path) -> None:
    more = tokenizer.with_symbols(["<x>"]).with_new_languages(["it:fr"])
    more.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.languages.tokens == tokenizer.languages.tokens | {"it": "<2it>"}
    tags = ["<2de>", "<2en>", "<2fr>", "<2it>"]
    assert sorted(loaded.source.tokens(loaded.source.vocabulary.languages)) == tags
    assert loaded.new_rows == {35: tokenizer.source.ids(["<2fr>"])}
    separate = Tokenizer.from_models(tokenizer.source.model, tokenizer.target.model)
    separate = separate.with_new_languages(["de"])
    with pytest.raises(UserError, match="expected codes without a relative, because source and"):
        separate.with_new_languages(["it:de"])


def test_the_first_pairs_are_as_many_for_each_pair_of_languages(folder: Path) -> None:
    pairs = list(ParallelText(items(), str(folder)).text_pairs())
    pairs = pairs[1::2] + pairs[:8:2]  # mixed, and two of the last languages
    groups = [[pair for pair in pairs if pair.languages == codes] for codes in CODES]
    assert [len(group) for group in groups] == [4, 4, 2]
    for limit, part in enumerate([0, 1, 1, 1, 2, 2, 2, 3, 3, 3]):  # rounded up
        assert first_pairs(pairs, limit) == [pair for group in groups for pair in group[:part]]
    plain = [TextPair(str(number), "") for number in range(9)]
    assert first_pairs(plain, 4) == plain[:4]
    assert first_pairs(pairs, 0) == first_pairs([], 4) == []


def test_a_code_that_the_model_lacks_is_an_error_with_the_line(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = (folder / "rows.tsv").read_text()
    (folder / "wrong.tsv").write_text(rows.replace("fr\n", "xx\n"))
    config = PairsConfig("tsv", ("wrong.tsv",), target_language_field="4")
    message = r"wrong.tsv, line 9: target_language is 'xx'; expected one of: de, en, fr\."
    with pytest.raises(UserError, match=message):
        corpus_of(config, folder, tokenizer, tmp_path)
    config = PairsConfig("tsv", ("wrong.tsv",), target_language_field="5")
    with pytest.raises(
        UserError, match="line 1: field '5' is missing; .* target_language_field to"
    ):
        corpus_of(config, folder, tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_languages": ("de",)}, "target_languages is .*; expected one for each of the 3"),
        ({"source_languages": ("de",) * 4}, "source_languages is .*; expected one for each of the"),
        (FIELDS, "source_language_field is 'from'; expected '' for kind 'text'"),
    ],
)
def test_invalid_settings(settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        items(**settings)


def test_items_have_their_languages_from_one_place() -> None:
    with pytest.raises(
        UserError, match="target_language_field is '4'; expected '' with target_lang"
    ):
        PairsConfig("tsv", ("a",), target_languages=("de",), target_language_field="4")
