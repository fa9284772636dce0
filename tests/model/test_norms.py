"""Norms by themselves: formulas and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from reference import against_reference

from transformer_jax.model.norms import LayerNorm, RMSNorm


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_layer_norm_is_its_formula(epsilon: float) -> None:
    """Epsilon stands under the root, which shows where the variance is as small."""
    x = np.asarray(0.5 * jax.random.normal(jax.random.key(0), (2, 3, 8)))
    norm = LayerNorm(8, epsilon=epsilon)
    norm.scale[...], norm.bias[...] = jnp.arange(1.0, 9.0), jnp.arange(8.0)
    against_reference(
        norm,
        lambda x: _plain_norm(x, jnp.arange(1.0, 9.0), jnp.arange(8.0), epsilon),
        [x],
        {"rtol": 1e-5, "atol": 1e-5},
    )
    low = norm(jnp.asarray(x, jnp.bfloat16))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), norm(x), rtol=0.02, atol=0.1)


def _plain_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """The formula, to be differentiated by JAX."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    shape = (1,) * (x.ndim - 1) + (-1,)
    normal = (x - mean) / jnp.sqrt(variance + epsilon)
    return normal * scale.reshape(shape) + bias.reshape(shape)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (2, 1, 3, 16)], ids=str)
def test_gradient_of_layer_norm_is_that_of_its_formula(shape: tuple[int, ...], remat: bool) -> None:
    """Against the formula in float64, for mean and scale unlike 0 and 1."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = 3.0 * jax.random.normal(keys[0], shape) + 2.0
    scale, bias = 1.0 + jax.random.normal(keys[1], (16,)), jax.random.normal(keys[2], (16,))
    weights = jax.random.normal(keys[3], shape)
    norm = LayerNorm(16, epsilon=1e-3)
    graph, _ = nnx.split(norm)

    def ours(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        norm = nnx.merge(graph, nnx.State({"scale": nnx.Param(scale), "bias": nnx.Param(bias)}))
        return (norm(x) * weights).sum()

    run = jax.checkpoint(ours) if remat else ours
    gradients = jax.jit(jax.grad(run, argnums=(0, 1, 2)))(x, scale, bias)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(each), jnp.float64) for each in (x, scale, bias)]
        expected = jax.grad(
            lambda *inputs: (_plain_norm(*inputs, 1e-3) * np.asarray(weights, np.float64)).sum(),
            argnums=(0, 1, 2),
        )(*wide)
    for gradient, exact in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, exact, rtol=2e-5, atol=2e-5)
    if not remat:
        inputs = x, scale, bias
        check_grads(jax.jit(ours), inputs, order=2, modes=("fwd", "rev"), atol=0.02, rtol=0.02)


def test_layer_norm_in_bfloat16_has_gradients_of_float32() -> None:
    """They are rounded once, at the end."""
    x = jax.random.normal(jax.random.key(0), (4, 64), jnp.bfloat16)
    norm = LayerNorm(64)
    weights = jax.random.normal(jax.random.key(1), (4, 64), jnp.bfloat16).astype(jnp.float32)

    def loss(x: jax.Array) -> jax.Array:
        return (norm(x).astype(jnp.float32) * weights).sum()

    low, exact = jax.grad(loss)(x), jax.grad(loss)(x.astype(jnp.float32))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), exact, rtol=2**-8, atol=1e-6)


def test_rms_norm_is_its_formula() -> None:
    x = 3 * np.asarray(jax.random.normal(jax.random.key(0), (2, 3, 8))) + 1
    norm = RMSNorm(8, epsilon=0.5)
    norm.scale[...] = jnp.arange(1.0, 9.0)
    scale = np.arange(1.0, 9.0, dtype=np.float32).reshape(1, 1, 8)
    against_reference(
        norm,
        lambda x: x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 0.5) * scale,
        [x],
        {"rtol": 1e-5},
        of_gradients={"rtol": 1e-5, "atol": 1e-5},
    )
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_layer_norm_without_bias() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    norm = LayerNorm(8, use_bias=False)
    assert [path for path, _ in nnx.to_flat_state(nnx.state(norm, nnx.Param))] == [("scale",)]
    np.testing.assert_array_equal(norm(x), LayerNorm(8)(x))
