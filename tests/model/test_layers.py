"""Layers: matmul precision and activations."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import against_reference
from runs import ONE

from transformer_jax.config import Config, DataConfig, ModelConfig, PairsConfig
from transformer_jax.config_io import to_json
from transformer_jax.decoding.__main__ import main as decode
from transformer_jax.errors import UserError
from transformer_jax.model.layers import FeedForward, relu, use_matmul_precision
from transformer_jax.training.loop import train


@pytest.fixture
def restored_matmul_precision() -> Iterator[None]:
    before = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_default_matmul_precision", before)


def test_highest_matmul_precision_is_exact(restored_matmul_precision: None) -> None:
    """On GPUs the default is TF32, whose error is far larger."""
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    jax.config.update("jax_default_matmul_precision", "high")
    use_matmul_precision("default")
    assert jax.config.jax_default_matmul_precision == "high"  # unchanged
    use_matmul_precision("highest")
    np.testing.assert_allclose(jnp.asarray(x) @ x, x.astype(np.float64) @ x, atol=1e-4)


def test_training_and_decoding_set_the_precision(
    restored_matmul_precision: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both then fail, because text and a checkpoint are missing."""
    missing = DataConfig(train=PairsConfig("text", source=("missing",), target=("missing",)))
    config = Config(model=ModelConfig(matmul_precision="highest"), data=missing)
    (tmp_path / "lines").write_text("one")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(to_json(config))
    flags = ["--workdir", str(tmp_path / "run"), "--input", str(tmp_path / "lines")]
    for run in (lambda: train(config, tmp_path / "new", devices=ONE), lambda: decode(flags)):
        jax.config.update("jax_default_matmul_precision", "high")
        with suppress(UserError):
            assert run() == 2
        assert jax.config.jax_default_matmul_precision == "highest"


def test_relu_equals_jax_relu_with_gradient_0_at_0() -> None:
    x = jnp.array([-2.0, -0.0, 0.0, 1e-30, 3.0, jnp.inf])
    for function in (relu, jax.jit(relu)):
        np.testing.assert_array_equal(function(x), jax.nn.relu(x))
        gradient = jax.vmap(jax.grad(function))(x)
        np.testing.assert_array_equal(gradient, [0, 0, 0, 1, 1, 1])
    _, tangent = jax.jvp(relu, (x,), (jnp.full_like(x, 5.0),))
    np.testing.assert_array_equal(tangent, [0, 0, 0, 5, 5, 5])


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
