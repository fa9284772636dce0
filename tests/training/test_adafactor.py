"""Adafactor: its equations, its small state on any mesh, resuming."""

from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from runs import ONE, changed, final_state, no_evaluation, tiny

from transformer_jax.data.batching import Batch
from transformer_jax.devices.sharding import make_mesh
from transformer_jax.errors import UserError
from transformer_jax.settings.config import Config, MeshConfig, ModelConfig, OptimizerConfig
from transformer_jax.training.loop import train
from transformer_jax.training.optimizer import learning_rate_schedule, make_optimizer
from transformer_jax.training.step import StepFunctions, make_step_functions

# Shapes of parameters, and of the matrices that Adafactor factors: with two axes of 128 or more.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, int] | None]] = {
    "query.kernel": ((128, 4, 40), (128, 160)),
    "query.bias": ((4, 40), None),
    "self_attention.output.kernel": ((4, 40, 130), (160, 130)),
    "inner.kernel": ((130, 128), (130, 128)),
    "narrow.kernel": ((200, 127), None),
    "inner.bias": ((300,), None),
}
SETTINGS = OptimizerConfig(
    name="adafactor", warmup_steps=2, peak_learning_rate=0.01, decay="constant"
)


def in_numpy(
    parameter: np.ndarray, gradients: list[np.ndarray], matrix: tuple[int, int] | None
) -> np.ndarray:
    """Algorithm 4 of Shazeer & Stern (2018) with relative step sizes, in float64."""
    x, rows, columns, unfactored = parameter.astype(np.float64), 0.0, 0.0, 0.0
    for t, gradient in enumerate(gradients, start=1):
        decay = 1 - t**-0.8
        squares = gradient.astype(np.float64) ** 2 + 1e-30
        if matrix:
            squares = squares.reshape(matrix)
            rows = decay * rows + (1 - decay) * squares.sum(axis=1)
            columns = decay * columns + (1 - decay) * squares.sum(axis=0)
            second = (np.outer(rows, columns) / np.sum(rows)).reshape(x.shape)
        else:
            second = unfactored = decay * unfactored + (1 - decay) * squares
        update = gradient / np.sqrt(second)
        update /= max(1.0, np.sqrt(np.mean(update**2)))
        rate = float(learning_rate_schedule(SETTINGS, 16)(t - 1))
        x = x - rate * max(1e-3, np.sqrt(np.mean(x**2))) * update
    return x


