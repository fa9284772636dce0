"""Training step and evaluation step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from jax import Array
from jax.sharding import Mesh

from transformer_jax.data.batching import Batch
from transformer_jax.devices.sharding import (
    all_gathered,
    batch_sharding,
    check_rows,
    reduce_scattered,
    replicated,
    state_shardings,
)
from transformer_jax.model.layers import compute_dtype
from transformer_jax.model.transformer import Transformer, abstract_model
from transformer_jax.settings.config import Config, LossSettings, ModelConfig, OptimizerConfig
from transformer_jax.training.loss import LossSums
from transformer_jax.training.objective import Parameters, loss_and_sums
from transformer_jax.training.optimizer import keep_frozen, learning_rate_schedule, make_optimizer


@struct.dataclass
class TrainState:
    """Training state. A step depends only on this state, the config and the corpus."""

    step: Array  # int32: number of completed steps, and index of the next one
    parameters: Parameters
    optimizer: Any  # optax state
    ema: Parameters | None  # moving average of the parameters, if configured
    bad_steps: Array  # int32: number of steps skipped for a non-finite loss or gradient
    bad_in_a_row: Array  # int32
    # uint32: config.seed. It is an input, not a constant, so runs that differ only in the seed can
    # share a compiled step in the compilation cache.
    seed: Array


class StepMetrics(NamedTuple):
    """Metrics of one step over the global batch, as scalars on the device."""

    sums: LossSums
    source_tokens: Array  # excluding padding
    gradient_norm: Array  # before clipping
    learning_rate: Array
    bad_steps: Array
    bad_in_a_row: Array


# XLA options for the training step by platform. On GPUs, cuBLASLt matmuls can add biases, apply
# ReLU and sum gradients in the same kernel. Results of merged matmuls would have to be split again.
# Several collectives may run at once, so that the first starts in the middle of the backward pass.
# On CPUs, the new state then overwrites the old one without a copy.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_copy_insertion_use_region_analysis": True},
    "gpu": {
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_gpu_enable_analytical_sol_latency_estimator": True,
        "xla_gpu_enable_cublaslt": True,
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    },
}


class StepConfig(NamedTuple):
    """Settings that compiled functions depend on."""

    model: ModelConfig
    optimizer: OptimizerConfig
    steps: int  # end of the learning-rate schedule; 0 if it has none
    loss: LossSettings
    freeze: tuple[str, ...] = ()
    new_rows: tuple[int, ...] = ()  # ids of new tokens, whose rows are never frozen


class StepFunctions(NamedTuple):
    """Compiled functions of a run and the shardings that they expect."""

    init: Callable[..., TrainState]  # jit: (Parameters | None) -> TrainState; donates them
    train_step: Any  # jit: (TrainState, Batch) -> (TrainState, StepMetrics); donates the old state
    eval_step: Any  # jit: (Parameters, Batch) -> LossSums
    abstract_state: TrainState  # shapes, types and shardings, for restoring
    graph: Any  # nnx graph definition, for nnx.merge(graph, parameters)


def make_step_functions(config: Config, mesh: Mesh, new_rows: Iterable[int] = ()) -> StepFunctions:
    """Create init, train_step and eval_step for a config and a mesh. They compile on first use.
    ``new_rows`` are the ids of new tokens, whose rows are trained even in a frozen matrix.

    Runs in one process share compiled functions if their ``StepConfig`` and mesh are equal.
    """
    training = config.training
    optimizer = config.optimizer
    steps = training.steps if optimizer.decays_to_end else 0
    settings = StepConfig(
        config.model,
        optimizer,
        steps,
        training.part(LossSettings),
        training.freeze,
        tuple(new_rows) if training.freeze else (),
    )
    functions = shared_functions(settings, mesh)
    return functions._replace(init=partial(functions.init, np.uint32(config.seed)))


@lru_cache(maxsize=32)
def shared_functions(config: StepConfig, mesh: Mesh) -> StepFunctions:
    """Create the functions shared by all runs with these settings. ``init`` takes the seed."""
    optimizer = make_optimizer(config.optimizer, config.model.d_model, config.steps)
    make_state = partial(init_state, config, optimizer)  # a single object, so JAX traces it once
    seed = np.uint32(0)
    shardings = state_shardings(jax.eval_shape(make_state, seed), mesh)
    init = jax.jit(make_state, out_shardings=shardings, donate_argnums=1)
    row_sharding = batch_sharding(mesh)
    on_all_devices = replicated(mesh)

    def eval_step(parameters: Parameters, batch: Batch) -> LossSums:
        parameters = all_gathered(parameters, mesh, compute_dtype(config.model))
        return objective(parameters, batch, None, config=config, mesh=mesh)[1]

    return StepFunctions(
        init=init,
        train_step=_checking_rows(
            jax.jit(
                partial(train_step, config=config, optimizer=optimizer, mesh=mesh),
                donate_argnums=0,
                compiler_options=COMPILER_OPTIONS.get(mesh.devices.flat[0].platform),
                in_shardings=(shardings, row_sharding),
                out_shardings=(shardings, on_all_devices),
            ),
            mesh,
            config.optimizer.accumulate_steps,
        ),
        eval_step=_checking_rows(
            jax.jit(
                eval_step,
                in_shardings=(shardings.parameters, row_sharding),
                out_shardings=on_all_devices,
            ),
            mesh,
        ),
        abstract_state=init.eval_shape(seed),
        graph=abstract_model(config.model).graph,
    )


def _checking_rows(compiled: Any, mesh: Mesh, microbatches: int = 1) -> Any:
    """Raise ``UserError`` for batches that do not divide evenly, before JAX does."""

    def checked_call(state: Any, batch: Batch) -> Any:
        check_rows(mesh, len(batch.source_BS), microbatches, "The number of rows in the batch")
        return compiled(state, batch)

    checked_call.lower = compiled.lower  # type: ignore[attr-defined]
    return checked_call


def init_state(
    config: StepConfig,
    optimizer: optax.GradientTransformation,
    seed: Array,
    parameters: Parameters | None = None,
) -> TrainState:
    """Create the initial state. Without ``parameters``, they are initialized from the seed."""
    if parameters is None:
        model = Transformer(config.model, rngs=nnx.Rngs(jax.random.key(seed)))
        parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        parameters=parameters,
        optimizer=optimizer.init(parameters),
        ema=jax.tree.map(jnp.copy, parameters) if config.optimizer.ema_decay > 0 else None,
        bad_steps=zero,
        bad_in_a_row=zero,
        seed=seed,
    )


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    config: StepConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> tuple[TrainState, StepMetrics]:
    """Run one training step. Skips the update if the loss or gradient is not finite."""
    dropout_key = jax.random.fold_in(jax.random.key(state.seed), state.step)
    loss = jax.grad(partial(objective, config=config, mesh=mesh), has_aux=True)

    def gradient(*inputs: Any) -> tuple[Parameters, LossSums]:
        grads, sums = loss(*inputs)
        return reduce_scattered(grads, mesh), sums

    grads, sums = accumulated_gradients(
        gradient,
        all_gathered(state.parameters, mesh, compute_dtype(config.model)),
        batch,
        dropout_key,
        microbatches=config.optimizer.accumulate_steps,
    )
    grads = jax.tree.map(lambda g: g / jnp.maximum(sums.tokens, 1), grads)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)

    updates, moments = optimizer.update(grads, state.optimizer, state.parameters)
    parameters = optax.apply_updates(state.parameters, updates)
    parameters = keep_frozen(config.freeze, state.parameters, parameters, config.new_rows)
    good_steps = state.step - state.bad_steps
    ema = moving_average(state.ema, parameters, config.optimizer.ema_decay, good_steps + 1)
    ema = keep_frozen(config.freeze, state.ema, ema, config.new_rows)
    parameters, moments, ema = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (parameters, moments, ema),
        (state.parameters, state.optimizer, state.ema),
    )
    is_bad = (~finite).astype(jnp.int32)
    schedule = learning_rate_schedule(config.optimizer, config.model.d_model, config.steps)
    state = TrainState(
        step=state.step + 1,
        parameters=parameters,
        optimizer=moments,
        ema=ema,
        bad_steps=state.bad_steps + is_bad,
        bad_in_a_row=(state.bad_in_a_row + 1) * is_bad,
        seed=state.seed,
    )
    return state, StepMetrics(
        sums=sums,
        source_tokens=(batch.source_BS != config.model.pad_id).sum().astype(jnp.float32),
        gradient_norm=norm,
        learning_rate=schedule(state.step - 1 - state.bad_steps),
        bad_steps=state.bad_steps,
        bad_in_a_row=state.bad_in_a_row,
    )


def objective(
    parameters: Parameters,
    batch: Batch,
    dropout_key: Array | None,
    *,
    config: StepConfig,
    mesh: Mesh,
) -> tuple[Array, LossSums]:
    """Compute a batch's total loss and its sums. Frozen parameters have no gradient."""
    if config.freeze:  # so XLA does not compute their gradients
        without_gradient = jax.lax.stop_gradient(parameters)
        parameters = keep_frozen(config.freeze, without_gradient, parameters, config.new_rows)
    return loss_and_sums(
        parameters, batch, dropout_key, config=config.model, settings=config.loss, mesh=mesh
    )


