"""Norms: formulas and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from reference import against_reference

from transformer_jax.model.norms import Norm
from transformer_jax.settings.config import ModelConfig


def norm_of(width: int, **settings: Any) -> Norm:
    return Norm(ModelConfig(d_model=width, **settings))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_layer_norm_equals_its_formula(epsilon: float) -> None:
    """A large epsilon shows that it is added to the variance, inside the square root."""
    x = normal(np.random.default_rng(0), 2, 3, 8) / 2
    scale, bias = np.arange(1, 9, dtype=np.float32), np.arange(8, dtype=np.float32)
    norm = norm_of(8, norm_epsilon=epsilon)
    norm.scale[...], norm.bias[...] = jnp.asarray(scale), jnp.asarray(bias)
    against_reference(
        norm,
        lambda x: _plain_norm(x, scale, bias, epsilon),
        [x],
        {"rtol": 1e-5, "atol": 1e-5},
    )
    low = jax.jit(norm)(jnp.asarray(x, jnp.bfloat16))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(np.float32), jax.jit(norm)(x), rtol=0.02, atol=0.1)


def _plain_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """The formula, which JAX can differentiate."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    shape = (1,) * (x.ndim - 1) + (-1,)
    normal = (x - mean) / jnp.sqrt(variance + epsilon)
    return normal * scale.reshape(shape) + bias.reshape(shape)


@pytest.mark.parametrize(
    ("shape", "remat"),
    [((16,), False), ((2, 3, 16), False), ((2, 3, 16), True), ((2, 1, 3, 16), False)],
    ids=str,
)
def test_gradient_of_layer_norm_equals_the_formulas(shape: tuple[int, ...], remat: bool) -> None:
    """The formula runs in float64. Inputs and scales have means other than 0 and 1."""
    rng = np.random.default_rng(0)
    x, weights = 3 * normal(rng, *shape) + 2, normal(rng, *shape)
    scale, bias = 1 + normal(rng, 16), normal(rng, 16)
    norm = norm_of(16, norm_epsilon=1e-3)
    graph, _ = nnx.split(norm)

    def ours(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        norm = nnx.merge(graph, nnx.State({"scale": nnx.Param(scale), "bias": nnx.Param(bias)}))
        return (norm(x) * weights).sum()

    run = jax.checkpoint(ours) if remat else ours
    gradients = jax.jit(jax.grad(run, argnums=(0, 1, 2)))(x, scale, bias)

    def exact(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        return (_plain_norm(x, scale, bias, 1e-3) * weights.astype(np.float64)).sum()

    with jax.enable_x64(True):
        wide = [each.astype(np.float64) for each in (x, scale, bias)]
        expected = jax.jit(jax.grad(exact, argnums=(0, 1, 2)))(*wide)
        assert all(gradient.dtype == np.float64 for gradient in expected)
    for gradient, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=2e-5, atol=2e-5)


def test_second_derivatives_of_layer_norm_equal_finite_differences() -> None:
    rng = np.random.default_rng(0)
    inputs = 3 * normal(rng, 2, 3, 16) + 2, 1 + normal(rng, 16), normal(rng, 16)
    weights = normal(rng, 2, 3, 16)
    graph, _ = nnx.split(norm_of(16, norm_epsilon=1e-3))

    def ours(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        norm = nnx.merge(graph, nnx.State({"scale": nnx.Param(scale), "bias": nnx.Param(bias)}))
        return (norm(x) * weights).sum()

    check_grads(jax.jit(ours), inputs, order=2, modes=("fwd", "rev"), atol=0.02, rtol=0.02)


def test_layer_norm_gradients_in_bfloat16_are_rounded_once() -> None:
    rng = np.random.default_rng(0)
    x, weights = (normal(rng, 4, 64).astype(jnp.bfloat16) for _ in range(2))
    norm, weights = norm_of(64), weights.astype(np.float32)

    def loss(x: jax.Array) -> jax.Array:
        return (norm(x).astype(jnp.float32) * weights).sum()

    gradient = jax.jit(jax.grad(loss))
    low, exact = gradient(x), gradient(x.astype(np.float32))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(np.float32), exact, rtol=2**-8, atol=1e-6)


def test_rms_norm_equals_its_formula() -> None:
    x = 3 * normal(np.random.default_rng(0), 2, 3, 8) + 1
    norm = norm_of(8, norm_type="rms", norm_epsilon=0.5)
    norm.scale[...] = jnp.arange(1.0, 9.0)
    scale = np.arange(1.0, 9.0, dtype=np.float32).reshape(1, 1, 8)
    against_reference(
        norm,
        lambda x: x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 0.5) * scale,
        [x],
        {"rtol": 1e-5},
        of_gradients={"rtol": 1e-5, "atol": 1e-5},
    )
    assert jax.eval_shape(norm, jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_layer_norm_without_bias() -> None:
    x = normal(np.random.default_rng(0), 2, 3, 8)
    norm = norm_of(8, norm_bias=False)
    assert [path for path, _ in nnx.to_flat_state(nnx.state(norm, nnx.Param))] == [("scale",)]
    np.testing.assert_array_equal(jax.jit(norm)(x), jax.jit(norm_of(8))(x))
