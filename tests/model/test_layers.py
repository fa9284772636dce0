"""Layers: activations, embeddings."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import against_reference

from transformer_jax.model.layers import Embedding, FeedForward, relu
from transformer_jax.model.positions import sinusoidal_positions
from transformer_jax.settings.config import ModelConfig


def test_relu_equals_jax_relu_with_gradient_0_at_0() -> None:
    x = jnp.array([-2.0, -0.0, 0.0, 1e-30, 3.0, jnp.inf])
    for function in (relu, jax.jit(relu)):
        np.testing.assert_array_equal(function(x), jax.nn.relu(x))
        gradient = jax.vmap(jax.grad(function))(x)
        np.testing.assert_array_equal(gradient, [0, 0, 0, 1, 1, 1])
    _, tangent = jax.jvp(relu, (x,), (jnp.full_like(x, 5.0),))
    np.testing.assert_array_equal(tangent, [0, 0, 0, 5, 5, 5])


@pytest.mark.parametrize("positions", ["interleaved", "learned"])
def test_embeddings_are_scaled_and_sinusoids_are_not(
    positions: Literal["interleaved", "learned"],
) -> None:
    config = ModelConfig(d_model=16, num_heads=1, positions=positions, dtype="float32")
    embedding = Embedding(9, config, rngs=nnx.Rngs(0))
    tokens, at = np.array([[7, 4, 8]]), np.array([[0, 5, 2]])
    learned = embedding.position_matrix
    added = sinusoidal_positions(6, 16) if learned is None else 4 * learned[...]
    expected = 4 * embedding.matrix[...][tokens] + added[at]
    np.testing.assert_allclose(embedding(tokens, at, num_positions=6), expected, rtol=1e-6)


def test_swiglu_equals_its_formula() -> None:
    config = ModelConfig(d_model=8, d_ff=6, activation="swiglu", feed_forward_bias=False)
    layer = FeedForward(dataclasses.replace(config, dtype="float32"), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 3, 8))
    gate, inner, output = (
        part.kernel[...] for part in (layer.gate, layer.inner, layer.output) if part is not None
    )
    against_reference(
        layer,
        lambda x: (jax.nn.silu(x @ gate) * (x @ inner)) @ output,
        [x],
        {"rtol": 1e-5, "atol": 1e-6},
    )


def test_gelu_is_exact_and_gelu_tanh_approximates_it() -> None:
    x = jnp.linspace(-4, 4, 12)[None, :, None]

    def out(activation: Literal["gelu", "gelu_tanh"]) -> np.ndarray:
        config = ModelConfig(d_model=1, d_ff=1, num_heads=1, d_k=1, d_v=1, positions="learned")
        config = dataclasses.replace(config, activation=activation, dtype="float32")
        layer = FeedForward(config, rngs=nnx.Rngs(0))
        layer.inner.kernel[...] = layer.output.kernel[...] = jnp.ones((1, 1))
        return np.asarray(nnx.jit(FeedForward.__call__)(layer, x)).ravel()

    exact = [v * (1 + math.erf(v / 2**0.5)) / 2 for v in np.linspace(-4, 4, 12)]
    np.testing.assert_allclose(out("gelu"), exact, atol=1e-6)
    assert 1e-5 < np.abs(out("gelu_tanh") - exact).max() < 1e-3