def accumulated_gradients(
    gradient: Callable[[Parameters, Batch, Array], tuple[Parameters, LossSums]],
    parameters: Parameters,
    batch: Batch,
    dropout_key: Array,
    *,
    microbatches: int,
) -> tuple[Parameters, LossSums]:
    """Accumulate the gradient of the loss and the loss sums over microbatches."""
    if microbatches == 1:
        return gradient(parameters, batch, dropout_key)
    # Row r goes to microbatch r % microbatches, so devices keep their own rows.
    split = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)

    def add(total: Any, numbered: tuple[Array, Batch]) -> tuple[Any, None]:
        index, microbatch = numbered
        key = jax.random.fold_in(dropout_key, index)
        return jax.tree.map(jnp.add, total, gradient(parameters, microbatch, key)), None

    zeros_like = partial(jnp.zeros_like, dtype=jnp.float32)
    zeros = jax.tree.map(zeros_like, parameters), LossSums(*np.zeros(4, np.float32))
    return jax.lax.scan(add, zeros, (jnp.arange(microbatches), split))[0]


def moving_average(
    ema: Parameters | None, parameters: Parameters, decay: float, good_steps: Array
) -> Parameters | None:
    """Update the exponential moving average (EMA), if enabled, after ``good_steps`` updates.

    The decay starts low, so the random initial parameters are soon forgotten.
    """
    if ema is None:
        return None
    decay_now = jnp.minimum(decay, (1 + good_steps) / (10 + good_steps))
    return optax.incremental_update(parameters, ema, 1 - decay_now)
