"""Adam with warm-up and inverse-square-root decay (paper section 5.3)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from transformer_jax.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, d_model: int) -> optax.Schedule:
    """Equation 3, d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), or the same shape with a given peak.

    The paper counts steps from 1, optax from 0: the schedule adds one.
    """
    peak = config.peak_learning_rate or d_model**-0.5 * config.warmup_steps**-0.5

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1
        return peak * jnp.minimum(jnp.sqrt(config.warmup_steps / step), step / config.warmup_steps)

    return schedule


def make_optimizer(config: OptimizerConfig, d_model: int) -> optax.GradientTransformation:
    """Clip (optional), Adam, decoupled weight decay on matrices (optional), learning rate."""
    parts = []
    if config.clip_norm > 0:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    parts.append(optax.scale_by_adam(config.beta1, config.beta2, config.epsilon))
    if config.weight_decay > 0:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=_matrices))
    parts.append(optax.scale_by_learning_rate(learning_rate_schedule(config, d_model)))
    return optax.chain(*parts)


def _matrices(parameters: Any) -> Any:
    """Attention's biases have an axis for the heads; they are no matrices for that."""
    return jax.tree_util.tree_map_with_path(lambda path, p: p.ndim > 1 and path[-1].key != "bias", parameters)
