"""Label-smoothed cross-entropy that never holds the logits of a whole batch (paper section 5.4),
and R-Drop.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from transformer_jax.sharding import BATCH_AXES
from transformer_jax.special_ids import PAD_ID


class LossSums(NamedTuple):
    """Sums over real target tokens, float32 scalars; divide by ``tokens`` for means."""

    # smoothed cross-entropy (with R-Drop's divergence), nats: what training minimises
    loss: jax.Array
    nll: jax.Array  # plain negative log-likelihood, nats: exp(nll / tokens) is the perplexity
    correct: jax.Array  # tokens whose label has the highest score
    tokens: jax.Array  # real target tokens


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 6, 7))
def smoothed_cross_entropy(
    hidden_BTD: jax.Array,
    matrix_VD: jax.Array,
    target_BT: jax.Array,
    label_smoothing: float = 0.1,
    max_logits: int = 2**22,
    bias_V: jax.Array | None = None,
    mesh: Mesh | None = None,
    r_drop: float = 0.0,
) -> LossSums:
    """Cross-entropy between softmax(hidden matrix^T + bias) and targets smoothed to (1 - epsilon)
    one-hot + epsilon / V.

    Logits exist for a few target positions at a time, at most about ``max_logits`` of them on a
    device. The gradient is worked out in the same pass, so that no logits are computed twice.

    Args:
      hidden_BTD: the decoder's output; its type is the type of the matrix products.
      matrix_VD: softmax weights, float32.
      target_BT: tokens to predict; positions with PAD_ID count nothing.
      bias_V: softmax biases, float32, if there are any.
      mesh: devices that the rows B are spread over, along the axes ``data`` and ``fsdp``; B must
        divide over them. Sums and the gradients of matrix and bias cross the devices once, after
        the last chunk.
      r_drop: alpha of R-Drop (Liang et al. 2021, equation 4). Above 0, rows 2i and 2i + 1 must be
        one sentence pair under two draws of dropout; where they predict p and q, ``loss`` grows by
        alpha / 2 (KL(p, q) + KL(q, p)).

    Only ``loss`` has a gradient.
    """
    sums, _ = _sums_and_gradients(
        hidden_BTD,
        matrix_VD,
        target_BT,
        label_smoothing,
        max_logits,
        bias_V,
        mesh,
        r_drop,
        gradients=False,
    )
    return sums


def _forward(*arguments):  # type: ignore[no-untyped-def]
    return _sums_and_gradients(*arguments, gradients=True)


def _backward(label_smoothing, max_logits, mesh, r_drop, gradients, cotangent):  # type: ignore[no-untyped-def]
    d_hidden_BTD, d_matrix_VD, d_bias_V = gradients
    scale = cotangent.loss
    no_gradient = np.zeros(d_hidden_BTD.shape[:2], jax.dtypes.float0)
    d_bias_V = None if d_bias_V is None else d_bias_V * scale
    return (
        d_hidden_BTD * scale.astype(d_hidden_BTD.dtype),
        d_matrix_VD * scale,
        no_gradient,
        d_bias_V,
    )


smoothed_cross_entropy.defvjp(_forward, _backward)

_Gradients = tuple[jax.Array, jax.Array, jax.Array | None]  # of hidden, matrix, bias


def _sums_and_gradients(
    hidden_BTD: jax.Array,
    matrix_VD: jax.Array,
    target_BT: jax.Array,
    label_smoothing: float,
    max_logits: int,
    bias_V: jax.Array | None,
    mesh: Mesh | None,
    r_drop: float,
    *,
    gradients: bool,
) -> tuple[LossSums, _Gradients | None]:
    assert not (r_drop and len(target_BT) % 2), (
        "R-Drop wants each sentence pair twice, one after the other"
    )
    on_device = partial(
        _on_device,
        label_smoothing=label_smoothing,
        max_logits=max_logits,
        r_drop=r_drop,
        gradients=gradients,
    )
    if mesh is None:
        return on_device(hidden_BTD, matrix_VD, target_BT, bias_V)

    def on_each_device(*arrays: Any) -> tuple[LossSums, _Gradients | None]:
        sums, of_inputs = on_device(*arrays)
        if of_inputs is None:
            return jax.lax.psum(sums, BATCH_AXES), None
        d_hidden_BTD, *of_weights = of_inputs
        sums, of_weights = jax.lax.psum((sums, of_weights), BATCH_AXES)
        return sums, (d_hidden_BTD, *of_weights)

    rows, everywhere = PartitionSpec(BATCH_AXES), PartitionSpec()
    return jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(rows, everywhere, rows, everywhere),
        out_specs=(everywhere, (rows, everywhere, everywhere) if gradients else everywhere),
        check_vma=False,
    )(hidden_BTD, matrix_VD, target_BT, bias_V)


def _on_device(
    hidden_BTD: jax.Array,
    matrix_VD: jax.Array,
    target_BT: jax.Array,
    bias_V: jax.Array | None,
    *,
    label_smoothing: float,
    max_logits: int,
    r_drop: float,
    gradients: bool,
) -> tuple[LossSums, _Gradients | None]:
    vocab_size, d_model = matrix_VD.shape
    dtype = hidden_BTD.dtype
    weights_VD = matrix_VD.astype(dtype)
    # Chunks (C) of so many tokens (L); with R-Drop its first half are some tokens' first pass, its
    # second half their second.
    passes = 2 if r_drop else 1
    rows, time = target_BT.shape
    count = rows // passes * time
    length = -(-count // max(1, -(-target_BT.size * vocab_size // max_logits)))

    def in_chunks(x: jax.Array) -> jax.Array:
        by_pass = (
            x.reshape(-1, passes, time, *x.shape[2:])
            .swapaxes(0, 1)
            .reshape(passes, count, *x.shape[2:])
        )
        # PAD_ID is 0
        padded = jnp.pad(by_pass, [(0, 0), (0, -count % length)] + [(0, 0)] * (x.ndim - 2))
        return (
            padded.reshape(passes, -1, length, *x.shape[2:])
            .swapaxes(0, 1)
            .reshape(-1, passes * length, *x.shape[2:])
        )

    def one_chunk(carry, chunk):  # type: ignore[no-untyped-def]
        sums, d_matrix_VD, d_bias_V = carry
        hidden_LD, target_L = chunk
        real_L = (target_L != PAD_ID).astype(jnp.float32)
        logits_LV = jnp.einsum(
            "LD,VD->LV", hidden_LD, weights_VD, preferred_element_type=jnp.float32
        )
        if bias_V is not None:
            logits_LV += bias_V[None]
        top_L = logits_LV.max(axis=-1)
        exp_LV = jnp.exp(logits_LV - top_L[:, None])
        total_L = exp_LV.sum(axis=-1)
        log_total_L = top_L + jnp.log(total_L)
        label_L = jnp.take_along_axis(logits_LV, target_L[:, None], axis=-1)[:, 0]
        nll_L = log_total_L - label_L
        loss_L = (1 - label_smoothing) * nll_L + label_smoothing * (
            log_total_L - logits_LV.mean(axis=-1)
        )
        if r_drop:
            kl_L, d_kl_LV = _divergence(logits_LV - log_total_L[:, None])
            loss_L += r_drop / 2 * kl_L
        new = LossSums(
            (loss_L * real_L).sum(),
            (nll_L * real_L).sum(),
            ((label_L >= top_L) * real_L).sum(),
            real_L.sum(),
        )
        sums = jax.tree.map(jnp.add, sums, new)
        if not gradients:
            return (sums, d_matrix_VD, d_bias_V), None
        is_label_LV = jnp.arange(vocab_size, dtype=target_L.dtype)[None] == target_L[:, None]
        smoothed_LV = (
            jnp.where(is_label_LV, 1 - label_smoothing, 0.0) + label_smoothing / vocab_size
        )
        d_logits_LV = exp_LV / total_L[:, None] - smoothed_LV
        if r_drop:
            d_logits_LV += r_drop / 2 * d_kl_LV
        d_logits_LV *= real_L[:, None]
        if d_bias_V is not None:
            d_bias_V += d_logits_LV.sum(axis=0)
        d_logits_LV = d_logits_LV.astype(dtype)
        d_hidden_LD = jnp.einsum("LV,VD->LD", d_logits_LV, weights_VD)
        d_matrix_VD += jnp.einsum(
            "LV,LD->VD", d_logits_LV, hidden_LD, preferred_element_type=jnp.float32
        )
        return (sums, d_matrix_VD, d_bias_V), d_hidden_LD

    zeros = LossSums(*(jnp.zeros((), jnp.float32),) * 4)
    start = (
        zeros,
        jnp.zeros(matrix_VD.shape if gradients else (), jnp.float32),
        None if bias_V is None else jnp.zeros(vocab_size, jnp.float32),
    )
    chunks = in_chunks(hidden_BTD), in_chunks(target_BT)
    (sums, d_matrix_VD, d_bias_V), d_hidden_CLD = jax.lax.scan(one_chunk, start, chunks)
    if not gradients:
        return sums, None
    d_by_pass = (
        d_hidden_CLD.reshape(-1, passes, length, d_model)
        .swapaxes(0, 1)
        .reshape(passes, -1, d_model)[:, :count]
    )
    d_hidden_BTD = (
        d_by_pass.reshape(passes, -1, time, d_model).swapaxes(0, 1).reshape(hidden_BTD.shape)
    )
    return sums, (d_hidden_BTD, d_matrix_VD, d_bias_V)


def _divergence(log_probs_LV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """KL(p, q) for the first half of the rows p, KL(q, p) for the second, q; and the gradient of
    their sum by the logits.
    """
    log_probs_PLV = log_probs_LV.reshape(2, -1, log_probs_LV.shape[-1])
    probs_PLV = jnp.exp(log_probs_PLV)
    ratio_PLV = log_probs_PLV - log_probs_PLV[::-1]
    kl_PL = (probs_PLV * ratio_PLV).sum(axis=-1)
    gradient_PLV = probs_PLV * (1 + ratio_PLV - kl_PL[..., None]) - probs_PLV[::-1]
    return kl_PL.reshape(-1), gradient_PLV.reshape(log_probs_LV.shape)
