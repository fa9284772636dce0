"""Positions, norms and layers by themselves."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import ONE, no_evaluation, tiny

from transformer_jax.config import ModelConfig
from transformer_jax.decoding.__main__ import main as decode
from transformer_jax.model.layers import (
    LayerNorm,
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
