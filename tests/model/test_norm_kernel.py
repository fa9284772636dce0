"""Fused dropout, residual and norm kernels against plain layers: results and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh
from reference import against_reference, with_gradients

from transformer_jax.config import ModelConfig
from transformer_jax.model import norm_kernel
from transformer_jax.model.dropout import scale_up
from transformer_jax.model.norm_kernel import residual_norm
from transformer_jax.model.norms import Residual

CONFIG = ModelConfig(d_model=128, dropout=0.1)


def _inputs(rows: int, length: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    """x, y, what dropout keeps, scale, bias; and what the result is multiplied with."""
    keys = jax.random.split(jax.random.key(rows), 6)
    shape, D = (rows, length, CONFIG.d_model), CONFIG.d_model
    x, y, cotangent = (3 * jax.random.normal(key, shape, dtype) for key in keys[:3])
    scale, bias = (jax.random.normal(key, (D,)) for key in keys[3:5])
    return [x, y, jax.random.bernoulli(keys[5], 0.9, shape), 1 + scale, bias, cotangent]


def _plain(x: Any, y: Any, keep: Any, scale: Any, bias: Any) -> jax.Array:
    residual = Residual(CONFIG)
    residual.norm.scale, residual.norm.bias = nnx.Param(scale), nnx.Param(bias)
    return residual(x, lambda _: y, dropout_key=keep)


def _kernel(*arrays: jax.Array) -> jax.Array:
    settings = {"factor": scale_up(CONFIG.dropout), "epsilon": CONFIG.norm_epsilon}
    return residual_norm(*arrays, **settings, interpret=True)


def _with_gradients(
    function: Callable[..., jax.Array], inputs: list[jax.Array]
) -> list[np.ndarray]:
    x, y, keep, scale, bias, cotangent = inputs
    return with_gradients(_keeping(function, keep), (x, y, scale, bias), cotangent)


def _keeping(function: Callable[..., jax.Array], keep: jax.Array) -> Callable[..., jax.Array]:
    return lambda x, y, *of_norm: function(x, y, keep, *of_norm)


@pytest.mark.parametrize("rows, length", [(4, 32), (1, 1), (5, 13)])
def test_the_kernels_are_dropout_residual_and_norm(rows: int, length: int) -> None:
    x, y, keep, scale, bias, cotangent = _inputs(rows, length)
    against_reference(
        _keeping(_kernel, keep),
        _keeping(_plain, keep),
        (x, y, scale, bias),
        {"rtol": 1e-4, "atol": 2e-5},
        cotangent=cotangent,
    )


def test_bfloat16_is_as_exact_as_the_plain_layers() -> None:
    inputs = _inputs(4, 32, jnp.bfloat16)
    exact = _with_gradients(
        _kernel, [x if x.dtype == bool else x.astype(jnp.float32) for x in inputs]
    )
    ours, plain = (_with_gradients(f, inputs) for f in (_kernel, _plain))
    for x, other, expected in zip(ours, plain, exact, strict=True):
        assert np.linalg.norm(x - expected) <= 1.05 * np.linalg.norm(other - expected)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def _lowered(inputs: list[jax.Array], platform: str) -> str:
    """A program for a GPU that is not here."""

    def run(*inputs: jax.Array) -> Any:
        x, y, keep, *of_norm, cotangent = inputs
        out, gradient = jax.vjp(lambda x, y: _plain(x, y, keep, *of_norm), x, y)
        return out, gradient(cotangent)

    gpu = AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        return jax.jit(run).trace(*inputs).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.usefixtures("on_a_gpu")
def test_they_are_chosen_in_training_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(2, 32, jnp.bfloat16)
    assert _lowered(inputs, "cuda").count("gpu.triton") == 2
    assert _lowered(inputs, "cpu").count("gpu.triton") == 0
    assert _lowered([x[:, :13] if x.ndim == 3 else x for x in inputs], "cuda").count("triton") == 2
    x = inputs[0]
    assert norm_kernel.takes(x)
    assert not norm_kernel.takes(x.astype(jnp.float32))
    assert not norm_kernel.takes(jax.ShapeDtypeStruct((2, 32, 192), x.dtype))
    without_dropout = jax.make_jaxpr(lambda x, y: Residual(CONFIG)(x, lambda _: y))(x, x)
    assert "pallas" not in str(without_dropout)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not norm_kernel.takes(x)


@pytest.mark.usefixtures("on_a_gpu")
def test_where_a_gpu_computes_on_its_cpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(2, 8, jnp.bfloat16)
    chosen = _with_gradients(jax.jit(_plain), inputs)
    monkeypatch.undo()
    for x, expected in zip(chosen, _with_gradients(jax.jit(_plain), inputs), strict=True):
        np.testing.assert_array_equal(x, expected)
