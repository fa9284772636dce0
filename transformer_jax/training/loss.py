"""Label-smoothed cross-entropy in chunks, so that all logits are never stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh, PartitionSpec

from transformer_jax.devices.sharding import BATCH_AXES
from transformer_jax.errors import UserError
from transformer_jax.model.matmul import einsum
from transformer_jax.settings.checks import Count, Fraction, checked
from transformer_jax.training.two_passes import TwoPasses


class LossSums(NamedTuple):
    """Sums over real target tokens, float32 scalars. Divide by ``tokens`` for means."""

    loss: Array  # objective, nats: label-smoothed cross-entropy and what settings add to it
    nll: Array  # negative log-likelihood, nats: exp(nll / tokens) is the perplexity
    correct: Array  # number of tokens whose label has the highest logit
    tokens: Array  # number of real target tokens


MAX_LOGITS: int | None = None
"""Approximate number of logits per chunk on each device; None: the backend's default."""


class _StaticArguments(NamedTuple):
    """What a compiled loss depends on."""

    label_smoothing: float
    pad_id: int
    max_logits: int | None
    logits_dtype: jnp.dtype
    mesh: Mesh | None
    passes: TwoPasses | None
    backend: str
    vocab_shards: int = 1  # number of devices along ``tensor`` that shard the vocabulary

    def over_vocab(self, reduce: Callable[..., Any], x: Any) -> Any:
        """Reduce over the devices that shard the vocabulary."""
        return reduce(x, "tensor") if self.vocab_shards > 1 else x


# Differentiable inputs of the loss: hidden_BTD, matrix_VD, bias_V.
_Inputs = tuple[Array, Array, Array | None]
_MaxAndSum = tuple[Array, Array]


@checked
@jax.named_scope("loss")
def smoothed_cross_entropy(
    hidden_BTD: Array,
    matrix_VD: Array,
    target_BT: Array,
    *,
    label_smoothing: Fraction = 0.1,
    pad_id: Count = 0,
    bias_V: Array | None = None,
    mesh: Mesh | None = None,
    passes: TwoPasses | None = None,
) -> LossSums:
    """Compute cross-entropy of softmax(hidden matrix^T + bias) with label smoothing (section 5.4).

    The target distribution is (1 - epsilon) one-hot + epsilon / V. Logits are computed in chunks of
    target positions. The same pass computes the gradient of ``loss``, so logits are not recomputed.
    The other sums have no gradient.

    Accelerators store logits in hidden_BTD's data type; all sums are float32. Ties are more common
    in bfloat16; ``correct`` also counts labels that tie for the highest logit.

    Args:
      hidden_BTD: decoder output; matmuls use its data type.
      matrix_VD: softmax weights, float32.
      target_BT: token ids to predict; positions with ``pad_id`` are ignored.
      pad_id: token id of padding (``ModelConfig.pad_id``).
      bias_V: optional softmax biases, float32.
      mesh: device mesh that shards the rows B along ``data`` and ``fsdp``; B must be divisible by
        the number of shards. Loss sums and gradients of matrix and bias are summed over these
        devices after the last chunk. ``tensor`` shards the vocabulary if its size divides V:
        each device computes its own logits, and communicates three numbers for each position.
      passes: R-Drop or SimCut. Rows 2i and 2i + 1 must be the same sentence pair with different
        dropout masks and, for SimCut, with tokens cut in row 2i + 1. The other sums count each pass
        as often as its cross-entropy counts.

    Raises:
      UserError: the gradient of ``nll`` is requested.
    """
    backend = jax.default_backend()
    dtype = jnp.dtype(jnp.float32) if backend == "cpu" else hidden_BTD.dtype
    static = _StaticArguments(label_smoothing, pad_id, MAX_LOGITS, dtype, mesh, passes, backend)
    return _loss(static, target_BT, (hidden_BTD, matrix_VD, bias_V))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)  # when compiled, an unused gradient is not computed
def _loss(static: _StaticArguments, target_BT: Array, inputs: _Inputs) -> LossSums:
    return _sums_and_gradients(static, target_BT, inputs)[0]


def _forward(static: _StaticArguments, target_BT: Any, inputs: Any) -> tuple[LossSums, Any]:
    return _sums_and_gradients(static, *jax.tree.map(lambda x: x.value, (target_BT, inputs)))


