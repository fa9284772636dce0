"""Adam with linear warm-up and inverse-square-root decay (paper section 5.3)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from transformer_jax.devices.sharding import parameter_name
from transformer_jax.settings.config import OptimizerConfig


def learning_rate_schedule(
    config: OptimizerConfig, d_model: int, steps: int | None = None
) -> optax.Schedule:
    """Build a learning-rate schedule with linear warm-up and decay (default: equation 3).

    Equation 3 is d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5). The config can set
    another peak or decay. The paper counts steps from 1 and optax from 0, so the schedule adds 1.

    Args:
      steps: total number of training steps, required for linear and cosine decay, which end at the
        last step.
    """
    assert steps or config.decay not in ("linear", "cosine"), f"{config.decay} decay needs steps"
    peak = config.peak_learning_rate or d_model**-0.5 * config.warmup_steps**-0.5

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1
        after = jnp.maximum(step - config.warmup_steps, 0)
        # fraction of the decay; the rate of the last step is still above 0
        share = after / (steps + 1 - config.warmup_steps) if steps else after
        factor = {
            "inverse_sqrt": lambda: jnp.sqrt(config.warmup_steps / step),
            "constant": lambda: jnp.ones_like(step),
            "linear": lambda: jnp.maximum(1 - share, 0),
            "cosine": lambda: (1 + jnp.cos(jnp.pi * jnp.minimum(share, 1))) / 2,
        }[config.decay]()
        return peak * jnp.where(step < config.warmup_steps, step / config.warmup_steps, factor)

    return schedule


def make_optimizer(
    config: OptimizerConfig, d_model: int, steps: int | None = None
) -> optax.GradientTransformation:
    """Combine clipping, Adam, decoupled weight decay on matrices, and the learning-rate schedule.

    The state has the same structure for all settings, so a run can resume with different settings.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.masked(
            optax.add_decayed_weights(config.weight_decay)
            if config.weight_decay
            else optax.identity(),
            _matrices,
        ),
        optax.scale_by_learning_rate(learning_rate_schedule(config, d_model, steps)),
    )


def _matrices(parameters: Any) -> Any:
    """Return a mask that selects matrices. Biases are excluded, even those with a head axis."""

    def is_matrix(path: tuple[Any, ...], parameter: Any) -> bool:
        return parameter.ndim > 1 and parameter_name(path).rpartition(".")[2] != "bias"

    return jax.tree_util.tree_map_with_path(is_matrix, parameters)
