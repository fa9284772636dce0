"""Scoring: equal to the search's scores in any batch; attention weights sum to 1."""

from __future__ import annotations

import copy
from dataclasses import replace

import jax
import numpy as np
import pytest
import random_models
from flax import nnx
from random_models import WORDS, lines_of_words, train_tokenizer

from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.length_buckets import padded_length
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.settings.config import DecodingConfig, ModelConfig
from transformer_jax.tokenization.special_ids import EOS_ID, PAD_ID
from transformer_jax.translation import scoring
from transformer_jax.translation.scoring import Scorer
from transformer_jax.translation.translator import Translator

LINES = lines_of_words(12)
TARGETS = [line.upper() for line in reversed(LINES)]
CONFIG = DecodingConfig(beam_size=2, max_extra_length=6, max_source_length=16, batch_size=4)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES)


def make_model(tokenizer, seed=8, **settings):
    layers = {"num_layers": 1, "num_decoder_layers": 2}
    return random_models.make_model(tokenizer, seed, **layers | settings)


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model(tokenizer)


@pytest.fixture(scope="module")
def scorer(model, tokenizer):
    return Scorer(model, tokenizer, CONFIG)


@pytest.fixture(scope="module")
def pairs(tokenizer):
    return list(zip(tokenizer.source.encode(LINES), tokenizer.target.encode(TARGETS), strict=True))


def by_hand(model, source, target):
    """Each token's log-probability from the model's forward pass over one sentence."""
    log_probs_1TV = np.asarray(forward(model, padded([source], 140), padded([target], 140)))
    return log_probs_1TV[0, np.arange(len(target) + 1), [*target, EOS_ID]]


@nnx.jit
def forward(model, source_BS, target_BT):
    return jax.nn.log_softmax(model(source_BS, target_BT))


def padded(rows, length):
    array_BL = np.full((len(rows), length), PAD_ID, np.int32)
    for row, tokens in zip(array_BL, rows, strict=True):
        row[: len(tokens) + 1] = [*tokens, EOS_ID]
    return array_BL