def _backward(_: _StaticArguments, gradients: _Inputs, cotangent: LossSums) -> tuple[None, _Inputs]:
    if not isinstance(cotangent.nll, SymbolicZero):
        raise UserError(
            "nll has no gradient; use the gradient of loss, with label_smoothing 0 and no other "
            "terms."
        )
    if isinstance(cotangent.loss, SymbolicZero):  # only counts are used
        return None, jax.tree.map(jnp.zeros_like, gradients)
    return None, jax.tree.map(lambda g: g * cotangent.loss.astype(g.dtype), gradients)


_loss.defvjp(_forward, _backward, symbolic_zeros=True)


def _sums_and_gradients(
    static: _StaticArguments, target_BT: Array, inputs: _Inputs
) -> tuple[LossSums, _Inputs]:
    """Compute the loss sums, and the gradient of ``loss`` with respect to the inputs."""
    if static.mesh is None:
        return _sums_and_gradients_on_device(static, target_BT, inputs)

    shards = static.mesh.shape.get("tensor", 1)
    if len(inputs[1]) % shards == 0:
        static = static._replace(vocab_shards=shards)

    def on_each_device(target_BT: Array, inputs: _Inputs) -> tuple[LossSums, _Inputs]:
        sums, (d_hidden_BTD, *weight_gradients) = _sums_and_gradients_on_device(
            static, target_BT, inputs
        )
        weight_gradients = jax.tree.map(lambda x: x[None], weight_gradients)
        return jax.lax.psum(sums, BATCH_AXES), (d_hidden_BTD, *weight_gradients)

    axis = "tensor" if static.vocab_shards > 1 else None
    row_spec = PartitionSpec(BATCH_AXES)
    vocab_spec = PartitionSpec(axis)
    row_and_vocab_spec = PartitionSpec(BATCH_AXES, axis)
    sums, (d_hidden_BTD, *weight_gradients) = jax.shard_map(
        on_each_device,
        mesh=static.mesh,
        in_specs=(row_spec, (row_spec, vocab_spec, vocab_spec)),
        out_specs=(PartitionSpec(), (row_spec, row_and_vocab_spec, row_and_vocab_spec)),
        check_vma=False,
    )(target_BT, inputs)
    # XLA sums over devices, so it can first add each device's other gradients of a tied matrix.
    d_matrix_VD, d_bias_V = jax.tree.map(lambda x: x.sum(axis=0), weight_gradients)
    return sums, (d_hidden_BTD, d_matrix_VD, d_bias_V)


def _sums_and_gradients_on_device(
    static: _StaticArguments, target_BT: Array, inputs: _Inputs
) -> tuple[LossSums, _Inputs]:
    """Compute ``_sums_and_gradients`` of a device's rows, in a loop over chunks of tokens.

    For each chunk, computes the logits, adds their loss to the sums, and multiplies the gradient of
    the logits with the two inputs of their matmul (the chain rule): with the softmax matrix, it
    gives the gradient of the chunk's hidden vectors; with the hidden vectors, a summand of the
    gradient of the matrix. The logits are then no longer needed.
    """
    hidden_BTD, matrix_VD, bias_V = inputs
    weights_VD = matrix_VD.astype(hidden_BTD.dtype)
    multiply = partial(einsum, dtype=hidden_BTD.dtype)
    num_passes = 2 if static.passes else 1
    num_positions = target_BT.size // num_passes
    num_chunks = _num_chunks(static, target_BT.size, *matrix_VD.shape)
    chunk_size = -(-num_positions // num_chunks)
    # The mean of all logits is the product with the mean row of the matrix, for label smoothing.
    mean_D = static.over_vocab(jax.lax.pmean, weights_VD.astype(jnp.float32).mean(axis=0))
    bias_mean = None if bias_V is None else static.over_vocab(jax.lax.pmean, bias_V.mean())

    def add_chunk(carry, chunk):  # type: ignore[no-untyped-def]
        sums, d_matrix_VD, d_bias_V = carry
        hidden_LD, target_L = chunk
        logits_LV = multiply("LD,VD->LV", hidden_LD, weights_VD, result=static.logits_dtype)
        # not a matmul, because GPUs can round float32 matmuls
        mean_L = (hidden_LD * mean_D[None]).sum(axis=-1)
        if bias_V is not None:
            logits_LV = logits_LV + bias_V[None]
            mean_L = mean_L + bias_mean
        chunk_sums, d_logits_LV = _from_logits(static, logits_LV, mean_L, target_L)
        sums = jax.tree.map(jnp.add, sums, chunk_sums)
        if d_bias_V is not None:
            d_bias_V += d_logits_LV.sum(axis=0)
        d_logits_LV = d_logits_LV.astype(hidden_LD.dtype)
        d_hidden_LD = multiply("LV,VD->LD", d_logits_LV, weights_VD, result=hidden_LD.dtype)
        d_matrix_VD += multiply("LV,LD->VD", d_logits_LV, hidden_LD, result=jnp.float32)
        return (sums, d_matrix_VD, d_bias_V), d_hidden_LD

    start = (
        LossSums(*np.zeros(4, np.float32)),
        *jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (matrix_VD, bias_V)),
    )
    divide = partial(_divide_into_chunks, num_passes=num_passes, chunk_size=chunk_size)
    hidden_CLD, from_chunks = jax.vjp(partial(divide, padding=0), hidden_BTD)
    target_CL = divide(target_BT, padding=static.pad_id)
    carry, d_hidden_CLD = jax.lax.scan(add_chunk, start, (hidden_CLD, target_CL))
    sums, d_matrix_VD, d_bias_V = carry
    [d_hidden_BTD] = static.over_vocab(jax.lax.psum, from_chunks(d_hidden_CLD))
    return sums, (d_hidden_BTD, d_matrix_VD, d_bias_V)


