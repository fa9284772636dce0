"""Matmuls in the data type of the config, and what that means on a CPU.

XLA's CPU backend multiplies bfloat16 matrices fast on processors that have instructions for it
(AVX-512 BF16, AMX), but emulates all other operations in bfloat16. So on a CPU, ``model.dtype``
bfloat16 is mixed precision: the inputs of matmuls with weights are rounded to bfloat16; their
results, and all activations, are float32. With ``decoding.weights`` int8, the inputs are
rounded to 8-bit integers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from transformer_jax.devices.machine import cpu_flags
from transformer_jax.errors import UserError
from transformer_jax.settings.config import ModelConfig

_INT8_MAX = 127
_LARGEST_INTEGERS = {"int8": _INT8_MAX}  # of weights, by ``decoding.weights``

# With at most this many rows, XLA's kernels for bfloat16 and int8 would spend much of the time on
# rearranging the second matrix.
_FEW_ROWS = 32

# From jaxlib 0.11 on, XLA multiplies few rows of bfloat16 fast without exchanging the matrices. If
# they are exchanged, it sums in an order that depends on the number of rows.
_SWAPS_BFLOAT16_OPERANDS = jax.__version_info__ < (0, 11)


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """Return the data type of matmuls."""
    return matmul_dtype(config.dtype)


def matmul_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return ``dtype`` or, if it is "auto", the data type of matmuls on JAX's default device.

    It is bfloat16, but float32 on a CPU without avx512_bf16, which every CPU with AMX has, or if
    JAX's default matmul precision is set.
    """
    if dtype != "auto":
        return jnp.dtype(dtype)
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    is_fast = not _on_cpu() or ("avx512_bf16" in cpu_flags() and precision is None)
    return jnp.dtype(jnp.bfloat16 if is_fast else jnp.float32)


def activation_dtype(config: ModelConfig) -> jnp.dtype:
    """Return the data type of activations: that of matmuls, but always float32 on a CPU."""
    return jnp.dtype(jnp.float32) if _on_cpu() else compute_dtype(config)


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def is_mixed(dtype: Any) -> bool:
    """Return True if matmuls in ``dtype`` only round their inputs to it: bfloat16 on a CPU."""
    return dtype == jnp.bfloat16 and _on_cpu()


def is_quantized(weights: str) -> bool:
    """Return True if this value of ``decoding.weights`` rounds matrices to integers."""
    return weights in _LARGEST_INTEGERS


def check_weights(weights: str) -> None:
    """Raise ``UserError`` for quantized weights if matmuls of 8-bit integers are slow here."""
    if is_quantized(weights) and (not _on_cpu() or "avx512_vnni" not in cpu_flags()):
        raise UserError(
            f"decoding.weights is {weights!r}, which needs a CPU with AVX-512 VNNI (avx512_vnni in "
            "/proc/cpuinfo); expected 'auto' on this machine."
        )