@pytest.mark.devices(3)
def test_devices_share_the_rows(model, tokenizer, scorer, pairs):
    devices = jax.devices()[1:3]
    spread = Scorer(model, tokenizer, CONFIG, devices=devices)
    for parameters, device in zip(spread._parameters, devices, strict=True):
        assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(parameters))
    for one, other in zip(spread.score_tokens(pairs), scorer.score_tokens(pairs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(spread.align_tokens(pairs), scorer.align_tokens(pairs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_scores_equal_the_searchs(model, tokenizer, scorer):
    found = list(Translator(model, tokenizer, CONFIG).stream(LINES, num_hypotheses=2))
    sources = tokenizer.source.encode(LINES)
    pairs = [
        (source, tokenizer.target.ids(t.tokens))
        for source, both in zip(sources, found, strict=True)
        for t in both
    ]
    for t, log_probs in zip(
        (t for both in found for t in both), scorer.score_tokens(pairs), strict=True
    ):
        np.testing.assert_allclose(log_probs, t.token_log_probs, atol=1e-4)
        assert log_probs.sum() == pytest.approx(t.log_prob, abs=1e-4)


def test_scores_use_the_length_penalty_of_the_config(scorer):
    other = copy.copy(scorer)
    for alpha, offset in ((0.6, 5.0), (1.0, 0.0), (0.5, 2.0)):
        other.config = replace(CONFIG, length_penalty=alpha, length_offset=offset)
        [t] = other.score([(LINES[0], TARGETS[0])])
        expected = t.log_prob / ((offset + t.length) / (offset + 1)) ** alpha
        assert t.score == pytest.approx(expected, rel=1e-5)


def test_an_ensemble_averages_probabilities(model, tokenizer, pairs):
    models = [model, make_model(tokenizer, seed=9)]
    source, target = pairs[0]
    [log_probs] = Scorer(Ensemble(models), tokenizer, CONFIG).score_tokens(pairs[:1])
    expected = np.log(np.mean([np.exp(by_hand(each, source, target)) for each in models], axis=0))
    np.testing.assert_allclose(log_probs, expected, atol=1e-5)


def test_scores_equal_the_forward_pass(model, scorer, pairs):
    for (source, target), log_probs in zip(pairs[:4], scorer.score_tokens(pairs)[:4], strict=True):
        np.testing.assert_allclose(log_probs, by_hand(model, source, target), atol=1e-5)


def test_logits_are_computed_in_chunks(model, tokenizer, pairs, scorer, monkeypatch):
    # 3 positions of a batch; the padded length, 16, is no multiple of 3.
    monkeypatch.setattr(scoring, "_MAX_LOGITS", 3 * 4 * 50)
    in_chunks = Scorer(model, tokenizer, CONFIG).score_tokens(pairs[:4])
    for found, whole in zip(in_chunks, scorer.score_tokens(pairs[:4]), strict=True):
        np.testing.assert_allclose(found, whole, atol=1e-6)


def test_scores_do_not_depend_on_other_pairs(scorer, pairs):
    together = scorer.score_tokens(pairs)
    order = np.random.default_rng(0).permutation(len(pairs))
    for i, log_probs in zip(order, scorer.score_tokens([pairs[i] for i in order]), strict=True):
        np.testing.assert_array_equal(log_probs, together[i])
    for pair, log_probs in zip(pairs, together, strict=True):
        np.testing.assert_array_equal(scorer.score_tokens([pair])[0], log_probs)


def test_lines_keep_their_order(scorer, pairs):
    found = scorer.score(zip(LINES, TARGETS, strict=True))
    assert [t.text for t in found] == TARGETS
    for t, log_probs in zip(found, scorer.score_tokens(pairs), strict=True):
        assert t.length == len(log_probs) == len(t.tokens) + 1
        assert t.log_prob == pytest.approx(log_probs.sum(dtype=np.float64), abs=1e-5)
        assert t.score == pytest.approx(t.log_prob / ((5 + t.length) / 6) ** 0.6, rel=1e-5)
        np.testing.assert_array_equal(np.float32(t.token_log_probs), log_probs)


def test_an_empty_line_is_scored_as_eos(model, scorer):
    pairs = [("", ""), (LINES[3], "")]
    for t, (source, target) in zip(scorer.score(pairs), pairs, strict=True):
        expected = by_hand(model, scorer.tokenizer.source.encode([source])[0], [])
        assert (t.text, t.length, t.tokens) == (target, 1, ())
        assert t.log_prob == pytest.approx(expected[0], abs=1e-5)


def test_invalid_models_and_lines(tokenizer, scorer):
    sizes = {"vocab_size": 9, "d_model": 8, "d_ff": 8, "num_heads": 1, "num_layers": 1}
    model = Transformer(ModelConfig(**sizes), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="expected both from the same training run"):
        Scorer(model, tokenizer, CONFIG)
    for pair, message in [
        ((7, "ONE"), "Line 1: source is 7; expected text"),
        (("one", b"ONE"), "Line 1: target is b'ONE'; expected text"),
        (("one", "\ud800"), "Line 1: target is not valid Unicode"),
    ]:
        with pytest.raises(UserError, match=message):
            scorer.score([pair])


def test_each_shape_is_compiled_once(model, tokenizer, caplog):
    scorer = Scorer(model, tokenizer, CONFIG)
    with caplog.at_level("INFO"):
        for _ in range(2):
            scorer.score(zip(LINES, TARGETS, strict=True))
    assert 1 <= caplog.text.count("Compiling the scoring function for") <= 3
    lengths = {1: 16, 16: 16, 17: 24, 25: 32, 33: 48, 49: 64, 65: 96, 1000: 1024}
    assert {n: padded_length(n, 16) for n in lengths} == lengths


def test_long_pairs_are_scored_whole(model, tokenizer, scorer):
    source, target = " ".join(WORDS * 6), " ".join(WORDS * 4).upper()
    [t] = scorer.score([(source, target)])
    tokens = tokenizer.source.encode([source])[0], tokenizer.target.encode([target])[0]
    assert min(map(len, tokens)) > CONFIG.max_source_length
    np.testing.assert_allclose(t.token_log_probs, by_hand(model, *tokens), atol=1e-4)


def test_pairs_longer_than_the_learned_positions_get_nan(tokenizer, caplog):
    model = make_model(tokenizer, positions="learned", max_positions=20)
    scorer = Scorer(model, tokenizer, CONFIG)
    pairs = [("one", "TWO"), ("two", "ONE"), ("one", " ".join(WORDS * 3))]
    pairs.append(pairs[0])
    with caplog.at_level("WARNING"):
        found = scorer.score(pairs)
    assert "1 of 4 pairs have more than 20 source or target tokens" in caplog.text
    assert [t.text for t in found] == [target for _, target in pairs]
    assert [np.isnan(t.log_prob) and np.isnan(t.score) for t in found] == [0, 0, 1, 0]
    assert found[0] == found[3]
    [log_probs] = scorer.score_tokens([([], [5] * 20)])
    assert log_probs.shape == (21,) and np.isnan(log_probs).all()
    assert scorer.align_tokens([([], [5] * 20)]) == [None]


def test_pairs_that_need_too_much_memory_get_nan(model, tokenizer, monkeypatch):
    monkeypatch.setattr(scoring, "_MAX_LENGTH", 30)
    scorer = Scorer(model, tokenizer, CONFIG)
    assert scorer.max_length == 30
    [long, short] = scorer.score([(" ".join(WORDS * 9), "ONE"), ("one", "TWO")])
    assert np.isnan(long.log_prob) and len(long.token_log_probs) == long.length
    assert np.isfinite(short.log_prob)


def test_alignments_of_each_layer(scorer, pairs):
    first, last, same = (scorer.align_tokens(pairs[:1], layer=layer)[0] for layer in (0, -1, 1))
    assert np.abs(first - last).max() > 1e-3
    np.testing.assert_array_equal(last, same)
    with pytest.raises(UserError, match="alignment layer is 2; expected -2 to 1"):
        scorer.align_tokens(pairs[:1], layer=2)
