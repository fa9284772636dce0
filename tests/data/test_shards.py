"""A corpus made in shards is the one that a single process makes; only whole shards open."""

import dataclasses
import os
import shlex

import numpy as np
import pytest

from transformer_jax.config import (
    BatchConfig,
    Config,
    DataConfig,
    OptimizerConfig,
    PairsConfig,
    TokenizerConfig,
)
from transformer_jax.config_io import to_json
from transformer_jax.data import files, tokenize
from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.corpus import prepare_corpus, prepare_shard
from transformer_jax.data.sources import read_pairs
from transformer_jax.errors import UserError
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training import tokenize_ahead
from transformer_jax.training.loop import train
from transformer_jax.training.resuming import differences_on_resume

PAIRS = list(read_pairs(PairsConfig(kind="numbers", limit=420)))
TOKENIZER_CONFIG = TokenizerConfig(vocab_size=80)
TOKENIZER = Tokenizer.train(PAIRS, TOKENIZER_CONFIG)
SIZES = (90, 1, 200, 0, 60, 9, 60)  # of the files, in pairs


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(tokenize, "_CHUNK_PAIRS", 32)


def config_of(tmp_path, *, sampling=0.0, longest=11, **data):
    """A config of seven text files; one is empty, the fourth has nothing."""
    start = 0
    for i, size in enumerate(SIZES):
        part, start = PAIRS[start : start + size], start + size
        for side, name in enumerate(("en", "de")):
            (tmp_path / f"part-{i}.{name}").write_text("".join(f"{pair[side]}\n" for pair in part))
    train = PairsConfig("text", ("part-*.en",), ("part-*.de",))
    return Config(
        tokenizer=dataclasses.replace(TOKENIZER_CONFIG, sampling=sampling, sampled_epochs=3),
        data=DataConfig(root=str(tmp_path), train=train, max_target_length=longest, **data),
        batch=BatchConfig(tokens=2048, buckets=3),
    )


def in_shards(config, count, **data):
    return dataclasses.replace(config, data=dataclasses.replace(config.data, shards=count, **data))


def prepared(workdir, config, count, **data):
    config = in_shards(config, count, **data)
    for k in reversed(range(count)):
        prepare_shard(workdir, config, TOKENIZER, k)
    return prepare_corpus(workdir, config, TOKENIZER, "train")


