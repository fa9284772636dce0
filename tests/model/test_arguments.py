"""Arguments of public modules and functions: invalid ones raise an error before any computation."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import transformer_jax as tj

CONFIG = tj.ModelConfig(
    vocab_size=9, d_model=8, d_ff=8, num_heads=2, num_layers=1, dropout=0.0, dtype="float32"
)
X, TOKENS, MASK = np.ones((2, 3, 8), np.float32), np.full((2, 3), 5), np.ones((2, 1, 3, 3), bool)
LIST: Any = [[5, 6]]


def _build(module: Any, *given: Any) -> Any:
    return module(*given, rngs=nnx.Rngs(0))


def _calls() -> list[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Each public call that takes arrays, with valid arguments."""
    model = _build(tj.Transformer, CONFIG)
    attention = _build(tj.MultiHeadAttention, 8, 2)
    network, embedding = _build(tj.FeedForward, CONFIG), _build(tj.Embedding, 9, CONFIG)
    q = np.ones((2, 3, 2, 4), np.float32)
    return [
        ("attention", attention, (X, X, MASK)),
        ("feed_forward", network, (X,)),
        ("encoder layer", model.encoder.layers[0], (X, MASK)),
        ("decoder layer", model.decoder.layers[0], (X, X, MASK, MASK)),
        ("encoder", model.encoder, (X, MASK)),
        ("decoder", model.decoder, (X, X, MASK, MASK)),
        ("hidden", model.hidden, (TOKENS, TOKENS)),
        ("encode", model.encode, (TOKENS,)),
        ("logits", model.logits, (X,)),
        ("attention weights", model.attention_weights, (TOKENS, TOKENS)),
        ("embedding", lambda *x: embedding(*x, num_positions=3), (TOKENS, TOKENS)),
        ("mask", tj.attention_mask, (TOKENS, TOKENS)),
        ("dot product", tj.dot_product_attention, (q, q, q, MASK)),
        ("loss", tj.smoothed_cross_entropy, (X, np.ones((9, 8), np.float32), TOKENS)),
    ]


CALLS = _calls()


@pytest.mark.parametrize(("call", "given"), [each[1:] for each in CALLS], ids=[x[0] for x in CALLS])
def test_arrays_with_the_wrong_type_or_axes(call: Callable[..., Any], given: Any) -> None:
    jax.eval_shape(lambda: call(*given))
    for i, array in enumerate(given):
        before, after = given[:i], given[i + 1 :]
        wrong = [(array.tolist(), "is a list; expected "), (array[0], "axes; expected ")]
        if array.dtype != np.float32:
            wrong.append((array.astype(np.float32), "is float32 with"))
        for value, message in wrong:
            with pytest.raises(tj.UserError, match=message):
                call(*before, value, *after)


@pytest.mark.parametrize("key", [0, LIST, 1.5], ids=str)
def test_dropout_keys(key: Any) -> None:
    calls = [x for x in CALLS if x[0] not in ("logits", "attention weights", "mask", "loss")]
    for name, call, given in calls:
        if name != "embedding":
            with pytest.raises(
                tj.UserError, match=re.escape(f"dropout_key is {key}; expected None")
            ):
                call(*given, dropout_key=key)
    for valid in (None, jax.random.key(0), jax.random.PRNGKey(0)):
        jax.eval_shape(lambda valid=valid: CALLS[0][1](X, dropout_key=valid))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tj.sinusoidal_positions(5, 0), "d_model is 0; expected a positive number"),
        (lambda: tj.sinusoidal_positions(-1, 8), "length is -1; expected a number from 0"),
        (lambda: tj.sinusoidal_positions(5, LIST), "d_model is [[5, 6]]; expected int"),
        (lambda: _build(tj.Embedding, 0, CONFIG), "vocab_size is 0; expected a positive number"),
        (
            lambda: tj.smoothed_cross_entropy(X, X[0].T, TOKENS, label_smoothing=1.0),
            "label_smoothing is 1.0; expected a value in [0, 1)",
        ),
    ],
)
def test_sizes(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(tj.UserError, match=re.escape(message)):
        call()
