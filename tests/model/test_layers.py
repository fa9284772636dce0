"""Positions, norms and layers by themselves."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from runs import ONE, no_evaluation, tiny

from transformer_jax.config import ModelConfig
from transformer_jax.decoding.__main__ import main as decode
from transformer_jax.model.layers import (
    LayerNorm,
    relu,
    segment_positions,
    sinusoidal_positions,
    use_matmul_precision,
)
from transformer_jax.training.loop import train


@pytest.fixture
def restored_matmul_precision() -> Iterator[None]:
    before = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_default_matmul_precision", before)


def test_sinusoids() -> None:
    table = sinusoidal_positions(50, 8)
    np.testing.assert_allclose(table[7, 0], np.sin(7), rtol=1e-6)
    np.testing.assert_allclose(table[7, 5], np.cos(7 / 10000 ** (4 / 8)), rtol=1e-6)
    # PE(pos + k) is a linear function of PE(pos) (section 3.5): rotations by a fixed angle.
    k, frequency = 3, 10000 ** (-2 / 8)
    rotation = np.array(
        [
            [np.cos(k * frequency), np.sin(k * frequency)],
            [-np.sin(k * frequency), np.cos(k * frequency)],
        ]
    )
    np.testing.assert_allclose(table[k:, 2:4], table[:-k, 2:4] @ rotation.T, atol=1e-5)
    split = sinusoidal_positions(50, 8, layout="split")
    np.testing.assert_allclose(split[7, [0, 3, 4]], [np.sin(7), np.sin(7e-4), np.cos(7)], rtol=1e-5)


def test_segment_positions() -> None:
    np.testing.assert_array_equal(
        segment_positions(jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3]])),
        [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 0, 1, 2]],
    )


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_layer_norm_is_its_formula(epsilon: float) -> None:
    """Epsilon stands under the root, which shows where the variance is as small."""
    x = np.asarray(0.5 * jax.random.normal(jax.random.key(0), (2, 3, 8)))
    norm = LayerNorm(8, epsilon=epsilon)
    norm.scale[...], norm.bias[...] = jnp.arange(1.0, 9.0), jnp.arange(8.0)
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
    np.testing.assert_allclose(
        norm(x), normal * np.arange(1, 9) + np.arange(8), rtol=1e-5, atol=1e-5
    )
    low = norm(jnp.asarray(x, jnp.bfloat16))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), norm(x), rtol=0.02, atol=0.1)


def test_float32_products_are_exact_where_that_is_asked_for(
    restored_matmul_precision: None,
) -> None:
    """On a GPU the default is TF32, which misses this by far."""
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    jax.config.update("jax_default_matmul_precision", "high")
    use_matmul_precision(ModelConfig())
    assert jax.config.jax_default_matmul_precision == "high"  # as it was
    use_matmul_precision(ModelConfig(matmul_precision="highest"))
    np.testing.assert_allclose(jnp.asarray(x) @ x, x.astype(np.float64) @ x, atol=1e-4)


def test_training_and_decoding_set_the_precision(
    restored_matmul_precision: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, lines = no_evaluation(tiny(steps=1)), tmp_path / "lines"
    lines.write_text("")
    model = dataclasses.replace(config.model, matmul_precision="highest")
    for run in (
        lambda: train(dataclasses.replace(config, model=model), tmp_path / "run", devices=ONE),
        lambda: decode(["--workdir", str(tmp_path / "run"), "--input", str(lines)]),
    ):
        jax.config.update("jax_default_matmul_precision", "high")
        run()
        assert jax.config.jax_default_matmul_precision == "highest"


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
    check_grads(ours, (x, scale, bias), order=2, modes=("fwd", "rev"), atol=0.02, rtol=0.02)


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


def test_relu_is_jax_relu_with_gradient_0_at_0() -> None:
    x = jnp.array([-2.0, -0.0, 0.0, 1e-30, 3.0, jnp.inf])
    for function in (relu, jax.jit(relu)):
        np.testing.assert_array_equal(function(x), jax.nn.relu(x))
        gradient = jax.vmap(jax.grad(function))(x)
        np.testing.assert_array_equal(gradient, [0, 0, 0, 1, 1, 1])
    _, tangent = jax.jvp(relu, (x,), (jnp.full_like(x, 5.0),))
    np.testing.assert_array_equal(tangent, [0, 0, 0, 5, 5, 5])
