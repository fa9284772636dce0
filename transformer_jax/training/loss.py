"""Label-smoothed cross-entropy that never holds the logits of a whole batch (paper section 5.4)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.tokenizer import PAD_ID


class LossSums(NamedTuple):
    """Sums over real target tokens, float32 scalars; divide by ``tokens`` for means."""

    loss: jax.Array  # smoothed cross-entropy, nats: what training minimises
    nll: jax.Array  # plain negative log-likelihood, nats: exp(nll / tokens) is the perplexity
    correct: jax.Array  # tokens whose label has the highest score
    tokens: jax.Array  # real target tokens


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def smoothed_cross_entropy(
    hidden_BTD: jax.Array,
    matrix_VD: jax.Array,
    target_BT: jax.Array,
    label_smoothing: float = 0.1,
    max_logits: int = 2**22,
    bias_V: jax.Array | None = None,
) -> LossSums:
    """Cross-entropy between softmax(hidden matrix^T + bias) and targets smoothed to (1 - epsilon) one-hot + epsilon / V.

    Logits exist for a few target positions of all rows at a time, at most about ``max_logits`` of them. The gradient is
    worked out in the same pass, so that no logits are computed twice.

    Args:
      hidden_BTD: the decoder's output; its type is the type of the matrix products.
      matrix_VD: softmax weights, float32.
      target_BT: pieces to predict; positions with PAD_ID count nothing.
      bias_V: softmax biases, float32, if there are any.

    Only ``loss`` has a gradient.
    """
    return _sums_and_gradients(hidden_BTD, matrix_VD, target_BT, label_smoothing, max_logits, bias_V, gradients=False)[0]


def _forward(hidden_BTD, matrix_VD, target_BT, label_smoothing, max_logits, bias_V):  # type: ignore[no-untyped-def]
    return _sums_and_gradients(hidden_BTD, matrix_VD, target_BT, label_smoothing, max_logits, bias_V, gradients=True)


def _backward(label_smoothing, max_logits, gradients, cotangent):  # type: ignore[no-untyped-def]
    d_hidden_BTD, d_matrix_VD, d_bias_V = gradients
    scale = cotangent.loss
    no_gradient = np.zeros(d_hidden_BTD.shape[:2], jax.dtypes.float0)
    d_bias_V = None if d_bias_V is None else d_bias_V * scale
    return d_hidden_BTD * scale.astype(d_hidden_BTD.dtype), d_matrix_VD * scale, no_gradient, d_bias_V


smoothed_cross_entropy.defvjp(_forward, _backward)


def _sums_and_gradients(
    hidden_BTD: jax.Array,
    matrix_VD: jax.Array,
    target_BT: jax.Array,
    label_smoothing: float,
    max_logits: int,
    bias_V: jax.Array | None,
    *,
    gradients: bool,
) -> tuple[LossSums, tuple[jax.Array, jax.Array, jax.Array | None] | None]:
    batch, length, d_model = hidden_BTD.shape
    vocab_size = matrix_VD.shape[0]
    dtype = hidden_BTD.dtype
    weights_VD = matrix_VD.astype(dtype)
    # Chunks run along T, not along B: rows may be spread over devices, positions never are.
    wanted = max(1, -(-batch * length * vocab_size // max_logits))
    width = -(-length // min(wanted, length))
    chunks = -(-length // width)
    spare = chunks * width - length
    hidden_CBtD = _split(jnp.pad(hidden_BTD, ((0, 0), (0, spare), (0, 0))), chunks)
    target_CBt = _split(jnp.pad(target_BT, ((0, 0), (0, spare)), constant_values=PAD_ID), chunks)

    def one_chunk(carry, chunk):  # type: ignore[no-untyped-def]
        sums, d_matrix_VD, d_bias_V = carry
        hidden_BtD, target_Bt = chunk
        real_Bt = (target_Bt != PAD_ID).astype(jnp.float32)
        logits_BtV = jnp.einsum("BtD,VD->BtV", hidden_BtD, weights_VD, preferred_element_type=jnp.float32)
        if bias_V is not None:
            logits_BtV += bias_V[None, None]
        top_Bt = logits_BtV.max(axis=-1)
        exp_BtV = jnp.exp(logits_BtV - top_Bt[..., None])
        total_Bt = exp_BtV.sum(axis=-1)
        log_total_Bt = top_Bt + jnp.log(total_Bt)
        label_Bt = jnp.take_along_axis(logits_BtV, target_Bt[..., None], axis=-1)[..., 0]
        nll_Bt = log_total_Bt - label_Bt
        loss_Bt = (1 - label_smoothing) * nll_Bt + label_smoothing * (log_total_Bt - logits_BtV.mean(axis=-1))
        new = LossSums(
            (loss_Bt * real_Bt).sum(), (nll_Bt * real_Bt).sum(), ((label_Bt >= top_Bt) * real_Bt).sum(), real_Bt.sum()
        )
        sums = jax.tree.map(jnp.add, sums, new)
        if not gradients:
            return (sums, d_matrix_VD, d_bias_V), None
        is_label_BtV = jnp.arange(vocab_size, dtype=target_Bt.dtype)[None, None] == target_Bt[..., None]
        smoothed_BtV = jnp.where(is_label_BtV, 1 - label_smoothing, 0.0) + label_smoothing / vocab_size
        d_logits_BtV = (exp_BtV / total_Bt[..., None] - smoothed_BtV) * real_Bt[..., None]
        if d_bias_V is not None:
            d_bias_V += d_logits_BtV.sum(axis=(0, 1))
        d_logits_BtV = d_logits_BtV.astype(dtype)
        d_hidden_BtD = jnp.einsum("BtV,VD->BtD", d_logits_BtV, weights_VD)
        d_matrix_VD += jnp.einsum("BtV,BtD->VD", d_logits_BtV, hidden_BtD, preferred_element_type=jnp.float32)
        return (sums, d_matrix_VD, d_bias_V), d_hidden_BtD

    zeros = LossSums(*(jnp.zeros((), jnp.float32),) * 4)
    start = (
        zeros,
        jnp.zeros(matrix_VD.shape if gradients else (), jnp.float32),
        None if bias_V is None else jnp.zeros(vocab_size, jnp.float32),
    )
    (sums, d_matrix_VD, d_bias_V), d_hidden_CBtD = jax.lax.scan(one_chunk, start, (hidden_CBtD, target_CBt))
    if not gradients:
        return sums, None
    d_hidden_BTD = d_hidden_CBtD.swapaxes(0, 1).reshape(batch, chunks * width, d_model)[:, :length]
    return sums, (d_hidden_BTD, d_matrix_VD, d_bias_V)


def _split(x: jax.Array, chunks: int) -> jax.Array:
    """[B, T, ...] to [chunks, B, T / chunks, ...]."""
    return x.reshape(x.shape[0], chunks, x.shape[1] // chunks, *x.shape[2:]).swapaxes(0, 1)
