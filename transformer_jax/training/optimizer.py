"""Adam with linear warm-up and inverse-square-root decay (paper section 5.3), Adafactor, Muon."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import Array
from optax.contrib import MuonDimensionNumbers

from transformer_jax.devices.sharding import map_named
from transformer_jax.errors import UserError, short_repr
from transformer_jax.settings.config import OptimizerConfig

DECAYS: dict[str, Callable[[Array, int, Any], Array]] = {
    "inverse_sqrt": lambda step, warmup, _: jnp.sqrt(warmup / step),
    "constant": lambda step, warmup, _: jnp.ones_like(step),
    "linear": lambda step, warmup, progress: jnp.maximum(1 - progress, 0),
    "cosine": lambda step, warmup, progress: (1 + jnp.cos(jnp.pi * jnp.minimum(progress, 1))) / 2,
}
"""Learning rates after warm-up, as fractions of the peak, by their names in ``optimizer.decay``.

The arguments are the step, from 1; the number of warm-up steps; and the progress of the decay,
above 0 after warm-up and below 1 at the last step, or None unless
``OptimizerConfig.decays_to_end``."""

VOCABULARY_MATRIX = re.compile(r"(^|\.)matrix$|^softmax_matrix$")
"""Names of matrices with a row for each token."""


def learning_rate_schedule(
    config: OptimizerConfig, d_model: int, steps: int | None = None
) -> optax.Schedule:
    """Build a learning-rate schedule with linear warm-up and decay (default: equation 3).

    Equation 3 is d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5). The config can set
    another peak or decay. The paper counts steps from 1 and optax from 0, so the schedule adds 1.

    Args:
      steps: total number of training steps, required if the decay ends at the last step.
    """
    assert steps or not config.decays_to_end, f"{config.decay} decay needs steps"
    peak = config.peak_learning_rate or d_model**-0.5 * config.warmup_steps**-0.5

    def schedule(count: jax.typing.ArrayLike) -> Array:
        step = jnp.asarray(count, jnp.float32) + 1
        progress = None
        if steps and config.decays_to_end:
            steps_after_warmup = jnp.maximum(step - config.warmup_steps, 0)
            progress = steps_after_warmup / (steps + 1 - config.warmup_steps)
        factor = DECAYS[config.decay](step, config.warmup_steps, progress)
        return peak * jnp.where(step < config.warmup_steps, step / config.warmup_steps, factor)

    return schedule


def make_optimizer(
    config: OptimizerConfig, d_model: int, steps: int | None = None
) -> optax.GradientTransformation:
    """Combine clipping, an optimizer, decoupled weight decay on matrices, and the schedule.

    The state has the same structure for all settings but ``name``, so a run can resume with
    different settings.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        OPTIMIZERS[config.name](config),
        optax.masked(
            optax.add_decayed_weights(config.weight_decay)
            if config.weight_decay
            else optax.identity(),
            _matrices,
        ),
        optax.scale_by_learning_rate(learning_rate_schedule(config, d_model, steps)),
    )


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)


def _adafactor(_: OptimizerConfig) -> optax.GradientTransformation:
    """Scale gradients by Adafactor's rule (Shazeer & Stern 2018, algorithm 4) with T5's settings.

    The updates have an RMS of at most 1, times the parameter's RMS. No momentum.
    """
    factored = optax.scale_by_factored_rms(decay_rate=0.8)

    def update(grads: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        updates, state = factored.update(_merged(grads), state, _merged(parameters))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), updates, grads), state

    return optax.chain(
        optax.GradientTransformation(lambda parameters: factored.init(_merged(parameters)), update),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Orthogonalize the momentum of each layer's matrices (Muon; Jordan et al. 2024), and use Adam
    with Nesterov momentum for the other parameters.

    Updates of matrices have an RMS of about 0.2, as Adam's have (Liu et al. 2025, equation 4).
    """

    def axes(name: str, x: Array) -> MuonDimensionNumbers | None:
        if not name.endswith(".kernel"):
            return None
        inputs = _input_axes(name, x)
        return MuonDimensionNumbers(tuple(range(inputs)), tuple(range(inputs, x.ndim)))

    return optax.contrib.muon(
        -1.0,  # the schedule comes later and negates
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        eps=config.epsilon,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=partial(map_named, axes),
    )


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adam": _adam,
    "adafactor": _adafactor,
    "muon": _muon,
}
"""Optimizers by their names in ``optimizer.name``. They return updates before the learning rate, in
the direction of the gradient."""


def _merged(parameters: Any) -> Any:
    """Merge the head axes of attention kernels: [D, H, K] to [D, H K], [H, K, D] to [H K, D]."""

    def merge(name: str, x: Array) -> Array:
        if x.ndim < 3:
            return x
        return x.reshape(math.prod(x.shape[: _input_axes(name, x)]), -1)

    return map_named(merge, parameters)


def _input_axes(name: str, x: Array) -> int:
    """Return the number of axes of a kernel's inputs, which come first: [D, H, K] and [H, K, D]."""
    return x.ndim - 1 if name.endswith("output.kernel") else 1


def check_frozen(patterns: Sequence[str], parameters: Any, *, new_rows: bool = False) -> None:
    """Raise ``UserError`` if a pattern of ``training.freeze`` has no match, or if all match and no
    ``new_rows`` are trained.
    """
    names = jax.tree.leaves(map_named(lambda name, _: name, parameters))
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"training.freeze contains {pattern!r}, which matches no parameter; expected "
                f"patterns of names such as {', '.join(names[:: len(names) // 4])}."
            )
    if not new_rows and all(_matches(name, patterns) for name in names):
        raise UserError(
            f"training.freeze is {short_repr(patterns)}, which matches every parameter; expected "
            "patterns that leave at least one parameter to train."
        )


def keep_frozen(patterns: Sequence[str], old: Any, new: Any, new_rows: Sequence[int] = ()) -> Any:
    """Return ``new`` parameters, but ``old`` ones where a name matches a pattern. ``new_rows`` of
    the vocabulary's matrices are new, too.
    """

    def choose(name: str, old: Array, new: Array) -> Array:
        if not _matches(name, patterns):
            return new
        if not new_rows or not VOCABULARY_MATRIX.search(name):
            return old
        is_new_V = np.isin(np.arange(len(old)), new_rows)
        return jnp.where(is_new_V[:, None], new, old)

    return map_named(choose, old, new)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _matrices(parameters: Any) -> Any:
    """Return a mask that selects matrices. Biases are excluded, even those with a head axis."""
    return map_named(lambda name, x: x.ndim > 1 and name.rpartition(".")[2] != "bias", parameters)