def _divide_into_chunks(x: Array, *, num_passes: int, chunk_size: int, padding: int) -> Array:
    """Divide [B, T] or [B, T, D] into C chunks, [C, L] or [C, L, D], with L = passes * chunk_size.

    With two passes, the first half of a chunk holds tokens of the first pass, and the second half
    holds the same tokens of the second pass: rows 2i and 2i + 1. For rows ``abc ABC def DEF`` and a
    chunk size of 4, the chunks are ``abcdABCD`` and ``ef__EF__``, where _ is padding.
    """
    B, T, *width = x.shape
    num_positions = B // num_passes * T
    by_pass = x.reshape(-1, num_passes, T, *width).swapaxes(0, 1)
    by_pass = by_pass.reshape(num_passes, num_positions, *width)
    pads = [(0, 0), (0, -num_positions % chunk_size)] + [(0, 0)] * len(width)
    padded = jnp.pad(by_pass, pads, constant_values=padding)
    chunks = padded.reshape(num_passes, -1, chunk_size, *width).swapaxes(0, 1)
    return chunks.reshape(-1, num_passes * chunk_size, *width)


def _num_chunks(static: _StaticArguments, positions: int, vocab_size: int, d_model: int) -> int:
    """Return the number of chunks for this many positions on a device.

    On a CPU, a small chunk stays in the cache, but each chunk reads and writes V x D matrices.
    Accelerators need thousands of positions at a time: with short chunks, XLA would split the
    matmuls and pad the vocabulary.
    """
    logits = positions * vocab_size
    if static.max_logits is not None:
        return -(-logits // static.max_logits)
    if static.backend == "cpu":
        return -(-logits // max(2**20, vocab_size * d_model))
    # Bytes per chunk: an eighth of all float32 logits, within limits. With two passes, the gradient
    # does not overwrite the logits.
    chunk_bytes = min(2**30, max(2**28, logits // 2))
    all_bytes = logits * static.logits_dtype.itemsize * (2 if static.passes else 1)
    return 2 ** (-(-all_bytes // chunk_bytes) - 1).bit_length()  # divides rows, a multiple of 8


def _from_logits(
    static: _StaticArguments, logits_LV: Array, mean_L: Array, target_L: Array
) -> tuple[LossSums, Array]:
    """Compute the loss sums of a chunk, and the gradient of ``loss`` with respect to its logits."""
    epsilon = static.label_smoothing
    shard_size = logits_LV.shape[-1]
    vocab_size = shard_size * static.vocab_shards
    # The loss of an id outside the vocabulary is NaN; indices below 0 would count from the end.
    target_L = jnp.where(target_L < 0, jnp.int32(vocab_size), target_L)
    real_L = (target_L != static.pad_id).astype(jnp.float32)
    top_L, log_total_L, probs_LV = _softmax(static, logits_LV)
    column_L = target_L
    if static.vocab_shards > 1:
        column_L -= jax.lax.axis_index("tensor") * shard_size
    label_L = jnp.take_along_axis(logits_LV, column_L[:, None], axis=-1)[:, 0]
    if static.vocab_shards > 1:  # each label is in one shard
        is_here_L = (column_L >= 0) & (column_L < shard_size) | (target_L >= vocab_size)
        label_L = jax.lax.psum(jnp.where(is_here_L, label_L, 0), "tensor")
    nll_L = log_total_L - label_L
    is_label_LV = jnp.arange(shard_size, dtype=column_L.dtype)[None] == column_L[:, None]
    loss_L = (1 - epsilon) * nll_L + epsilon * (log_total_L - mean_L)
    target_probs_LV = jnp.where(is_label_LV, 1 - epsilon, 0.0) + epsilon / vocab_size
    d_logits_LV = probs_LV - target_probs_LV
    token_weights_L = real_L
    if static.passes:
        # The barrier makes XLA recompute exponentials instead of storing them in twice the memory
        # of the logits.
        log_probs_LV = logits_LV - jax.lax.optimization_barrier(log_total_L)[:, None]
        sum_over_vocab = partial(static.over_vocab, jax.lax.psum)
        kl_L, d_kl_LV = static.passes.divergence(log_probs_LV, probs_LV, sum_over_vocab)
        weight_L = jnp.repeat(jnp.array(static.passes.cross_entropy_weights), len(kl_L) // 2)
        loss_L = weight_L * loss_L + kl_L
        d_logits_LV = weight_L[:, None] * d_logits_LV + d_kl_LV
        token_weights_L = weight_L * real_L
    sums = LossSums(
        loss=(loss_L * real_L).sum(),
        nll=(nll_L * token_weights_L).sum(),
        correct=((label_L >= top_L) * token_weights_L).sum(),
        tokens=token_weights_L.sum(),
    )
    return sums, d_logits_LV * real_L[:, None]


def _softmax(static: _StaticArguments, logits_LV: Array) -> tuple[Array, Array, Array]:
    """Return the maximum, log-sum-exp and probabilities of each row."""
    if static.backend == "gpu":  # reading the logits takes longer than computing exponentials
        shard_top_L, total_L = _max_and_sum_of_exp(logits_LV.astype(jnp.float32))
        top_L = static.over_vocab(jax.lax.pmax, shard_top_L)
        if static.vocab_shards > 1:
            total_L = jax.lax.psum(total_L * jnp.exp(shard_top_L - top_L), "tensor")
        log_total_L = top_L + jnp.log(total_L)
        return top_L, log_total_L, jnp.exp(logits_LV - log_total_L[:, None])
    # Maximum before cast: otherwise a TPU would also store the logits in float32.
    top_L = static.over_vocab(jax.lax.pmax, logits_LV.max(axis=-1).astype(jnp.float32))
    exp_LV = jnp.exp(logits_LV - top_L[:, None])
    total_L = static.over_vocab(jax.lax.psum, exp_LV.sum(axis=-1))
    return top_L, top_L + jnp.log(total_L), exp_LV / total_L[:, None]


def _max_and_sum_of_exp(x_LV: Array) -> tuple[Array, Array]:
    """Return the maximum m and the sum of exp(x - m) of each row, in one pass over ``x_LV``."""

    def join(a: _MaxAndSum, b: _MaxAndSum) -> _MaxAndSum:
        a_max, a_sum = a
        b_max, b_sum = b
        factor = jnp.exp(-jnp.abs(a_max - b_max))
        total = jnp.where(a_max > b_max, a_sum + factor * b_sum, factor * a_sum + b_sum)
        return jnp.maximum(a_max, b_max), total

    # not -inf: a logit can be -inf, and the difference would be NaN
    lowest = jnp.float32(jnp.finfo(jnp.float32).min)
    # Joining costs more than an exponential, and a thread reads 8 neighbors in one instruction.
    width = math.gcd(x_LV.shape[1], 8)
    neighbors = [x_LV[:, i::width] for i in range(width)]
    largest = reduce(jnp.maximum, neighbors, lowest)
    total = sum(jnp.exp(x - largest) for x in neighbors)
    return jax.lax.reduce((largest, total), (lowest, jnp.float32(0)), join, (1,))
