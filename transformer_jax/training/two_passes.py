"""R-Drop and SimCut: each sentence pair passes through the model twice, and the loss includes the
divergence of the two predictions.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.model.dropout import keep_mask
from transformer_jax.settings.config import ModelConfig, TrainingConfig


class TwoPasses(NamedTuple):
    """Penalty alpha on the difference between two predictions p and q for each sentence pair.

    R-Drop (Liang et al. 2021, equation 4) adds their cross-entropies and alpha / 2 (KL(p, q) +
    KL(q, p)). SimCut (Gao et al. 2022, equation 6) adds twice the cross-entropy of p and twice
    alpha KL(p, q), so half of either sum is the loss of a pair.
    """

    method: Literal["r_drop", "simcut"]
    alpha: float
    cut_rate: float = 0.0  # SimCut: probability that a token's embedding is zero in the second pass

    @property
    def cross_entropy_weights(self) -> tuple[float, float]:
        """Weights of the cross-entropies of p and q."""
        return (1, 1) if self.method == "r_drop" else (2, 0)

    @property
    def divergence_weights(self) -> tuple[float, float]:
        """Weights of KL(p, q) and KL(q, p)."""
        if self.method == "r_drop":
            return (self.alpha / 2, self.alpha / 2)
        return (2 * self.alpha, 0)


def two_passes(training: TrainingConfig) -> TwoPasses | None:
    """Return the method that the settings turn on, if any."""
    if training.r_drop:
        return TwoPasses("r_drop", training.r_drop)
    if training.simcut:
        return TwoPasses("simcut", training.simcut, training.simcut_rate)
    return None


def repeat_rows(x: Array) -> Array:
    """Repeat each row: even rows are for the first pass, odd rows for the second."""
    return jnp.stack([x, x], axis=1).reshape(-1, *x.shape[1:])


def cut_tokens(tokens_BL: Array, rate: float, key: jax.Array, config: ModelConfig) -> Array:
    """Choose the tokens to cut in the second pass of SimCut, in odd rows.

    Chooses each token with this probability, but not PAD and EOS. Returns bool [B, L].
    """
    is_second_B1 = (jnp.arange(len(tokens_BL)) % 2 == 1)[:, None]
    is_word_BL = (tokens_BL != config.pad_id) & (tokens_BL != config.eos_id)
    return ~keep_mask(tokens_BL.shape, rate, key) & is_word_BL & is_second_B1
