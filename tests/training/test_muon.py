"""Muon: its equations, its matrices on any mesh, resuming."""

from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from runs import ONE, changed, final_state, no_evaluation, tiny

from transformer_jax.data.batching import Batch
from transformer_jax.devices.sharding import make_mesh
from transformer_jax.settings.config import Config, MeshConfig, ModelConfig, OptimizerConfig
from transformer_jax.training.loop import train
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.step import make_step_functions

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


@pytest.mark.devices(8)
def test_losses_on_a_mesh_equal_those_on_one_device() -> None:
    model = ModelConfig(
        vocab_size=64,
        d_model=32,
        d_ff=64,
        num_heads=4,
        num_layers=1,
        dtype="float32",
        dropout=0.0,
        attention_bias=True,
    )

    def losses(mesh: MeshConfig, devices: int) -> list[float]:
        config = Config(model=model, optimizer=SETTINGS, mesh=mesh)
        run = make_step_functions(config, make_mesh(mesh, jax.devices()[:devices]))
        state, found = run.init(), []
        for step in range(4):
            sides = np.random.default_rng(step).integers(4, 64, (2, 16, 7)).astype(np.int32)
            state, metrics = run.train_step(state, Batch(*sides))
            found.append(float(metrics.sums.loss / metrics.sums.tokens))
        return found

    expected = losses(MeshConfig(), 1)
    assert expected[-1] < expected[0]
    for mesh in (MeshConfig(2, 2, 2), MeshConfig(fsdp=8)):
        np.testing.assert_allclose(losses(mesh, 8), expected, rtol=1e-4, err_msg=str(mesh))


def test_a_run_resumes_bit_exactly(tmp_path: Path) -> None:
    config = no_evaluation(tiny(steps=4, checkpoint_every=2, average=1))
    config = changed(config, optimizer={"name": "muon"})
    train(config, tmp_path / "whole", devices=ONE)
    train(changed(config, training={"steps": 2}), tmp_path / "resumed", devices=ONE)
    train(config, tmp_path / "resumed", devices=ONE)
    chex.assert_trees_all_equal(
        *(final_state(config, tmp_path / name) for name in ("whole", "resumed"))
    )
