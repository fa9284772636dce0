"""Fused dropout, residual and norm kernels against plain layers: results, gradients, masks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh
from reference import against_reference, with_gradients

from benchmarks.hlo import collectives
from transformer_jax.devices.sharding import batch_sharding, make_mesh, replicated
from transformer_jax.model import norm_kernel
from transformer_jax.model.dropout import keep_mask
from transformer_jax.model.norm_kernel import residual_norm
from transformer_jax.model.norms import Residual
from transformer_jax.settings.config import MeshConfig, ModelConfig

CONFIG = ModelConfig(d_model=128, dropout=0.1)
KEY = jax.random.key(7)


def _inputs(rows: int, length: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    """x, y, scale, bias and the cotangent."""
    keys = jax.random.split(jax.random.key(rows), 5)
    shape, D = (rows, length, CONFIG.d_model), CONFIG.d_model
    x, y, cotangent = (3 * jax.random.normal(key, shape, dtype) for key in keys[:3])
    scale, bias = (jax.random.normal(key, (D,)) for key in keys[3:5])
    return [x, y, 1 + scale, bias, cotangent]


def _plain(x: Any, y: Any, scale: Any, bias: Any) -> jax.Array:
    residual = Residual(CONFIG)
    residual.norm.scale, residual.norm.bias = nnx.Param(scale), nnx.Param(bias)
    return residual(x, lambda _, **__: y, dropout_key=KEY)


def _kernel(x: Any, y: Any, scale: Any, bias: Any) -> jax.Array:
    settings = {"rate": CONFIG.dropout, "epsilon": CONFIG.norm_epsilon}
    return residual_norm(x, y, KEY, scale, bias, **settings, interpret=True)


def _with_gradients(
    function: Callable[..., jax.Array], inputs: list[jax.Array]
) -> list[np.ndarray]:
    *arrays, cotangent = inputs
    return with_gradients(function, arrays, cotangent)


@pytest.mark.parametrize("rows, length", [(4, 32), (1, 1), (5, 13)])
def test_kernels_equal_dropout_residual_and_norm(rows: int, length: int) -> None:
    *arrays, cotangent = _inputs(rows, length)
    tolerance = {"rtol": 1e-4, "atol": 2e-5}
    against_reference(_kernel, _plain, arrays, tolerance, cotangent=cotangent)


def test_the_mask_equals_that_of_plain_dropout() -> None:
    """The gradient of y is 0 exactly where an element is dropped."""
    rate = 0.5
    x, y, scale, bias, cotangent = _inputs(5, 13)

    def run(y: jax.Array) -> jax.Array:
        return residual_norm(x, y, KEY, scale, bias, rate=rate, epsilon=1e-6, interpret=True)

    gradient = _with_gradients(run, [y, cotangent])[1]
    np.testing.assert_array_equal(gradient != 0, keep_mask(y.shape, rate, KEY))


def test_bfloat16_is_as_exact_as_the_plain_layers() -> None:
    inputs = _inputs(4, 32, jnp.bfloat16)
    exact = _with_gradients(_kernel, [x.astype(jnp.float32) for x in inputs])
    ours, plain = (_with_gradients(f, inputs) for f in (_kernel, _plain))
    for x, other, expected in zip(ours, plain, exact, strict=True):
        assert np.linalg.norm(x - expected) <= 1.05 * np.linalg.norm(other - expected)


@pytest.mark.devices(8)
def test_devices_share_rows_and_sum_the_gradients_of_the_norm() -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    inputs = _inputs(8, 13)
    alone = _with_gradients(_kernel, inputs)

    def run(*inputs: jax.Array) -> Any:
        *arrays, cotangent = inputs
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            out, gradient = jax.vjp(_kernel, *arrays)
        return out, *gradient(cotangent)

    rows, everywhere = batch_sharding(mesh), replicated(mesh)
    shardings = rows, rows, everywhere, everywhere, rows
    outs = rows, rows, rows, everywhere, everywhere
    step = jax.jit(run, in_shardings=shardings, out_shardings=outs)
    compiled = step.lower(*inputs).compile()
    crossing = collectives(compiled.as_text())
    assert sum(row["mb"] for row in crossing.values()) <= 2 * 4 * CONFIG.d_model / 1e6
    together = compiled(*jax.device_put(tuple(inputs), shardings))
    for x, y in zip(together, alone, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def _lowered(inputs: list[jax.Array], platform: str) -> str:
    """Lower a program for an absent GPU."""

    def run(*inputs: jax.Array) -> Any:
        x, y, *of_norm, cotangent = inputs
        out, gradient = jax.vjp(lambda x, y: _plain(x, y, *of_norm), x, y)
        return out, gradient(cotangent)

    gpu = AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        return jax.jit(run).trace(*inputs).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.usefixtures("on_a_gpu")
def test_kernels_are_selected_in_training_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(2, 32, jnp.bfloat16)
    assert _lowered(inputs, "cuda").count("gpu.triton") == 2
    assert _lowered(inputs, "cpu").count("gpu.triton") == 0
    assert _lowered([x[:, :13] if x.ndim == 3 else x for x in inputs], "cuda").count("triton") == 2
    x = inputs[0]
    assert norm_kernel.supports(x)
    assert not norm_kernel.supports(x.astype(jnp.float32))
    assert not norm_kernel.supports(jax.ShapeDtypeStruct((2, 32, 192), x.dtype))
    without_dropout = jax.make_jaxpr(lambda x, y: Residual(CONFIG)(x, lambda _, **__: y))(x, x)
    assert "pallas" not in str(without_dropout)
    for sizes, splits in (((2, 1, 2), True), ((2, 2, 1), False)):
        with jax.sharding.use_abstract_mesh(AbstractMesh(sizes, ("data", "fsdp", "tensor"))):
            assert norm_kernel.supports(x) is splits
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not norm_kernel.supports(x)


@pytest.mark.usefixtures("on_a_gpu")
def test_cpu_computations_on_a_gpu_machine_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(2, 8, jnp.bfloat16)
    chosen = _with_gradients(jax.jit(_plain), inputs)
    monkeypatch.undo()
    for x, expected in zip(chosen, _with_gradients(jax.jit(_plain), inputs), strict=True):
        np.testing.assert_array_equal(x, expected)
