"""R-Drop and SimCut: each sentence pair passes through the model twice, and the loss includes the
divergence of the two predictions. All that is special about the two methods is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.data.batching import Batch
from transformer_jax.model.dropout import keep_mask
from transformer_jax.settings.config import LossSettings, ModelConfig

CUT_ID = -1
"""Token id of a cut token, whose embedding is zero (``Embedding.zero_id``)."""


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

    def inputs(self, batch: Batch, dropout_key: Array, config: ModelConfig) -> tuple[Batch, Array]:
        """Return what the model reads for a batch of repeated rows, and the key for dropout."""
        if self.method == "r_drop":
            return batch, dropout_key
        dropout_key, source_key, target_key = jax.random.split(dropout_key, 3)
        is_cut_BS = cut_tokens(batch.source_BS, self.cut_rate, source_key, config)
        is_cut_BT = cut_tokens(batch.target_BT, self.cut_rate, target_key, config)
        batch_with_cuts = batch._replace(
            source_BS=jnp.where(is_cut_BS, CUT_ID, batch.source_BS),
            target_BT=jnp.where(is_cut_BT, CUT_ID, batch.target_BT),
        )
        return batch_with_cuts, dropout_key

    def divergence(
        self, log_probs_LV: Array, probs_LV: Array, sum_over_vocab: Callable[[Array], Array]
    ) -> tuple[Array, Array]:
        """Return the weighted KL divergence of each row, and the sum's gradient with respect to the
        logits.

        The first half of the rows holds p and gives KL(p, q); the second half holds q and gives
        KL(q, p). ``sum_over_vocab`` adds the sums of devices that shard the vocabulary.
        """
        weights_P11 = jnp.array(self.divergence_weights)[:, None, None]
        log_probs_PLV = log_probs_LV.reshape(2, -1, log_probs_LV.shape[-1])
        probs_PLV = probs_LV.reshape(log_probs_PLV.shape)
        ratio_PLV = log_probs_PLV - log_probs_PLV[::-1]
        kl_PL = sum_over_vocab((jnp.exp(log_probs_PLV) * ratio_PLV).sum(axis=-1))
        gradient_PLV = weights_P11 * probs_PLV * (ratio_PLV - kl_PL[..., None])
        gradient_PLV += weights_P11[::-1] * (probs_PLV - probs_PLV[::-1])
        return (weights_P11[..., 0] * kl_PL).reshape(-1), gradient_PLV.reshape(log_probs_LV.shape)


def two_passes(settings: LossSettings) -> TwoPasses | None:
    """Return the method that the settings turn on, if any."""
    if settings.r_drop:
        return TwoPasses("r_drop", settings.r_drop)
    if settings.simcut:
        return TwoPasses("simcut", settings.simcut, settings.simcut_rate)
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
