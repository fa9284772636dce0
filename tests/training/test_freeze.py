"""Frozen parameters (``training.freeze``): not trained, at less cost, in every kind of run."""

from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from runs import ONE, changed, final_state, no_evaluation, tiny

from transformer_jax.data.batching import Batch
from transformer_jax.devices.sharding import make_mesh
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import abstract_model
from transformer_jax.pretrained.loading import load_model
from transformer_jax.runs.checkpoint_folder import complete_steps
from transformer_jax.settings.config import Config, MeshConfig, ModelConfig, OptimizerConfig
from transformer_jax.training.loop import train
from transformer_jax.training.optimizer import check_frozen, keep_frozen
from transformer_jax.training.step import (
    StepFunctions,
    StepMetrics,
    TrainState,
    make_step_functions,
)

CONFIG = Config(
    model=ModelConfig(
        vocab_size=24, d_model=16, d_ff=32, num_heads=8, num_layers=1, dropout=0.0, dtype="float32"
    ),
    optimizer=OptimizerConfig(warmup_steps=10),
)
FREEZE = ("encoder.*", "*embedding.matrix", "decoder.layers.[0-9].*.norm.scale")


def batch(seed: int = 0) -> Batch:
    sides = np.random.default_rng(seed).integers(4, 24, (2, 16, 7)).astype(np.int32)
    return Batch(*sides)


def step_functions(config: Config, devices: int = 1) -> StepFunctions:
    return make_step_functions(config, make_mesh(config.mesh, jax.devices()[:devices]))


def frozen(tree: Any, patterns: tuple[str, ...] = FREEZE) -> tuple[list[Any], list[Any]]:
    """The leaves of parameters that are frozen, and the others, as NumPy arrays."""
    true, false = (jax.tree.map(lambda _, value=value: value, tree) for value in (True, False))
    matches = jax.tree.leaves(keep_frozen(patterns, true, false))
    leaves = list(map(np.array, jax.tree.leaves(tree)))
    return tuple(
        [leaf for leaf, match in zip(leaves, matches, strict=True) if match is wanted]
        for wanted in (True, False)
    )


def steps_of(run: StepFunctions) -> tuple[TrainState, list[StepMetrics]]:
    state, metrics = run.init(), []
    for step in range(3):
        state, each = run.train_step(state, batch(step))
        metrics.append(each)
    return state, metrics


@pytest.mark.parametrize(
    "settings",
    [
        {
            "optimizer": {
                "weight_decay": 0.1,
                "clip_norm": 0.1,
                "ema_decay": 0.9,
                "accumulate_steps": 2,
            }
        },
        pytest.param(
            {"training": {"r_drop": 1.0}, "model": {"tie_embeddings": "none", "dropout": 0.1}},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"optimizer": {"name": "adafactor", "weight_decay": 0.1}},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"mesh": MeshConfig(2, 2, 2), "optimizer": {"ema_decay": 0.9}},
            marks=[pytest.mark.devices(8), pytest.mark.exhaustive],
        ),
    ],
    ids=["accumulation", "r_drop", "adafactor", "mesh"],
)
def test_frozen_parameters_are_bit_identical_and_all_others_change(
    settings: dict[str, Any],
) -> None:
    """And so are their moving averages. Their moments stay 0."""
    training = {"freeze": FREEZE} | settings.get("training", {})
    config = changed(CONFIG, **settings | {"training": training})
    run = step_functions(config, devices=8 if "mesh" in settings else 1)
    before = run.init().parameters
    state, _ = steps_of(run)
    for tree in (state.parameters, state.ema)[: 1 if state.ema is None else 2]:
        (old_frozen, old_rest), (new_frozen, new_rest) = frozen(before), frozen(tree)
        chex.assert_trees_all_equal(new_frozen, old_frozen)
        assert len(old_frozen) >= 14 and len(old_rest) >= 14
        assert all(np.any(old != new) for old, new in zip(old_rest, new_rest, strict=True))
    if config.optimizer.name == "adam":
        moments, others = frozen(state.optimizer[1].nu)
        assert not any(map(np.any, moments)) and all(map(np.any, others))


@pytest.mark.parametrize(
    "mesh",
    [
        None,
        pytest.param(MeshConfig(2, 2, 2), marks=[pytest.mark.devices(8), pytest.mark.exhaustive]),
    ],
)
def test_new_rows_of_a_frozen_matrix_are_trained(mesh: MeshConfig | None) -> None:
    """And nothing else, even if everything is frozen. The moving average follows."""
    config = changed(
        CONFIG,
        training={"freeze": ("*",)},
        optimizer={"ema_decay": 0.5, "weight_decay": 0.1},
        **({"mesh": mesh} if mesh else {}),
    )
    devices = jax.devices()[: 8 if mesh else 1]
    run = make_step_functions(config, make_mesh(config.mesh, devices), new_rows=(5, 9))
    before = jax.tree.map(np.asarray, run.init().parameters)
    state, metrics = steps_of(run)
    for tree in (state.parameters, state.ema):
        after = jax.tree.map(np.array, tree)
        new = after["target_embedding"]["matrix"]
        old = before["target_embedding"]["matrix"]
        assert np.flatnonzero((new != old).any(1)).tolist() == [5, 9]
        after["target_embedding"]["matrix"] = old
        chex.assert_trees_all_equal(after, before)
    assert float(metrics[-1].gradient_norm) > 0


