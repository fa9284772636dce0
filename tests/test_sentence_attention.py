"""Attention weights of a sentence: equal to the model's, computed as in the paper."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_models import lines_of_words, make_model, train_tokenizer

from transformer_jax import (
    DecodingConfig,
    Ensemble,
    Transformer,
    Translator,
    UserError,
    attention_mask,
)
from transformer_jax.report.attention import sentence_attention
from transformer_jax.tokenization.special_ids import BOS_ID, EOS_ID

LINES = lines_of_words(12)
DECODING = DecodingConfig(beam_size=2, max_extra_length=6, max_source_length=16, batch_size=1)


@pytest.fixture(scope="module")
def translator():
    tokenizer = train_tokenizer(LINES)
    model = make_model(tokenizer, num_decoder_layers=2)
    return Translator(model, tokenizer, DECODING)


def test_weights_equal_the_models_without_padding(translator):
    text, target = LINES[2], LINES[3].upper()
    found = sentence_attention(translator, text, target=target)
    model, tokenizer = translator.model, translator.tokenizer
    [source], [labels] = tokenizer.source.encode([text]), tokenizer.target.encode([target])
    assert found.source == (*tokenizer.source.tokens(source), "</s>")
    assert found.target == (*tokenizer.target.tokens(labels), "</s>")
    expected = nnx.jit(Transformer.attention_weights)(
        model, jnp.array([[*source, EOS_ID]]), jnp.array([[*labels, EOS_ID]])
    )
    for name in ("encoder", "decoder", "cross"):
        queries, keys, weights_NHTS = found.of(name)
        layers = getattr(expected, name)
        assert weights_NHTS.shape == (len(layers), 2, len(queries), len(keys))
        assert weights_NHTS.dtype == np.float32
        np.testing.assert_allclose(weights_NHTS.sum(axis=-1), 1, atol=1e-6)
        np.testing.assert_allclose(weights_NHTS, np.concatenate(layers), atol=1e-6)
    assert found.of("decoder")[1] == ("<s>", *found.target[:-1])
    assert not np.triu(found.decoder_NHTT, 1).any()


def test_weights_of_the_first_layers_follow_equation_1(translator):
    """softmax(q k^T / sqrt(d_k)) in NumPy, from the embeddings."""
    found = sentence_attention(translator, "one two", target="TWO")
    model, tokenizer = translator.model, translator.tokenizer
    for kind, tokens in (
        ("encoder", [*tokenizer.source.encode(["one two"])[0], EOS_ID]),
        ("decoder", [BOS_ID, *tokenizer.target.encode(["TWO"])[0]]),
    ):
        ids_1L = jnp.array([tokens])
        embedding = model.source_embedding if kind == "encoder" else model.target_embedding
        x_1LD = embedding(ids_1L, jnp.arange(len(tokens))[None], num_positions=len(tokens))
        first = getattr(model, kind).layers[0].self_attention
        q_LHK, k_LHK = np.asarray(first.query(x_1LD)[0]), np.asarray(first.key(x_1LD)[0])
        scores_HLL = np.einsum("qhk,shk->hqs", q_LHK, k_LHK) / np.sqrt(q_LHK.shape[-1])
        real_1L = jnp.ones_like(ids_1L)
        mask = attention_mask(real_1L, real_1L, causal=kind == "decoder")
        exp_HLL = np.exp(scores_HLL) * np.asarray(mask)[0]
        expected = exp_HLL / exp_HLL.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(found.of(kind)[2][0], expected, atol=1e-6)


def test_the_default_target_is_the_best_translation(translator):
    [[best]] = translator.stream(["three four"])
    found = sentence_attention(translator, "three four")
    assert found.target == (*best.tokens, "</s>")


def test_ensembles_have_no_attention_weights(translator):
    both = Translator(Ensemble([translator.model] * 2), translator.tokenizer, DECODING)
    with pytest.raises(UserError, match="has 2 models; expected one"):
        sentence_attention(both, "one")


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("  ", None, "text is '  '; expected a sentence."),
        ("one " * 2000, None, "text has 2001 tokens, EOS included; expected at most 1024."),
        ("one", "ONE " * 2000, "target has 2001 tokens, EOS included; expected at most 1024."),
        (b"one", None, "The text is b'one'; expected text (a str)."),
        ("one", "\ud800", "The text is not valid Unicode; expected no lone surrogates."),
    ],
)
def test_invalid_sentences(translator, text, target, message):
    with pytest.raises(UserError) as error:
        sentence_attention(translator, text, target=target)
    assert str(error.value) == message
