"""Scaled dot-product and multi-head attention: masks, probabilities, widths, dropout."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import against_reference

from transformer_jax.errors import UserError
from transformer_jax.model.attention import (
    MultiHeadAttention,
    attention_mask,
    dot_product_attention,
)


def _random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


attend = jax.jit(dot_product_attention)


def test_attention_equals_equation_1() -> None:
    q, k, v = _random(1, 3, 1, 4, seed=1), _random(1, 5, 1, 4, seed=2), _random(1, 5, 1, 6, seed=3)

    def equation_1(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = q[0, :, 0] @ k[0, :, 0].T / np.sqrt(4)
        weights = jnp.exp(scores) / jnp.exp(scores).sum(axis=1, keepdims=True)
        return (weights @ v[0, :, 0])[None, :, None]

    against_reference(
        lambda *qkv: dot_product_attention(*qkv, np.ones((1, 1, 3, 5), bool)),
        equation_1,
        (q, k, v),
        {"rtol": 1e-5, "atol": 1e-6},
    )


def test_attention_to_one_position_returns_its_value() -> None:
    q, k, v = _random(2, 3, 2, 4), _random(2, 5, 2, 4, seed=1), _random(2, 5, 2, 4, seed=2)
    out = attend(q, k, v, np.arange(5)[None, None, None] == 3)
    np.testing.assert_allclose(out, np.broadcast_to(v[:, 3:4], out.shape), rtol=1e-6)


def test_fully_masked_rows_have_finite_gradients() -> None:
    q = _random(1, 2, 1, 4)
    gradient = jax.jit(
        jax.grad(lambda x: dot_product_attention(x, x, x, np.zeros((1, 1, 2, 2), bool)).sum())
    )(q)
    assert np.isfinite(gradient).all()


def test_mask_separates_segments_and_hides_the_future() -> None:
    segments = np.array([[1, 1, 2, 2, 0]])
    mask = attention_mask(segments, segments, causal=True)[0, 0].astype(int)
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("widths", [(None, None), (5, 7), (5, None), (None, 7)])
def test_head_widths_are_independent_of_d_model(widths: tuple[int | None, int | None]) -> None:
    layer = nnx.eval_shape(
        lambda: MultiHeadAttention(12, 3, d_k=widths[0], d_v=widths[1], rngs=nnx.Rngs(0))
    )
    x = _random(2, 4, 12)
    out = nnx.eval_shape(lambda layer: layer(x, x, np.ones((1, 1, 4, 4), bool)), layer)
    assert out.shape == (2, 4, 12)
    assert layer.query.kernel.shape == (12, 3, widths[0] or 4)
    assert layer.value.kernel.shape == (12, 3, widths[1] or 4)


def test_projections_are_xavier_uniform() -> None:
    kernel = MultiHeadAttention(64, 4, rngs=nnx.Rngs(0)).query.kernel[...]
    limit = np.sqrt(6 / (64 + 64))
    kernel = np.asarray(kernel)
    assert np.abs(kernel).max() <= limit
    assert float(kernel.std()) == pytest.approx(limit / np.sqrt(3), rel=0.05)


@pytest.mark.parametrize(
    "sizes, settings, message",
    [
        ((10, 4), {}, "d_model is 10; expected a multiple of num_heads = 4, or explicit"),
        ((512, 0), {}, "num_heads is 0; expected a number from 1 to 65,536"),
        ((0, 4), {}, "d_model is 0; expected a number from 1 to 65,536"),
        ((8, 4), {"d_k": -2}, "d_k is -2; expected a positive number"),
        ((8, 4), {"dropout": 1.0}, "dropout is 1.0; expected a value in [0, 1)."),
    ],
)
def test_invalid_modules(sizes: tuple[int, int], settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        MultiHeadAttention(*sizes, rngs=nnx.Rngs(0), **settings)


def test_without_a_mask_every_position_is_visible() -> None:
    q, k, v = _random(2, 3, 2, 4), _random(2, 5, 2, 4, seed=1), _random(2, 5, 2, 4, seed=2)
    everything = np.ones((1, 1, 3, 5), bool)
    np.testing.assert_array_equal(attend(q, k, v), attend(q, k, v, everything))
    layer = MultiHeadAttention(12, 3, rngs=nnx.Rngs(0))
    x = _random(2, 4, 12)
    compute = jax.jit(layer)
    np.testing.assert_array_equal(compute(x), compute(x, x, np.ones((1, 1, 4, 4), bool)))


@pytest.mark.parametrize("dtype, axes", [("float32", 4), ("int32", 4), ("bool", 3)])
def test_masks_must_be_bool_with_four_axes(dtype: str, axes: int) -> None:
    """As a bool, an additive mask (0 and -1e9) would mean the opposite. A mask [B, T, S] would
    broadcast over heads where B = H.
    """
    q = _random(2, 2, 2, 4)
    with pytest.raises(UserError, match=f"mask is {dtype} with {axes} axes; expected bool"):
        dot_product_attention(q, q, q, np.zeros((2,) * axes, dtype))


def with_weights(layer: MultiHeadAttention, *arrays: jax.Array, **options: Any) -> Any:
    """The layer's output and attention weights."""
    graph, parameters = nnx.split(layer)

    @jax.jit
    def run(parameters: nnx.State, arrays: Any, options: Any) -> Any:
        layer = nnx.merge(graph, parameters)
        layer.sow_weights = True
        out, sown = nnx.capture(layer, nnx.Intermediate)(*arrays, **options)
        [weights] = sown["weights"]
        return out, weights

    return jax.device_get(run(parameters, arrays, options))


def test_multi_head_attention_returns_its_weights() -> None:
    layer = MultiHeadAttention(12, 3, dropout=0.5, rngs=nnx.Rngs(0))
    x, memory = _random(2, 4, 12), _random(2, 5, 12, seed=1)
    mask = np.ones((2, 1, 4, 5), bool)
    mask[1, :, :, 2:] = False
    out, weights = with_weights(layer, x, memory, mask)
    np.testing.assert_array_equal(out, jax.jit(layer)(x, memory, mask))

    @jax.jit
    def by_hand(x: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jnp.einsum("BTHK,BSHK->BHTS", layer.query(x), layer.key(memory)) / 2
        weights = jax.nn.softmax(scores, where=mask)
        mean = jnp.einsum("BHTS,BSHK->BTHK", weights, layer.value(memory))
        return weights, layer.output(mean)

    expected, expected_out = by_hand(x, memory)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    np.testing.assert_allclose(expected_out, out, rtol=1e-5, atol=1e-6)
    assert weights.shape == (2, 3, 4, 5) and (weights[1, :, :, 2:] == 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    dropped, again = with_weights(layer, x, memory, mask, dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(again, weights)  # those before dropout
    assert not np.allclose(dropped, out)


def test_attention_weights_are_float32_for_any_dtype() -> None:
    layer = MultiHeadAttention(12, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = _random(1, 4, 12)
    out, weights = with_weights(layer, x)
    mixed = jax.default_backend() == "cpu"
    assert (out.dtype, weights.dtype) == (jnp.float32 if mixed else jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