def test_the_gradient_norm_is_that_of_the_trained_parameters() -> None:
    whole, part = CONFIG, changed(CONFIG, training={"freeze": FREEZE})
    (state, _), (_, metrics) = (
        run.train_step(run.init(), batch()) for run in map(step_functions, (whole, part))
    )
    gradients = jax.tree.map(lambda m: m / np.float32(0.1), frozen(state.optimizer[1].mu)[1])
    np.testing.assert_allclose(metrics.gradient_norm, optax.tree.norm(gradients), rtol=1e-5)


@pytest.mark.devices(8)
def test_losses_on_a_mesh_equal_those_on_one_device() -> None:
    config = changed(CONFIG, training={"freeze": FREEZE})
    several = changed(config, mesh=MeshConfig(2, 2, 2))
    found = [
        [float(each.sums.loss) for each in steps_of(run)[1]]
        for run in (step_functions(config), step_functions(several, 8))
    ]
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.cpu("other backends count library calls as no FLOPs")
@pytest.mark.parametrize(  # the body of a loop counts once
    "accumulate_steps", [1, pytest.param(2, marks=pytest.mark.exhaustive)]
)
def test_gradients_of_frozen_parameters_are_not_computed(accumulate_steps: int) -> None:
    """The backward pass of a frozen encoder and embedding, and the gradient of the softmax."""
    model = {"vocab_size": 1000, "d_model": 128, "d_ff": 512}
    optimizer = {"accumulate_steps": accumulate_steps}
    config = changed(CONFIG, model=model, optimizer=optimizer)
    side = jax.ShapeDtypeStruct((8 * accumulate_steps, 32), np.int32)

    def flops(freeze: tuple[str, ...]) -> float:
        run = step_functions(changed(config, training={"freeze": freeze}))
        lowered = run.train_step.lower(run.abstract_state, Batch(side, side))
        return lowered.compile().cost_analysis()["flops"]

    tokens, D, F, V = 8 * 32, 128, 512, 1000
    saved = 2 * tokens * (2 * (4 * D * D + 2 * D * F) + D * V)
    assert flops(()) - flops(("encoder.*", "*embedding.matrix")) >= saved


def test_patterns_without_effect_and_without_remainder_are_errors() -> None:
    parameters = abstract_model(CONFIG.model).parameters
    check_frozen(FREEZE, parameters)
    with pytest.raises(
        UserError, match=r"contains 'encoder.layer.0.\*', which matches no .*names such as decoder"
    ):
        check_frozen(("encoder.*", "encoder.layer.0.*"), parameters)
    with pytest.raises(UserError, match=r"is \('encoder.\*', .*, which matches every parameter"):
        check_frozen(("encoder.*", "decoder.*", "*matrix"), parameters)
    check_frozen(("encoder.*", "decoder.*", "*matrix"), parameters, new_rows=True)


def test_runs_resume_bit_exactly_and_can_unfreeze(tmp_path: Path) -> None:
    """The frozen parameters of the model, an average of checkpoints, are those of the start."""
    general = no_evaluation(tiny(steps=2))
    train(general, tmp_path / "general", devices=ONE)
    config = no_evaluation(
        tiny(
            steps=4,
            checkpoint_every=1,
            keep_checkpoints=3,
            average=3,
            start_from=str(tmp_path / "general"),
            freeze=FREEZE,
        )
    )
    config = changed(config, optimizer={"ema_decay": 0.5})
    train(config, tmp_path / "whole", devices=ONE)
    train(changed(config, training={"steps": 2}), tmp_path / "resumed", devices=ONE)
    train(config, tmp_path / "resumed", devices=ONE)
    states = [final_state(config, tmp_path / name) for name in ("whole", "resumed")]
    chex.assert_trees_all_equal(*states)
    started, model = (
        frozen(nnx.to_pure_dict(nnx.state(load_model(tmp_path / name)[1], nnx.Param)))
        for name in ("general", "whole")
    )
    chex.assert_trees_all_equal(started[0], model[0])
    assert len(complete_steps(tmp_path / "whole" / "checkpoints")) == 3

    longer = changed(config, training={"steps": 5, "freeze": ("encoder.*",)})
    with pytest.raises(UserError, match=r"--allow-changes(.|\n)*training.freeze: "):
        train(longer, tmp_path / "whole", devices=ONE)
    train(longer, tmp_path / "whole", devices=ONE, allow_changes=True)
    unfrozen = final_state(longer, tmp_path / "whole").parameters
    matrix = "target_embedding", "matrix"
    assert np.any(unfrozen[matrix[0]][matrix[1]] != states[0].parameters[matrix[0]][matrix[1]])
    chex.assert_trees_all_equal(unfrozen["encoder"], states[0].parameters["encoder"])
