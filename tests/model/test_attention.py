"""Scaled dot-product and multi-head attention: masks, probabilities, widths, dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.model.attention import (
    MultiHeadAttention,
    attention_mask,
    dot_product_attention,
    dropout,
)


def _random(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def test_attention_is_equation_1() -> None:
    q, k, v = _random(1, 3, 1, 4, seed=1), _random(1, 5, 1, 4, seed=2), _random(1, 5, 1, 6, seed=3)
    out = dot_product_attention(q, k, v, jnp.ones((1, 1, 3, 5), bool))
    scores = np.asarray(q)[0, :, 0] @ np.asarray(k)[0, :, 0].T / np.sqrt(4)
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out[0, :, 0], weights @ np.asarray(v)[0, :, 0], rtol=1e-5, atol=1e-6)


def test_one_visible_position_gives_its_value() -> None:
    q, k, v = _random(2, 3, 2, 4), _random(2, 5, 2, 4, seed=1), _random(2, 5, 2, 4, seed=2)
    mask = jnp.zeros((1, 1, 1, 5), bool).at[..., 3].set(True)
    out = dot_product_attention(q, k, v, mask)
    np.testing.assert_allclose(out, jnp.broadcast_to(v[:, 3:4], out.shape), rtol=1e-6)


def test_row_with_nothing_visible_stays_finite() -> None:
    q = _random(1, 2, 1, 4)
    gradient = jax.grad(
        lambda x: dot_product_attention(x, x, x, jnp.zeros((1, 1, 2, 2), bool)).sum()
    )(q)
    assert jnp.isfinite(gradient).all()


def test_mask_keeps_segments_and_future_apart() -> None:
    segments = jnp.array([[1, 1, 2, 2, 0]])
    mask = attention_mask(segments, segments, causal=True)[0, 0].astype(int)
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("widths", [(None, None), (5, 7)])
def test_head_widths_are_free_of_d_model(widths: tuple[int | None, int | None]) -> None:
    layer = MultiHeadAttention(12, 3, d_k=widths[0], d_v=widths[1], rngs=nnx.Rngs(0))
    x = _random(2, 4, 12)
    assert layer(x, x, jnp.ones((1, 1, 4, 4), bool)).shape == (2, 4, 12)
    assert layer.query.kernel.shape == (12, 3, widths[0] or 4)
    assert layer.value.kernel.shape == (12, 3, widths[1] or 4)


def test_projections_are_xavier_uniform() -> None:
    kernel = MultiHeadAttention(64, 4, rngs=nnx.Rngs(0)).query.kernel[...]
    limit = np.sqrt(6 / (64 + 64))
    assert jnp.abs(kernel).max() <= limit
    assert float(kernel.std()) == pytest.approx(limit / np.sqrt(3), rel=0.05)


def test_output_of_a_head_is_a_mean_of_values() -> None:
    q, k, v = _random(2, 3, 2, 4), _random(2, 5, 2, 4, seed=1), jnp.ones((2, 5, 2, 4))
    np.testing.assert_allclose(
        dot_product_attention(q, k, v, jnp.ones((1, 1, 3, 5), bool)),
        jnp.ones((2, 3, 2, 4)),
        rtol=1e-6,
    )


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_dropout_rate_and_mean(rate: float) -> None:
    x = jnp.ones((200, 501))
    y = dropout(x, rate, jax.random.key(1))
    assert y.shape == x.shape
    assert float((y == 0).mean()) == pytest.approx(rate, abs=0.01)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.01)


def test_dropout_without_a_key_or_rate_is_the_identity() -> None:
    x = _random(3, 4)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(UserError, match="d_model is 10; expected a multiple of num_heads = 4"):
        MultiHeadAttention(10, 4, rngs=nnx.Rngs(0))