def quantize(equation: str, b: Array, weights: str = "int8") -> tuple[Array, Array]:
    """Round the second input of an ``einsum`` to integers, with one scale per output channel.

    ``weights`` is a quantized value of ``decoding.weights``. Returns the integers and ``scale``,
    which has the axes that are not summed.
    """
    axes, out = equation.split(",")[1].split("->")
    summed_axes = tuple(i for i, axis in enumerate(axes) if axis not in out)
    scale = jnp.max(jnp.abs(b), summed_axes, keepdims=True) / _LARGEST_INTEGERS[weights]
    integers = jnp.round(b / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
    return integers, scale.squeeze(summed_axes)


def einsum(
    equation: str,
    a: Array,
    b: Array,
    *,
    dtype: DTypeLike,
    result: DTypeLike,
    scale: Array | None = None,
) -> Array:
    """Multiply two arrays as ``jnp.einsum`` does, and return an array of type ``result``.

    The axes that are summed must come first or last in each input, and the result must have the
    other axes of ``a`` before those of ``b``. ``b`` and ``scale`` can come from ``quantize``; the
    summed axes of ``a`` must then be last, and each of its rows is quantized by its own maximum.
    """
    if scale is not None:
        return _int8_einsum(equation, a, b, scale).astype(result)
    if is_mixed(dtype):
        return _bfloat16_einsum(equation, a, b).astype(result)
    return jnp.einsum(equation, a, b, preferred_element_type=result)


def _int8_einsum(equation: str, a: Array, b: Array, scale: Array) -> Array:
    a, b, b_axis, shape = _as_matrices(equation, a, b)
    # NaN and infinity make the whole row NaN.
    largest_M1 = jnp.max(jnp.abs(a), axis=1, keepdims=True)
    integers = jnp.round(a * (_INT8_MAX / jnp.maximum(largest_M1, 1e-30))).astype(jnp.int8)
    out_MN = _multiply(integers, b, b_axis, jnp.int32)
    out_MN = out_MN * (largest_M1 / _INT8_MAX) * scale.reshape(1, -1)
    return out_MN.reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bfloat16_einsum(equation: str, a: Array, b: Array) -> Array:
    rounded = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    a, b, b_axis, shape = _as_matrices(equation, *rounded)
    return _multiply(a, b, b_axis, jnp.float32).reshape(shape)


def _forward(equation: str, a: Array, b: Array) -> tuple[Array, tuple[Array, ...]]:
    return _bfloat16_einsum(equation, a, b), (a, b)


def _backward(equation: str, inputs: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    a, b = inputs
    a_axes, b_axes, out = equation.replace("->", ",").split(",")
    gradient_a = _bfloat16_einsum(f"{out},{b_axes}->{a_axes}", gradient, b)
    if b_axes[0] in a_axes:
        gradient_b = _bfloat16_einsum(f"{a_axes},{out}->{b_axes}", a, gradient)
    else:
        gradient_b = _bfloat16_einsum(f"{out},{a_axes}->{b_axes}", gradient, a)
    return gradient_a.astype(a.dtype), gradient_b.astype(b.dtype)


_bfloat16_einsum.defvjp(_forward, _backward)


def output_major(equation: str, b: Array) -> tuple[str, Array]:
    """Move the summed axes of the second input last. Returns the equation for that, and the input.

    In mixed precision and with int8, ``einsum`` is then fastest for few rows.
    """
    a_axes, b_axes, out = equation.replace("->", ",").split(",")
    reordered_axes = "".join(sorted(b_axes, key=lambda axis: axis in a_axes))
    return f"{a_axes},{reordered_axes}->{out}", jnp.einsum(f"{b_axes}->{reordered_axes}", b)


def _multiply(a_MK: Array, b: Array, b_axis: int, result: DTypeLike) -> Array:
    """Multiply two bfloat16 or int8 matrices, summing over axis ``b_axis`` of ``b``.

    If ``b`` is output-major (``b_axis`` is 1), a row's bits do not depend on the number of rows.
    """
    num_rows = a_MK.shape[0]
    has_few_rows = (
        isinstance(num_rows, int) and num_rows <= _FEW_ROWS
    )  # else: a symbol of jax.export
    swaps_operands = b_axis == 1 and (_SWAPS_BFLOAT16_OPERANDS or a_MK.dtype == jnp.int8)
    if num_rows == 1:  # XLA has no fast kernels for vectors, and others would round differently
        a_MK = jnp.pad(a_MK, ((0, 1), (0, 0)))
    if swaps_operands and has_few_rows:
        out_NM = jax.lax.dot_general(b, a_MK, (((1,), (1,)), ((), ())), None, result)
        # Without a barrier, XLA would exchange the operands again.
        out_MN = with_layout_constraint(jax.lax.optimization_barrier(out_NM).T, Layout((0, 1)))
    else:
        out_MN = jax.lax.dot_general(a_MK, b, (((1,), (b_axis,)), ((), ())), None, result)
    return out_MN[:num_rows]


def _as_matrices(equation: str, a: Array, b: Array) -> tuple[Array, Array, int, list[int]]:
    """Merge the summed axes of each input, which come first or last, and its other axes.

    Returns both matrices, the second one's summed axis, and the shape of the result.
    """
    a_axes, b_axes, out = equation.replace("->", ",").split(",")
    sizes = dict(zip(a_axes + b_axes, a.shape + b.shape, strict=True))
    shape = [sizes[axis] for axis in out]
    summed_axes = "".join(axis for axis in a_axes if axis not in out)
    size = math.prod(sizes[axis] for axis in summed_axes)
    if a_axes.startswith(summed_axes):
        # XLA's fast kernels need the first matrix in row-major order.
        a = with_layout_constraint(a.reshape(size, -1).T, Layout((0, 1)))
    is_b_summed_first = b_axes.startswith(summed_axes)
    matrices = a.reshape(-1, size), b.reshape((size, -1) if is_b_summed_first else (-1, size))
    return *matrices, 0 if is_b_summed_first else 1, shape
