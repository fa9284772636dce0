"""Limits and defaults of decoding as documented: per line, per batch, inclusive, in tokens."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import re
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from random_models import WORDS, lines_of_words, make_model

from transformer_jax.decoding import devices
from transformer_jax.errors import UserError
from transformer_jax.pretrained.loading import load_model
from transformer_jax.runs.model_folder import save_model
from transformer_jax.settings.config import (
    Config,
    DecodingConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.tokenization.special_ids import EOS_ID
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation import __main__ as program
from transformer_jax.translation.alignment import Alignment
from transformer_jax.translation.flags import checked_flags
from transformer_jax.translation.input_file import Record
from transformer_jax.translation.output_file import open_output
from transformer_jax.translation.output_formats import JsonWriter, OutputFlags, TextWriter
from transformer_jax.translation.requests import Request, Translation
from transformer_jax.translation.scoring import Scorer
from transformer_jax.translation.segments import cut_into_segments
from transformer_jax.translation.translator import Translator

LINES = lines_of_words(23)
CONFIG = DecodingConfig(beam_size=3, max_extra_length=6, max_source_length=24, batch_size=4)


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model(tokenizer, num_decoder_layers=2)


@pytest.fixture(scope="module")
def translator(model, tokenizer):
    return Translator(model, tokenizer, CONFIG)


@pytest.fixture(scope="module")
def workdir(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "run"
    save_model(folder, Config(model=model.config, decoding=CONFIG), model, tokenizer)
    return folder


def line_of(side, count, words=WORDS):
    """A line of exactly ``count`` tokens of one side of the tokenizer, without EOS."""
    one = next(word for word in words if len(side.encode([word])[0]) == 1)
    line = " ".join([one] * count)
    assert len(side.encode([line])[0]) == count
    return line


# How much is read ahead.


@pytest.mark.parametrize(("window", "expected"), [(None, 100 * 3), (7, 7)])
def test_a_stream_reads_100_batches_by_default(model, tokenizer, window, expected):
    """Empty lines need no search."""
    read = []
    lines = (read.append(i) or "" for i in range(1000))
    config = dataclasses.replace(CONFIG, batch_size=3)
    next(Translator(model, tokenizer, config).stream(lines, window=window))
    assert len(read) == expected


class _Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stdin", "stdout", "flags", "window"),
    [
        ("terminal", "pipe", (), 1),
        ("pipe", "terminal", (), None),
        ("terminal", "pipe", ("--input", "x"), None),
        ("terminal", "pipe", ("--window", "5"), 5),
    ],
)
def test_lines_typed_at_a_terminal_are_translated_at_once(
    workdir, monkeypatch, stdin, stdout, flags, window
):
    for name, kind in (("stdin", stdin), ("stdout", stdout)):
        stream = (_Terminal if kind == "terminal" else io.TextIOWrapper)(io.BytesIO())
        monkeypatch.setattr(f"sys.{name}", stream)
    arguments, _ = checked_flags(["--workdir", str(workdir), *flags])
    assert arguments.files.window == window


# Output.


class _SlowPipe(io.RawIOBase):
    """Accepts at most three bytes at a time, as a full pipe or disk may."""

    def __init__(self):
        self.written, self.flushed = b"", b""

    def write(self, data):
        self.written += bytes(data[:3])
        return min(3, len(data))

    def flush(self):
        self.flushed = self.written


def test_every_line_is_written_whole_and_flushed_before_the_next(monkeypatch):
    pipe = _SlowPipe()
    monkeypatch.setattr("sys.stdout", SimpleNamespace(buffer=pipe))
    with open_output(None) as (write, _):
        write("Ein Mann schläft .\n")
        assert pipe.flushed.decode() == "Ein Mann schläft .\n"
        write("0 ||| a\n0 ||| b\n")
        assert pipe.flushed.decode() == "Ein Mann schläft .\n0 ||| a\n0 ||| b\n"


@pytest.mark.parametrize(
    "field",
    [
        *("translation", "score", "log_prob", "hypotheses"),
        *("tokens", "token_scores", "source_tokens", "alignment"),
    ],
)
def test_no_field_of_the_output_can_be_translated(workdir, field):
    """The fields in the table of docs/decoding.md."""
    flags = ["--workdir", str(workdir), "--format", "jsonl", "--text-field"]
    with pytest.raises(UserError, match=f"--text-field is '{field}'; expected another field"):
        checked_flags([*flags, field])
    assert checked_flags([*flags, f"my_{field}"])[0].files.text_field == f"my_{field}"


def test_failed_lines_are_nan_in_text_and_null_in_jsonl():
    nothing = Translation("", math.nan, math.nan, 2, ("▁x",), (math.nan, -1.0))
    assert TextWriter(OutputFlags(), log_probs=True).text(Record("a"), [nothing]) == "nan\n"
    line = JsonWriter(OutputFlags(token_scores=True)).text(Record("a"), [nothing])
    values = json.loads(line)
    assert (values["score"], values["log_prob"], values["token_scores"]) == (None, None, [None, -1])


def test_numbers_have_four_decimals_everywhere():
    weights = np.array([[1 / 3, 2 / 3], [0.00004, 0.99996]])
    alignment = Alignment(("▁a", "</s>"), ("▁x", "</s>"), weights, [0], [0])
    found = Translation("x", -1.23456, -2.34567, 2, ("▁x",), (-0.12345, -3.45678), alignment)
    results = OutputFlags(nbest=2, token_scores=True, alignments="soft")
    values = json.loads(JsonWriter(results).text(Record("a"), [found]))
    for each in (values, *values["hypotheses"]):
        assert (each["score"], each["log_prob"]) == (-1.2346, -2.3457)
        assert each["token_scores"] == [-0.1235, -3.4568] or each["token_scores"] == [
            -0.1234,
            -3.4568,
        ]
        assert each["alignment"] == [[0.3333, 0.6667], [0.0, 1.0]]
    assert TextWriter(OutputFlags(nbest=2)).text(Record("a", line_number=8), [found]) == (
        "7 ||| x ||| -1.2346\n"
    )


# Lengths.


def test_a_line_of_the_maximum_length_is_one_segment(translator, tokenizer, caplog):
    """decoding.max_source_length includes EOS; segments are as long as it allows."""
    whole, longer = (line_of(tokenizer.source, count) for count in (23, 24))
    [sentence] = translator.plan(Request(whole, line_number=1)).sentences
    assert len(sentence.tokens) == 23 and not caplog.text
    segments = translator.plan(Request(longer, line_number=7)).sentences
    assert [len(each.tokens) for each in segments] == [23, 1]
    [message] = caplog.messages
    said = "Line 7 has 24 tokens; the maximum is 23, so it is translated in 2 segments."
    assert message == said


def test_a_translation_is_at_most_max_extra_length_longer_than_its_source(tokenizer):
    """Counting EOS on both sides. Here, no translation ends before it has to."""
    model = make_model(tokenizer, softmax_bias=True)
    model.softmax_bias[...] = model.softmax_bias[...].at[EOS_ID].set(-1e4)
    config = dataclasses.replace(CONFIG, beam_size=1)
    lines = [line_of(tokenizer.source, count) for count in (3, 8)]
    found = Translator(model, tokenizer, config).stream(lines)
    assert [best.length for [best] in found] == [3 + 1 + 6, 8 + 1 + 6]
    capped = dataclasses.replace(config, max_length=12)
    found = Translator(model, tokenizer, capped).stream(lines)
    assert [best.length for [best] in found] == [3 + 1 + 6, 12]


def test_a_prefix_may_be_as_long_as_max_extra_length(translator, tokenizer):
    words = line_of(tokenizer.target, 7, [word.upper() for word in WORDS]).split()

    def num_forced(translator, words):
        [sentence] = translator.plan(Request("one", prefix=" ".join(words))).sentences
        return len(sentence.prefix)

    assert num_forced(translator, words[:6]) == 6
    with pytest.raises(UserError, match="has 7 tokens; expected at most 6 .decoding.max_extra"):
        num_forced(translator, words)
    [[found]] = translator.stream([Request("one", prefix=" ".join(words[:6]))])
    assert found.text.startswith(" ".join(words[:6]))
    capped = dataclasses.replace(CONFIG, max_length=4)
    shorter = Translator(translator.model, tokenizer, capped)
    assert num_forced(shorter, words[:3]) == 3
    with pytest.raises(UserError, match="has 4 tokens; expected at most 3 .*max_length - 1"):
        num_forced(shorter, words[:4])


@pytest.mark.parametrize(("count", "is_repeated"), [(5, True), (6, False)])
def test_tags_are_repeated_if_they_leave_half_of_each_segment(count, is_repeated):
    tags = tuple(f"<t{i}>" for i in range(9))
    settings = TokenizerConfig(vocab_size=59, algorithm="unigram", user_defined_symbols=tags)
    tokenizer = Tokenizer.train([(line, line.upper()) for line in LINES], settings)
    line = " ".join([*tags[:count], *WORDS * 3])
    [tag, *_] = [tokenizer.source.split_tag(line)[0]]
    limit = 2 * len(tokenizer.source.split_tag(" ".join([*tags[:5], "one"]))[0])
    segments = [segment.tokens for segment in cut_into_segments(line, limit, tokenizer)[0]]
    assert all(len(segment) <= limit for segment in segments)
    assert (segments[1][: len(tag)] == tag) == is_repeated


# Scoring and alignment.


def test_pairs_may_have_4096_tokens_or_as_many_as_there_are_learned_positions(model, tokenizer):
    assert Scorer(model, tokenizer, CONFIG).max_length == 4096
    learned = make_model(tokenizer, positions="learned", max_positions=20)
    scorer = Scorer(learned, tokenizer, CONFIG)
    for sizes, is_scored in (((19, 3), True), ((3, 19), True), ((20, 3), False), ((3, 20), False)):
        pair = tuple([5] * size for size in sizes)
        [log_probs] = scorer.score_tokens([pair])
        assert np.isfinite(log_probs).all() == is_scored and len(log_probs) == sizes[1] + 1
        [weights] = scorer.align_tokens([pair])
        assert (weights is not None) == is_scored


def test_a_batch_of_long_pairs_has_fewer_rows(model, tokenizer, caplog):
    """batch_size pairs of up to 64 tokens; of twice the length, half as many."""
    scorer = Scorer(model, tokenizer, CONFIG)
    caplog.set_level(logging.INFO)
    scorer.score_tokens([([5] * size, [6]) for size in (9, 63, 127, 255, 300)])
    shapes = re.findall(r"for (\d+) pairs of up to (\d+) tokens", caplog.text)
    assert {(int(rows), int(length)) for rows, length in shapes} == {
        *((4, 16), (4, 64), (2, 128), (1, 256), (1, 384))
    }


def test_an_alignment_is_the_mean_over_heads_of_the_last_layer(model, tokenizer):
    """Row t is the target token, column s the source token."""
    scorer = Scorer(model, tokenizer, CONFIG)
    source, target = [5, 6, 7, 8], [9, 10]
    [found_TS] = scorer.align_tokens([(source, target)])
    weights = model.attention_weights(np.array([[*source, 2]]), np.array([[*target, 2]]))
    cross_NHTS = np.concatenate([np.asarray(layer) for layer in weights.cross])
    assert found_TS.shape == (3, 5)
    np.testing.assert_allclose(found_TS, cross_NHTS[-1].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(
        scorer.align_tokens([(source, target)], layer=-2)[0], cross_NHTS[0].mean(axis=0), atol=1e-6
    )
    assert OutputFlags().alignment_layer is None


# Search settings.


def test_suppressed_tokens_are_in_no_hypothesis_on_any_device(model, tokenizer, translator):
    def tokens(its):
        return [t for found in its.stream(LINES[:6], num_hypotheses=3) for t in found]

    free = tokens(translator)
    most_common = max(set(free[0].tokens), key=free[0].tokens.count)
    config = dataclasses.replace(CONFIG, suppress=(most_common,))
    found = tokens(Translator(model, tokenizer, config))
    assert any(most_common in t.tokens for t in free)
    assert found and not any(most_common in t.tokens for t in found)


def test_sampling_draws_nbest_samples_best_first(workdir, monkeypatch, capsysbinary):
    def run(*flags):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one two\nthree\n")))
        more = ("--method", "sample", "--nbest", "3", *flags)
        assert program.main(["--workdir", str(workdir), *more]) == 0
        return capsysbinary.readouterr().out.decode()

    found = run()
    assert found == run("--beam-size", "5")  # has no effect
    rows = [line.split(" ||| ") for line in found.splitlines()]
    assert [row[0] for row in rows] == ["0"] * 3 + ["1"] * 3
    for first in (0, 3):
        scores = [float(row[2]) for row in rows[first : first + 3]]
        assert scores == sorted(scores, reverse=True)


# Evaluation.


@pytest.mark.parametrize(("flags", "used"), [((), "char"), (("--bleu-tokenize", "intl"), "intl")])
def test_references_are_scored_with_the_runs_bleu_tokenizer(
    workdir, tmp_path, monkeypatch, capsysbinary, flags, used
):
    folder = tmp_path / "run"
    config, model, tokenizer = load_model(workdir)
    training = TrainingConfig(bleu_tokenize="char")
    save_model(folder, dataclasses.replace(config, training=training), model, tokenizer)
    (tmp_path / "reference").write_text("ONE TWO\nFIVE\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one two\nfive\n")))
    where = ["--workdir", str(folder), "--reference", str(tmp_path / "reference")]
    assert program.main([*where, *flags]) == 0
    out, err = capsysbinary.readouterr()
    assert re.search(rf"^BLEU\|nrefs:1\|.*tok:{used}\|", err.decode(), re.MULTILINE)
    assert out.count(b"\n") == 2 and b"BLEU" not in out
    found, right = out.decode().splitlines(), ["ONE TWO", "FIVE"]
    share = sum(a == b for a, b in zip(found, right, strict=True)) / 2
    assert f"exact match {share:.2%}" in err.decode()


def test_hypotheses_run_out_where_the_search_finds_fewer(translator):
    """Segments of a line are joined while every segment has another hypothesis."""
    line = " ".join(WORDS) * 5
    plan = translator.plan(Request(line, line_number=1), 3)
    hypotheses = [list(each) for each in translator.engines[0].search(plan.sentences)]
    hypotheses[1] = hypotheses[1][:2]
    found = plan.join(hypotheses)
    assert len(found) == 2
    for rank, translation in enumerate(found):
        chosen = [its[rank] for its in hypotheses]
        assert translation.score == pytest.approx(np.mean([each.score for each in chosen]))
        assert translation.log_prob == pytest.approx(sum(each.log_prob for each in chosen))
        assert translation.length == sum(len(each.tokens) + 1 for each in chosen)
        assert list(islice(translation.token_log_probs, 3)) == chosen[0].token_log_probs[:3]


# Devices.


@pytest.mark.parametrize(
    ("platform", "rows", "used"),
    [
        *(("cpu", 1, 1), ("cpu", 7, 1), ("cpu", 8, 2), ("cpu", 999, 6)),
        *(("gpu", 1, 1), ("gpu", 5, 5), ("gpu", 999, 6)),
    ],
)
def test_devices_have_at_least_4_rows_or_on_accelerators_one(monkeypatch, platform, rows, used):
    found = [SimpleNamespace(platform=platform) for _ in range(6)]
    monkeypatch.setattr(devices, "find_devices", lambda: found)
    assert devices.devices_for_rows(rows) == found[:used]
