"""One training step and one evaluation step, each a single compiled program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax.sharding import Mesh

from transformer_jax.config import Config
from transformer_jax.data.batching import Batch
from transformer_jax.model.transformer import Transformer
from transformer_jax.sharding import batch_sharding, gathered, replicated, state_shardings
from transformer_jax.training.loss import LossSums, smoothed_cross_entropy
from transformer_jax.training.optimizer import learning_rate_schedule, make_optimizer

Parameters = Any  # nested dict of float32 arrays, as nnx.to_pure_dict gives it


@struct.dataclass
class TrainState:
    """All that a step changes. What a step computes depends on this, the config and the corpus, on
    nothing else.
    """

    step: jax.Array  # int32: batches consumed; the next step's number, counted from 0
    parameters: Parameters
    optimizer: Any  # optax state
    ema: Parameters | None  # moving average of the parameters, if configured
    bad_steps: jax.Array  # int32: steps skipped for a non-finite loss or gradient
    bad_in_a_row: jax.Array  # int32


class StepMetrics(NamedTuple):
    """Of one step's global batch; scalars on the device."""

    sums: LossSums
    source_tokens: jax.Array  # real ones
    gradient_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    bad_steps: jax.Array
    bad_in_a_row: jax.Array


class StepFunctions(NamedTuple):
    """The compiled functions of a run and the shardings they expect."""

    init: Callable[[], TrainState]
    # the old state is donated
    train_step: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
    eval_step: Callable[[Parameters, Batch], LossSums]
    abstract_state: TrainState  # shapes, types and shardings, for restoring
    graph: Any  # nnx graph definition: nnx.merge(graph, parameters) is the model


