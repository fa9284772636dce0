"""Muon: its equations, its matrices on any mesh. test_adafactor.py tests resuming."""

import dataclasses
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from test_adafactor import losses, step_functions, updates_on

from transformer_jax.settings.config import MeshConfig, OptimizerConfig
from transformer_jax.training.optimizer import make_optimizer

SETTINGS = OptimizerConfig(
    name="muon", warmup_steps=1, peak_learning_rate=0.01, decay="constant", epsilon=1e-9
)
# Parameters, and shapes of the matrices that map a layer's inputs to its outputs. None: Adam.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, int] | None]] = {
    "query.kernel": ((24, 4, 5), (24, 20)),
    "self_attention.output.kernel": ((4, 5, 26), (20, 26)),
    "inner.kernel": ((26, 48), (26, 48)),
    "feed_forward.output.kernel": ((48, 26), (48, 26)),
    "target_embedding.matrix": ((40, 24), None),
    "query.bias": ((4, 5), None),
    "inner.bias": ((48,), None),
    "norm.scale": ((24,), None),
}


def orthogonalized(x: np.ndarray) -> np.ndarray:
    """Five Newton-Schulz iterations with the coefficients of Jordan et al. (2024), in float64."""
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def in_numpy(parameter: np.ndarray, gradients: list[np.ndarray], matrix: Any) -> np.ndarray:
    """Muon with Nesterov momentum 0.95, its updates scaled to the RMS 0.2."""
    x, momentum = parameter.astype(np.float64).reshape(matrix), np.zeros(matrix)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.astype(np.float64).reshape(matrix)
        momentum = 0.95 * momentum + 0.05 * g
        ahead = 0.95 * momentum / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
        x = x - 0.01 * 0.2 * np.sqrt(max(matrix)) * orthogonalized(ahead)
    return x.reshape(parameter.shape)


def test_four_steps_follow_the_equations() -> None:
    rng = np.random.default_rng(0)
    shapes = {name: shape for name, (shape, _) in SHAPES.items()}
    parameters, *gradients = (
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(5)
    )
    adam = optax.adam(0.01, 0.9, 0.98, 1e-9, nesterov=True)
    found, expected = parameters, {}
    for name, (_, matrix) in SHAPES.items():
        if matrix:
            each = [gradient[name] for gradient in gradients]
            expected[name] = in_numpy(parameters[name], each, matrix)
    others = {name: parameters[name] for name in SHAPES if name not in expected}
    optimizer = make_optimizer(SETTINGS, 16)
    state, of_adam = optimizer.init(parameters), adam.init(others)
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, found)
        found = optax.apply_updates(found, updates)
        updates, of_adam = adam.update({name: gradient[name] for name in others}, of_adam)
        others = optax.apply_updates(others, updates)
    for name, want in (expected | others).items():
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-5, err_msg=name)
        if name in expected:
            rms = np.sqrt(np.mean((want - parameters[name]) ** 2))
            assert 0.5 < rms / (0.01 * 0.2 * 2) < 2


# A small model that Muon trains.
SMALL = {
    "model": {"vocab_size": 256, "d_model": 32, "d_ff": 64, "num_heads": 4, "dropout": 0.0},
    "optimizer": {
        field.name: getattr(SETTINGS, field.name) for field in dataclasses.fields(SETTINGS)
    },
}


@pytest.mark.devices(8)
def test_updates_on_a_mesh_equal_those_on_one_device() -> None:
    expected = updates_on(MeshConfig(), 1, **SMALL)
    found = updates_on(MeshConfig(2, 2, 2), 8, **SMALL)
    chex.assert_trees_all_close(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.devices(8)
@pytest.mark.parametrize("mesh", [MeshConfig(2, 2, 2), MeshConfig(fsdp=8)], ids=str)
def test_losses_on_a_mesh_equal_those_on_one_device(mesh: MeshConfig) -> None:
    expected = losses(step_functions(MeshConfig(), 1, **SMALL))
    assert expected[-1] < expected[0]
    found = losses(step_functions(mesh, 8, **SMALL))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