def drawn(steps: int) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Random parameters, and gradients for each step with rows of different sizes."""
    rng = np.random.default_rng(0)
    shapes = {name: shape for name, (shape, _) in SHAPES.items()}

    def normal(shape: tuple[int, ...]) -> np.ndarray:
        sizes = np.exp(rng.normal(size=(shape[0], *[1] * (len(shape) - 1))))
        return (rng.normal(size=shape) * sizes).astype(np.float32)

    parameters = {name: normal(shape) for name, shape in shapes.items()}
    parameters["inner.bias"][:] = 0  # its RMS counts as 1e-3
    return parameters, [
        {name: normal(shape) for name, shape in shapes.items()} for _ in range(steps)
    ]


def updated(parameters: Any, gradients: list[Any]) -> Any:
    """The parameters after these updates."""
    optimizer = make_optimizer(SETTINGS, 16)
    state = optimizer.init(parameters)
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, parameters)
        parameters = jax.tree.map(np.add, parameters, updates)
    return parameters


def test_four_steps_follow_the_papers_equations() -> None:
    parameters, gradients = drawn(4)
    found = updated(parameters, gradients)
    for name, (_, matrix) in SHAPES.items():
        expected = in_numpy(parameters[name], [each[name] for each in gradients], matrix)
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-7, err_msg=name)


def test_updates_equal_those_of_transformers() -> None:
    """transformers factors every matrix, and does not know heads."""
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("transformers.optimization")
    if not hasattr(optimization, "Adafactor"):
        pytest.skip("this version of transformers has no Adafactor")
    parameters, gradients = drawn(4)
    names = [name for name, (shape, matrix) in SHAPES.items() if matrix or len(shape) == 1]
    theirs = {
        name: torch.nn.Parameter(
            torch.tensor(parameters[name].reshape(SHAPES[name][1] or -1), dtype=torch.float32)
        )
        for name in names
    }
    optimizer = optimization.Adafactor(
        theirs.values(), lr=1.0, relative_step=False, scale_parameter=True
    )
    for count, gradient in enumerate(gradients):
        optimizer.param_groups[0]["lr"] = float(learning_rate_schedule(SETTINGS, 16)(count))
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(gradient[name].reshape(tuple(parameter.shape)))
        optimizer.step()
    found = updated(parameters, gradients)
    for name, parameter in theirs.items():
        expected = parameter.detach().numpy().reshape(found[name].shape)
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-7, err_msg=name)


CONFIG = Config(
    model=ModelConfig(
        vocab_size=256,
        d_model=128,
        d_ff=256,
        num_heads=8,
        num_layers=1,
        dropout=0.0,
        dtype="float32",
        attention_bias=True,
    ),
    optimizer=OptimizerConfig(
        name="adafactor", warmup_steps=4, peak_learning_rate=0.02, weight_decay=0.01, clip_norm=0.5
    ),
)


def step_functions(mesh: MeshConfig, devices: int, **settings: Any) -> StepFunctions:
    config = changed(CONFIG, mesh=mesh, **settings)
    return make_step_functions(config, make_mesh(mesh, jax.devices()[:devices]))


def losses(run: StepFunctions) -> list[float]:
    state, found = run.init(), []
    for step in range(4):
        sides = np.random.default_rng(step).integers(4, 256, (2, 16, 7)).astype(np.int32)
        state, metrics = run.train_step(state, Batch(*sides))
        found.append(float(metrics.sums.loss / metrics.sums.tokens))
    return found


def updates_on(mesh: MeshConfig, devices: int, **settings: Any) -> Any:
    """Two updates of a model with random gradients, sharded as in training."""
    config = changed(CONFIG, mesh=mesh, **settings)
    run = step_functions(mesh, devices, **settings)
    optimizer = make_optimizer(config.optimizer, config.model.d_model)
    draw = np.random.default_rng(0)
    parameters, *gradients = (
        jax.tree.map(
            lambda x: jax.device_put(draw.normal(size=x.shape).astype(x.dtype), x.sharding),
            run.abstract_state.parameters,
        )
        for _ in range(3)
    )
    state = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
        run.abstract_state.optimizer,
    )
    update = jax.jit(optimizer.update)
    found = []
    for gradient in gradients:
        updates, state = update(gradient, state, parameters)
        found.append(jax.tree.map(np.asarray, updates))
    return found


@pytest.mark.devices(8)
def test_updates_on_a_mesh_equal_those_on_one_device() -> None:
    expected = updates_on(MeshConfig(), 1)
    found = updates_on(MeshConfig(2, 2, 2), 8)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.exhaustive
@pytest.mark.devices(8)
@pytest.mark.parametrize(
    ("mesh", "accumulate_steps"),
    [(MeshConfig(2, 2, 2), 1), (MeshConfig(fsdp=8), 1), (MeshConfig(fsdp=2, tensor=4), 2)],
    ids=str,
)
def test_losses_on_a_mesh_equal_those_on_one_device(
    mesh: MeshConfig, accumulate_steps: int
) -> None:
    """Also with a vocabulary and heads that are sharded, and with gradient accumulation."""
    expected = losses(step_functions(MeshConfig(), 1))
    assert expected[-1] < expected[0]
    optimizer = {"accumulate_steps": accumulate_steps}
    found = losses(step_functions(mesh, 8, optimizer=optimizer))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.devices(8)
def test_the_state_is_small_on_every_device() -> None:
    """For a base model: 0.4% of the parameters, and on 8 devices at most 3% of the sharded ones."""
    for fsdp, most in ((1, 0.004), (8, 0.03)):
        base = ModelConfig(vocab_size=37_000)
        run = make_step_functions(
            Config(model=base, optimizer=SETTINGS, mesh=MeshConfig(fsdp=fsdp)),
            make_mesh(MeshConfig(fsdp=fsdp), jax.devices()[:fsdp]),
        )
        parameters, state = (
            sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(part))
            for part in (run.abstract_state.parameters, run.abstract_state.optimizer)
        )
        assert state <= most * parameters


@pytest.mark.parametrize("name", ["adafactor", pytest.param("muon", marks=pytest.mark.exhaustive)])
def test_a_run_resumes_bit_exactly_and_only_with_the_same_optimizer(
    name: str, tmp_path: Path
) -> None:
    config = no_evaluation(tiny(steps=4, checkpoint_every=2, average=1))
    config = changed(config, optimizer={"name": name}, model={"d_model": 128, "d_ff": 128})
    train(config, tmp_path / "whole", devices=ONE)
    train(changed(config, training={"steps": 2}), tmp_path / "resumed", devices=ONE)
    other = changed(config, optimizer={"name": "adam"})
    with pytest.raises(UserError, match=f"optimizer.name: {name!r} in the checkpoint, 'adam'"):
        train(other, tmp_path / "resumed", devices=ONE, allow_changes=True)
    train(config, tmp_path / "resumed", devices=ONE)
    chex.assert_trees_all_equal(
        *(final_state(config, tmp_path / run) for run in ("whole", "resumed"))
    )