def make_step_functions(config: Config, mesh: Mesh) -> StepFunctions:
    """Build init, train_step and eval_step for this config on this mesh."""
    optimizer = make_optimizer(config.optimizer, config.model.d_model, config.training.steps)
    schedule = learning_rate_schedule(config.optimizer, config.model.d_model, config.training.steps)
    graph = nnx.split(
        nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0))), nnx.Param
    )[0]
    # An accelerator wants large chunks. On a CPU small ones stay in its cache, but each reads and
    # writes matrices of V x D.
    vocab_size, d_model = config.model.vocab_size, config.model.d_model
    max_logits = max(2**20, vocab_size * d_model // 2) if jax.default_backend() == "cpu" else 2**25

    def init() -> TrainState:
        model = Transformer(config.model, rngs=nnx.Rngs(config.seed))
        parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            parameters=parameters,
            optimizer=optimizer.init(parameters),
            ema=jax.tree.map(jnp.copy, parameters) if config.optimizer.ema_decay > 0 else None,
            bad_steps=jnp.zeros((), jnp.int32),
            bad_in_a_row=jnp.zeros((), jnp.int32),
        )

    def loss_sums(
        parameters: Parameters, batch: Batch, dropout_key: jax.Array | None, r_drop: float = 0.0
    ) -> LossSums:
        model = nnx.merge(graph, parameters)
        hidden_BTD = model.hidden(
            batch.source_BS,
            batch.target_BT,
            source_segments_BS=batch.source_segments_BS,
            target_segments_BT=batch.target_segments_BT,
            dropout_key=dropout_key,
        )
        return smoothed_cross_entropy(
            hidden_BTD,
            model.output_matrix_VD,
            batch.target_BT,
            config.training.label_smoothing,
            max_logits,
            model.output_bias_V,
            mesh,
            r_drop,
        )

    def gradients(
        parameters: Parameters, batch: Batch, dropout_key: jax.Array
    ) -> tuple[Parameters, LossSums]:
        """Gradient of the summed loss, and the sums."""
        r_drop = config.training.r_drop
        if r_drop:  # each row twice, one after the other, for two draws of dropout
            batch = jax.tree.map(
                lambda x: jnp.stack([x, x], axis=1).reshape(-1, *x.shape[1:]), batch
            )

        def loss(parameters: Parameters) -> tuple[jax.Array, LossSums]:
            sums = loss_sums(parameters, batch, dropout_key, r_drop)
            if r_drop:
                sums = jax.tree.map(lambda x: x / 2, sums)
            return sums.loss, sums

        return jax.grad(loss, has_aux=True)(parameters)

    def accumulated_gradients(
        parameters: Parameters, batch: Batch, dropout_key: jax.Array
    ) -> tuple[Parameters, LossSums]:
        parts = config.optimizer.accumulate_steps
        if parts == 1:
            return gradients(parameters, batch, dropout_key)
        # Row r goes to part r % parts: devices keep their own rows wherever these divide by the
        # parts.
        split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

        def add_part(total: Any, part: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            number, rows = part
            return jax.tree.map(
                jnp.add, total, gradients(parameters, rows, jax.random.fold_in(dropout_key, number))
            ), None

        zeros = (
            jax.tree.map(jnp.zeros_like, parameters),
            LossSums(*(jnp.zeros((), jnp.float32),) * 4),
        )
        return jax.lax.scan(add_part, zeros, (jnp.arange(parts), split))[0]

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        dropout_key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        grads, sums = accumulated_gradients(
            gathered(state.parameters, shardings.parameters), batch, dropout_key
        )
        # Whole, then in parts: told only the latter, XLA hands rows of the batch around to compute
        # parts of the embeddings'.
        grads = jax.lax.with_sharding_constraint(
            gathered(grads, shardings.parameters), shardings.parameters
        )
        # Sums over the global batch, divided by its number of real target tokens.
        grads = jax.tree.map(lambda g: g / jnp.maximum(sums.tokens, 1), grads)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
        updates, new_optimizer = optimizer.update(grads, state.optimizer, state.parameters)
        new_parameters = optax.apply_updates(state.parameters, updates)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        new_parameters = keep(new_parameters, state.parameters)
        ema = None
        if state.ema is not None:
            # At first it follows closely, so that the random initial parameters are soon forgotten.
            good_steps = state.step - state.bad_steps + 1
            decay = jnp.minimum(config.optimizer.ema_decay, (1 + good_steps) / (10 + good_steps))
            ema = keep(optax.incremental_update(new_parameters, state.ema, 1 - decay), state.ema)
        bad = (~finite).astype(jnp.int32)
        state = TrainState(
            step=state.step + 1,
            parameters=new_parameters,
            optimizer=keep(new_optimizer, state.optimizer),
            ema=ema,
            bad_steps=state.bad_steps + bad,
            bad_in_a_row=(state.bad_in_a_row + 1) * bad,
        )
        metrics = StepMetrics(
            sums=sums,
            source_tokens=(batch.source_BS != 0).sum().astype(jnp.float32),
            gradient_norm=norm,
            learning_rate=schedule(state.step - 1 - state.bad_steps),
            bad_steps=state.bad_steps,
            bad_in_a_row=state.bad_in_a_row,
        )
        return state, metrics

    def eval_step(parameters: Parameters, batch: Batch) -> LossSums:
        return loss_sums(gathered(parameters, shardings.parameters), batch, None)

    shapes = jax.eval_shape(init)
    shardings = state_shardings(shapes, mesh)
    rows, everywhere = batch_sharding(mesh), replicated(mesh)
    abstract_state = jax.tree.map(
        lambda s, h: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=h), shapes, shardings
    )
    return StepFunctions(
        init=jax.jit(init, out_shardings=shardings),
        train_step=jax.jit(
            train_step,
            donate_argnums=0,
            in_shardings=(shardings, rows),
            out_shardings=(shardings, everywhere),
        ),
        eval_step=jax.jit(
            eval_step, in_shardings=(shardings.parameters, rows), out_shardings=everywhere
        ),
        abstract_state=abstract_state,
        graph=graph,
    )
