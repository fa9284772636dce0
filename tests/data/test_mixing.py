"""Mixes of corpora: shares, equal use of all pairs, tags, resuming, devices, invalid input."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from corpora import assert_same, layouts, make_corpus, random_lengths, sequences_of, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.corpus import Corpus, build_corpus
from transformer_jax.data.loader import load_batches
from transformer_jax.data.mixing import Mix
from transformer_jax.data.sources import ParallelText, read_pairs
from transformer_jax.errors import UserError
from transformer_jax.settings.config import (
    Config,
    DataConfig,
    PairsConfig,
    TokenizerConfig,
)
from transformer_jax.tokenization.tokenizer import Tokenizer


def parts_of(*sizes: int) -> Corpus:
    """A corpus of these parts. Pair i is the token i + 10, repeated."""
    lengths = [np.concatenate(side) for side in zip(*map(random_lengths, range(len(sizes)), sizes))]
    corpus = make_corpus(*lengths)
    return Corpus("", corpus.sides, corpus.num_read, sizes)


def mix_of(*sizes: int, **settings: Any) -> Mix:
    names = tuple(f"{i}.en" for i in range(len(sizes)))
    return Mix(parts_of(*sizes), PairsConfig("text", names, names, **settings))


def counts(plan: BatchPlan, epoch: int, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """How often each pair of each part occurs in an epoch."""
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    found = Counter(pair for step in steps for pair, _, _ in sequences_of(plan.batch(step)))
    assert len(found) == sum(sizes)  # every pair occurs
    return np.split(np.array([found[i] for i in range(sum(sizes))]), np.cumsum(sizes)[:-1])


@layouts
@pytest.mark.parametrize(
    ("given", "shares"),
    [
        pytest.param(
            {"weights": (1.0, 1.0, 1.0)}, [1 / 3, 1 / 3, 1 / 3], marks=pytest.mark.exhaustive
        ),
        ({"weights": (5.0, 1.0, 4.0)}, [0.5, 0.1, 0.4]),
        ({"temperature": 2.0}, [0.5, 0.25, 0.25]),  # square roots of 400, 100 and 100
        pytest.param({"temperature": 1e38}, [1 / 3, 1 / 3, 1 / 3], marks=pytest.mark.exhaustive),
        ({"tags": ("<a>", "<b>", "")}, [2 / 3, 1 / 6, 1 / 6]),
    ],
)
def test_shares_of_pairs_and_equal_use_of_all_pairs(layout, given, shares):
    sizes = (400, 100, 100)
    mix = mix_of(*sizes, **given)
    plan = BatchPlan(mix, small_config(layout), seed=3)
    total = np.zeros(sum(sizes), int)
    for epoch in range(16):
        found = counts(plan, epoch, sizes)
        each = np.array([part.sum() for part in found])
        np.testing.assert_allclose(each / each.sum(), shares, atol=0.0005)
        assert all(np.ptp(part) <= 1 for part in found)
        total += np.concatenate(found)
    assert each.sum() == mix.num_pairs
    assert all(np.ptp(part) <= 1 for part in np.split(total, np.cumsum(sizes)[:-1]))


@layouts
def test_shares_within_a_part_of_an_epoch(layout):
    """Batches are shuffled, so the shares of any 200 steps are close."""
    plan = BatchPlan(mix_of(6000, 9000, 1000, weights=(2, 1, 1)), small_config(layout), seed=0)
    edges = np.cumsum([0, 6000, 9000, 1000])
    found = [pair for step in range(200) for pair, _, _ in sequences_of(plan.batch(step))]
    shares = np.histogram(found, edges)[0] / len(found)
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.25], atol=0.03)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_all_pairs_of_any_part_are_drawn_equally_often_in_sixteen_epochs(data):
    sizes = data.draw(st.lists(st.integers(1, 60), min_size=2, max_size=3))
    weights = data.draw(
        st.lists(st.integers(1, 9).map(float), min_size=len(sizes), max_size=len(sizes))
    )
    mix = mix_of(*sizes, weights=tuple(weights))
    start = data.draw(st.integers(0, 10**6))
    drawn = [mix.pairs_in_epoch(np.arange(mix.num_pairs), start + epoch) for epoch in range(16)]
    counts = np.bincount(np.concatenate(drawn), minlength=sum(sizes))
    assert all(np.ptp(part) <= 1 for part in np.split(counts, np.cumsum(sizes)[:-1]))


@layouts
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_mix_has_its_shares_and_the_same_shapes_in_every_epoch(layout, data):
    sizes = data.draw(st.lists(st.integers(1, 200), min_size=2, max_size=4))
    weights = data.draw(
        st.lists(st.integers(1, 9).map(float), min_size=len(sizes), max_size=len(sizes))
    )
    mix = mix_of(*sizes, weights=tuple(weights))
    wanted = np.array(weights) * max(np.array(sizes) / weights)
    plan = BatchPlan(mix, small_config(layout), seed=data.draw(st.integers(0, 9)))
    shapes = []
    for epoch in (0, data.draw(st.integers(1, 10**6))):
        found = counts(plan, epoch, tuple(sizes))
        np.testing.assert_allclose([part.sum() for part in found], wanted, atol=0.51)
        assert all(np.ptp(part) <= 1 for part in found)
        start = epoch * plan.steps_per_epoch
        shapes.append(Counter(map(plan.shape, range(start, start + plan.steps_per_epoch))))
    assert shapes[0] == shapes[1]


def test_little_padding():
    alone = parts_of(4000, 6000)
    plain = BatchPlan(alone, small_config("bucketed", 2048), seed=0)
    mixed = BatchPlan(mix_of(4000, 6000, weights=(1, 1)), small_config("bucketed", 2048), seed=0)
    assert min(mixed.fill) > min(plain.fill) - 0.01
    steps = range(mixed.steps_per_epoch)
    real, size = zip(
        *((b.source_BS.astype(bool).sum(), b.source_BS.size) for b in map(mixed.batch, steps))
    )
    assert abs(sum(real) / sum(size) - mixed.fill[0]) < 0.005


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.devices(8))])
@layouts
def test_the_same_batches_on_any_number_of_devices_and_from_any_step(layout, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-1, 1), ("data", "fsdp"))
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    config = dataclasses.replace(small_config(layout), row_multiple=8)
    make = lambda: BatchPlan(mix_of(300, 200, 50, weights=(1, 2, 1)), config, seed=1)  # noqa: E731
    plan = make()
    uninterrupted = [plan.batch(step) for step in range(2 * plan.steps_per_epoch)]
    digest = hashlib.sha256()
    for batch in uninterrupted:
        digest.update(batch.source_BS.tobytes() + batch.target_BT.tobytes())
    for killed in (0, 1, 7, plan.steps_per_epoch, plan.steps_per_epoch + 3):
        resumed = load_batches(make(), sharding=sharding, start=killed, stop=len(uninterrupted))
        for batch, expected in zip(resumed, uninterrupted[killed:], strict=True):
            assert_same(jax.tree.map(np.asarray, batch), expected)
    assert (
        digest.hexdigest()[:16]
        == {"bucketed": "6d5404f47548f705", "packed": "42f53251fd81fbb0"}[layout]
    )


def test_an_epoch_of_extreme_length_is_an_error():
    mix_of(1000, 10, weights=(1.0, 99.0))
    message = r"has 1,000,000,001,000 pairs; expected at most 101,000. Raise the weight of '0.en'"
    with pytest.raises(UserError, match=message):
        mix_of(1000, 10, weights=(1e-9, 1.0))
    with pytest.raises(UserError, match="expected at most 101,000"):
        mix_of(1000, 10, weights=(1e-38, 1e38))


# Text


def write(folder: Path, **files: list[str]) -> None:
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))


def three(folder: Path, **settings: Any) -> PairsConfig:
    write(folder, en=["one", "two", " ", "four"], de=["eins", "zwei", "drei", "vier"])
    write(folder, fr=["un", "deux", "trois", "quatre"])
    return PairsConfig("text", ("en", "en", "de"), ("de", "fr", "en"), **settings)


def test_tags_are_in_front_of_the_source(tmp_path):
    config = three(tmp_path, tags=("<2de>", "<2fr>", ""), limit=3)
    assert list(read_pairs(config, str(tmp_path))) == [
        *[("<2de> one", "eins"), ("<2de> two", "zwei"), (" ", "drei")],
        *[("<2fr> one", "un"), ("<2fr> two", "deux"), (" ", "trois")],
        *[("eins", "one"), ("zwei", "two"), ("drei", " ")],
    ]
    alone = PairsConfig("text", ("en",), ("de",), tags=("<2de>",), limit=1)
    assert list(read_pairs(alone, str(tmp_path))) == [("<2de> one", "eins")]


def test_the_corpus_of_a_mix(tmp_path):
    config, root = three(tmp_path, tags=("<2de>", "<2fr>", "")), str(tmp_path)
    symbols = ("<2de>", "<2fr>")
    settings = TokenizerConfig(vocab_size=32, user_defined_symbols=symbols)
    tokenizer = Tokenizer.train(read_pairs(config, root), settings)
    corpus = build_corpus(config, tokenizer, DataConfig(root=root), tmp_path / "corpus")
    assert list(corpus.sizes) == [3, 3, 3] and corpus.num_read == 12  # blank lines are dropped
    again = build_corpus(config, tokenizer, DataConfig(root=root), tmp_path / "corpus")
    assert list(again.sizes) == [3, 3, 3]
    tokens, lengths = corpus.read(0, np.arange(9))
    lines = [tokenizer.source.tokens(each) for each in np.split(tokens, np.cumsum(lengths)[:-1])]
    assert all("<2de>" in line[:2] for line in lines[:3])
    assert all("<2fr>" in line[:2] for line in lines[3:6])
    assert not any("<2fr>" in line for line in lines[6:])


def test_the_fingerprint_depends_on_tags_and_parts_but_not_on_weights(tmp_path):
    def of(**settings: Any) -> str:
        return ParallelText(three(tmp_path, **settings), str(tmp_path)).fingerprint

    tagged = of(tags=("<2de>", "<2fr>", ""))
    different = {of(), tagged, of(tags=("<2de>", "<2de>", "")), of(weights=(1.0, 1.0, 1.0))}
    assert len(different) == 4
    assert of(weights=(1.0, 1.0, 1.0)) == of(weights=(1.0, 1.0, 2.0)) == of(temperature=5.0)
    assert of(tags=("<2de>", "<2fr>", ""), weights=(1.0, 2.0, 2.0)) == tagged
    text = ParallelText(three(tmp_path, weights=(1.0, 1.0, 1.0)), str(tmp_path))
    before = text.fingerprint
    write(tmp_path, fr=["un", "deux", "trois", "cinq"])
    again = ParallelText(text.config, str(tmp_path))
    assert again.fingerprint != before


def test_fingerprints_of_plain_datasets_equal_those_of_earlier_versions(tmp_path):
    """So that existing runs can resume."""
    write(tmp_path, en=["one", "two", "three"] * 9, de=["eins", "zwei", "drei"] * 9)
    write(tmp_path, tsv=["one\teins", "two\tzwei"])
    configs = {
        "c1ed8108469c1a93": PairsConfig("text", ("en",), ("de",)),
        "fde74391a10e1fcf": PairsConfig("text", ("en", "en"), ("de", "de"), limit=5),
        "5df7c95fbc802470": PairsConfig("tsv", ("tsv",), source_field="2", target_field="1"),
    }
    for fingerprint, config in configs.items():
        assert ParallelText(config, str(tmp_path)).fingerprint[:16] == fingerprint
        assert ParallelText(config, str(tmp_path)).parts == []


def test_an_empty_corpus_of_a_mix_is_an_error(tmp_path):
    config = three(tmp_path, weights=(1.0, 1.0, 1.0))
    tokenizer = Tokenizer.train(read_pairs(config, str(tmp_path)), TokenizerConfig(vocab_size=30))
    write(tmp_path, fr=["", "", "", ""])
    with pytest.raises(UserError, match=r"after filtering the 4 pairs in \('en',\)"):
        build_corpus(config, tokenizer, DataConfig(root=str(tmp_path)), tmp_path / "corpus")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": (1.0, 0.0, 1.0)}, r"weights is \(1.0, 0.0, 1.0\); expected a tuple with each"),
        ({"weights": (1.0, 2.0)}, "weights is .*; expected one for each of the 3 items of source"),
        ({"tags": ("<2de>",)}, "tags is .*; expected one for each of the 3 items of source"),
        ({"temperature": 0.5}, "temperature is 0.5; expected 1 or more"),
        ({"temperature": 2.0, "weights": (1.0, 1.0, 1.0)}, "temperature is 2.0; expected 1 or"),
    ],
)
def test_invalid_settings(settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        three(tmp_path, **settings)


def test_an_unknown_tag_is_an_error(tmp_path):
    data = DataConfig(train=three(tmp_path, tags=("<2de>", "<2fr>", "<2en>")))
    message = r"data.train.tags is .*<2en>.*; expected items from tokenizer.user_defined_symbols"
    config = Config(data=data, tokenizer=TokenizerConfig(user_defined_symbols=("<2de>", "<2fr>")))
    with pytest.raises(UserError, match=message):
        config.check(config.training_rules())