def assert_same_corpus(a, b):
    for name in ("fingerprint", "num_pairs", "num_samples", "statistics"):
        assert getattr(a, name) == getattr(b, name)
    everything = np.arange(a.num_samples * a.num_pairs)
    for (x, x_lengths), (y, y_lengths) in (
        (a.source(everything), b.source(everything)),
        (a.target(everything), b.target(everything)),
    ):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x_lengths, y_lengths)
    for start, stop in ((0, a.num_pairs), (80, 95), (7, 7)):
        for x, y in zip(a.lengths(start, stop), b.lengths(start, stop), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("sampling", [0.0, 0.2])
def test_the_number_of_shards_changes_nothing(tmp_path, monkeypatch, sampling):
    config = config_of(tmp_path, sampling=sampling, longest=20 if sampling else 11)
    whole = prepare_corpus(tmp_path / "whole", config, TOKENIZER, "train")
    assert whole.num_samples == (3 if sampling else 1) and 0 < whole.statistics["too_long"] < 200
    plan = BatchPlan(whole, config.batch, seed=0)
    for count in (1, 2, 5, 7):
        if count == 5:  # by processes
            monkeypatch.setattr(tokenize, "_SMALL", 0)
        corpus = prepared(tmp_path / str(count), config, count, workers=2 if count == 5 else 1)
        monkeypatch.setattr(tokenize, "_SMALL", 10**6)
        assert_same_corpus(corpus, whole)
        other = BatchPlan(corpus, config.batch, seed=0)
        assert (other.shapes, other.fill) == (plan.shapes, plan.fill)
        for step in range(40):
            for x, y in zip(other.batch(step), plan.batch(step), strict=True):
                assert (x is None and y is None) or np.array_equal(x, y)


def test_segmentations_differ_between_files(tmp_path):
    """Each file has seeds of its own: the same text in two files is not segmented alike."""
    config = config_of(tmp_path, sampling=0.3, longest=99)
    for i in range(len(SIZES)):
        for name in ("en", "de"):
            (tmp_path / f"part-{i}.{name}").write_text((tmp_path / f"part-0.{name}").read_text())
    corpus = prepared(tmp_path / "run", config, 7)
    lengths = corpus.lengths(0, corpus.num_pairs)[0][0].reshape(7, -1)
    assert len({tuple(row) for row in lengths}) == 7


def test_an_empty_shard_is_no_error_but_an_empty_corpus_is(tmp_path):
    config = config_of(tmp_path)
    assert prepare_shard(tmp_path / "run", in_shards(config, 7), TOKENIZER, 3).num_pairs == 0
    for i in range(len(SIZES)):
        for name in ("en", "de"):
            (tmp_path / f"part-{i}.{name}").write_text("\n" * i)
    with pytest.raises(UserError, match="No sentence pair is left of 21 read in .*: 21 empty"):
        prepared(tmp_path / "run", config, 7)


@pytest.mark.parametrize("damage", ["missing", "damaged", "changed text"])
def test_a_missing_or_damaged_shard_is_named_with_its_remedy(tmp_path, damage, capsys):
    workdir, config = tmp_path / "run", config_of(tmp_path)
    prepared(workdir, config, 3)
    (workdir / "config.json").write_text(to_json(config))
    TOKENIZER.save(workdir)
    shard = prepare_shard(workdir, in_shards(config, 3), TOKENIZER, 1)
    folder = workdir / "corpus" / shard.fingerprint[:20]
    if damage == "changed text":
        (tmp_path / "part-2.en").write_text(
            (tmp_path / "part-2.en").read_text().replace("one", "two")
        )
    elif damage == "damaged":
        os.truncate(folder / "source_tokens", 4)
    else:
        folder.rename(tmp_path / "elsewhere")
    word = "damaged" if damage == "damaged" else "missing"
    with pytest.raises(UserError, match=rf"Shard 1/3 of the training text is {word}") as error:
        prepare_corpus(workdir, in_shards(config, 3), TOKENIZER, "train")
    program, arguments = str(error.value).splitlines()[-1].strip().split(" --", 1)
    assert program == "python -m transformer_jax.training.tokenize_ahead"
    assert tokenize_ahead.main(shlex.split("--" + arguments)) == 0
    corpus = prepare_corpus(workdir, in_shards(config, 3), TOKENIZER, "train")
    assert_same_corpus(corpus, prepare_corpus(tmp_path / "whole", config, TOKENIZER, "train"))


def test_the_number_of_shards_may_change_on_resume(tmp_path):
    config = config_of(tmp_path)
    assert differences_on_resume(config, in_shards(config, 5)) == []
    windows = dataclasses.replace(config, batch=dataclasses.replace(config.batch, window=100))
    assert differences_on_resume(config, windows) == [("batch.window", 16777216, 100)]


def test_more_shards_than_files(tmp_path):
    config = in_shards(config_of(tmp_path), 8)
    with pytest.raises(
        UserError, match=r"data.shards is 8; expected at most 7, the files of data.train"
    ):
        prepare_shard(tmp_path, config, TOKENIZER, 0)
    with pytest.raises(UserError, match=r"data.shards is 8; expected at most 7"):
        prepare_corpus(tmp_path, config, TOKENIZER, "train")


def test_opening_does_not_read_the_text_again(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_SETTLED_SECONDS", -1.0)
    config = config_of(tmp_path)
    corpus = prepared(tmp_path / "run", config, 3)
    monkeypatch.setattr(files.hashlib, "file_digest", None)
    assert_same_corpus(
        prepare_corpus(tmp_path / "run", in_shards(config, 3), TOKENIZER, "train"), corpus
    )


def test_the_program(tmp_path, capsys):
    (tmp_path / "run.json").write_text(to_json(config_of(tmp_path)))
    flags = [
        "--config",
        str(tmp_path / "run.json"),
        "--workdir",
        str(tmp_path / "run"),
        "--data.workers",
        "1",
    ]

    def fails(*more):
        assert tokenize_ahead.main([*flags, *more]) == 2
        return capsys.readouterr().err

    assert "expected one of the two" in fails() and "expected one of the two" in fails(
        "--shard", "0/2", "--tokenizer-only"
    )
    assert "has no tokenizer; expected one: run this with --tokenizer-only first" in fails(
        "--shard", "0/2"
    )
    assert tokenize_ahead.main([*flags, "--tokenizer-only"]) == 0
    assert "shard is '2/2'; expected i/n" in fails("--shard", "2/2")
    errors = fails("--shard", "0/2", "--data.max-target-length", "20")
    assert "data.max_target_length: 11 in the work directory, 20 now" in errors
    for shard in ("0/2", "1/2"):
        assert tokenize_ahead.main([*flags, "--shard", shard]) == 0
    assert "shard 1/2 pairs: " in capsys.readouterr().err
    config = in_shards(config_of(tmp_path), 2)
    tokenizer = Tokenizer.load(tmp_path / "run")
    assert prepare_corpus(tmp_path / "run", config, tokenizer, "train").statistics["read"] == sum(
        SIZES
    )


def test_training_has_the_tokenizer_that_was_made_ahead(tmp_path):
    """Also with other settings; and shards may still be made once training was started."""
    file, workdir = tmp_path / "run.json", tmp_path / "run"
    make = ["--config", str(file), "--workdir", str(workdir), "--data.workers", "1"]
    written = []
    for warmup_steps in (1, 2):
        config = dataclasses.replace(
            config_of(tmp_path),
            batch=BatchConfig(tokens=2048),
            optimizer=OptimizerConfig(warmup_steps=warmup_steps),
        )
        file.write_text(to_json(config))
        if not written:
            assert tokenize_ahead.main([*make, "--tokenizer-only"]) == 0
        written.append((workdir / "tokenizer.model").stat().st_mtime_ns)
        with pytest.raises(UserError, match="Shard 0/2 of the training text is missing"):
            train(in_shards(config, 2), workdir)
        assert tokenize_ahead.main([*make, "--shard", "1/2"]) == 0
    assert {(workdir / "tokenizer.model").stat().st_mtime_ns} == set(written)
