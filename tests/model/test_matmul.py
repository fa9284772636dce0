"""Data types of matmuls, and mixed precision on a CPU."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.model.random_weights import random_transformer
from transformer_jax import ModelConfig, MultiHeadAttention
from transformer_jax.devices import machine
from transformer_jax.model import matmul

EQUATIONS = {
    "BLD,DF->BLF": ("BLD", "DF"),
    "BLD,DHK->BLHK": ("BLD", "DHK"),
    "BLHK,HKD->BLD": ("BLHK", "HKD"),
    "BTD,VD->BTV": ("BTD", "VD"),
}
SIZES = {"B": 2, "L": 3, "T": 3, "D": 16, "F": 24, "H": 2, "K": 8, "V": 40}
TINY = ModelConfig(40, d_model=16, d_ff=24, num_heads=2, num_layers=1)


def _inputs(equation: str, **changes: int) -> list[np.ndarray]:
    rng, sizes = np.random.default_rng(0), SIZES | changes
    shapes = ([sizes[axis] for axis in axes] for axes in EQUATIONS[equation])
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def _gradients(equation: str, inputs: list[np.ndarray], cotangent: np.ndarray) -> list[np.ndarray]:
    """The gradients of an einsum for both inputs."""
    axes = equation.replace("->", ",").split(",")
    a, b = inputs
    return [
        np.einsum(f"{axes[2]},{axes[1]}->{axes[0]}", cotangent, b),
        np.einsum(f"{axes[2]},{axes[0]}->{axes[1]}", cotangent, a),
    ]


@pytest.mark.cpu("other devices have bfloat16 activations")
@pytest.mark.parametrize("changes", [{}, {"B": 1, "L": 1, "T": 1}, {"D": 2, "F": 1, "V": 1}])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_only_the_inputs_are_rounded(equation: str, changes: dict[str, int]) -> None:
    """Results and both gradients are float32 sums of products of bfloat16 numbers."""
    inputs = _inputs(equation, **changes)
    rounded = [x.astype(jnp.bfloat16).astype(np.float32) for x in inputs]
    expected = np.einsum(equation, *rounded)
    cotangent = expected.astype(jnp.bfloat16).astype(np.float32)

    @jax.jit
    def with_gradients(*inputs: jax.Array) -> tuple[jax.Array, Any]:
        def mixed(*inputs: jax.Array) -> jax.Array:
            return matmul.einsum(equation, *inputs, dtype=jnp.bfloat16, result=jnp.float32)

        out, gradient = jax.vjp(mixed, *inputs)
        return out, gradient(jnp.asarray(cotangent))

    out, gradients = with_gradients(*inputs)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)

    wanted = _gradients(equation, rounded, cotangent)
    for found, each in zip(gradients, wanted, strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, each, rtol=1e-5, atol=1e-4)


@pytest.mark.cpu("other devices have bfloat16 activations")
def test_a_model_computes_in_mixed_precision() -> None:
    """Only matmuls with weights have bfloat16 inputs, and nothing else is bfloat16."""
    model = random_transformer(dataclasses.replace(TINY, dtype="bfloat16"))
    exact = random_transformer(dataclasses.replace(TINY, dtype="float32"))
    source, target = (np.full((2, length), 5, np.int32) for length in (5, 4))
    traced = str(jax.make_jaxpr(lambda *inputs: model(*inputs))(source, target))
    lines = [line for line in traced.splitlines() if "bf16" in line]
    assert lines
    operations = {line.split(" = ")[1].split("[")[0].split()[0] for line in lines if " = " in line}
    assert operations <= {
        "convert_element_type",
        "reshape",
        "dot_general",
        "custom_vjp_call",
        "pjit",
    }
    logits = [nnx.jit(lambda model: model(source, target))(each) for each in (model, exact)]
    np.testing.assert_allclose(*logits, atol=0.1)


def _quantized(equation: str, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    integers, scale = jax.jit(partial(matmul.quantize, equation))(b)
    return np.asarray(integers), np.asarray(scale)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_int8_has_a_scale_per_row_and_per_output_channel(equation: str) -> None:
    """The sums of integers are exact, so a row is bit-identical in any batch."""
    a, b = _inputs(equation, B=3)
    a[0, 0] = 0.0
    if equation.endswith("F"):
        b[..., 0] = 0.0
    a_axes, b_axes, out = equation.replace("->", ",").split(",")
    integers, scale = _quantized(equation, b)
    assert integers.dtype == np.int8 and np.abs(integers).max() == 127
    multiply = partial(matmul.einsum, equation, dtype=jnp.float32, result=jnp.float32)
    found = jax.jit(multiply)(a, integers, scale=scale)

    summed = tuple(i for i, axis in enumerate(a_axes) if axis not in out)
    steps = np.abs(a).max(summed, keepdims=True) / 127
    rounded = np.round(a / np.where(steps == 0, 1, steps)) * steps
    axes = "".join(axis for axis in b_axes if axis in out)
    expected = np.einsum(f"{a_axes},{b_axes},{axes}->{out}", rounded, integers, scale)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, np.einsum(equation, a, b), atol=0.15)
    alone = jax.jit(multiply)(a[1:2, :1], integers, scale=scale)
    np.testing.assert_array_equal(alone, found[1:2, :1])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_invalid_activations_stay_in_their_row_with_int8(value: float) -> None:
    equation = "BLD,DF->BLF"
    a, b = _inputs(equation)
    integers, scale = _quantized(equation, b)
    multiply = jax.jit(partial(matmul.einsum, equation, dtype=jnp.float32, result=jnp.float32))
    expected = np.array(multiply(a, integers, scale=scale))
    a[1, 2, 3] = value
    found = np.array(multiply(a, integers, scale=scale))
    assert not np.isfinite(found[1, 2]).any()
    found[1, 2] = expected[1, 2] = 0
    np.testing.assert_array_equal(found, expected)


@pytest.mark.cpu("auto is bfloat16 elsewhere")
@pytest.mark.parametrize(
    ("flags", "precision", "dtype"),
    [
        ({"avx512f", "avx512_bf16"}, None, jnp.bfloat16),
        ({"avx512f", "avx512_vnni"}, None, jnp.float32),
        (set(), None, jnp.float32),
        ({"avx512_bf16"}, "highest", jnp.float32),
    ],
)
def test_auto_is_bfloat16_on_cpus_with_avx512_bf16(
    flags: set[str], precision: str | None, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "cpu_flags", lambda: flags)
    with jax.default_matmul_precision(precision):
        assert matmul.compute_dtype(ModelConfig()) == dtype
        assert matmul.compute_dtype(dataclasses.replace(TINY, dtype="float32")) == jnp.float32
        assert matmul.compute_dtype(dataclasses.replace(TINY, dtype="bfloat16")) == jnp.bfloat16
        assert matmul.activation_dtype(ModelConfig()) == jnp.float32


def test_flags_of_the_processor() -> None:
    assert all(flag == flag.lower() and flag for flag in machine.cpu_flags())


@pytest.mark.cpu("other devices have bfloat16 activations")
def test_attention_keeps_float32_activations() -> None:
    layer = MultiHeadAttention(16, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = _inputs("BLD,DF->BLF")[0]
    assert layer(x).dtype == jnp.float32
    assert layer(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.cpu("other devices have no such limit")
@pytest.mark.parametrize("shape", [(512, 2048), (2048, 512), (512, 5000), (33, 130)])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_row_has_the_same_bits_in_every_batch(dtype: str, shape: tuple[int, int]) -> None:
    """From one row, as in greedy search, to as many as in training."""
    rng, (width, outputs) = np.random.default_rng(0), shape
    rows = rng.standard_normal((128, width)).astype(np.float32)
    equation = "RD,DF->RF"
    b = rng.standard_normal(shape).astype(np.float32)
    scale = None
    if dtype == "int8":
        b, scale = _quantized(equation, b)
    equation, b = matmul.output_major(equation, jnp.asarray(b))
    assert (equation, b.shape) == ("RD,FD->RF", (outputs, width))
    multiply = jax.jit(
        partial(matmul.einsum, equation, dtype=jnp.bfloat16, result=jnp.float32, scale=scale)
    )
    expected = np.asarray(multiply(rows, b))
    tolerance = {"bfloat16": 0.02, "int8": 0.06}[dtype] * width**0.5
    plain = rows @ (np.asarray(b) if scale is None else b * scale[:, None]).T
    np.testing.assert_allclose(expected, plain, rtol=0, atol=tolerance)
    for count in (1, 2, 3, 4, 8, 16, 17, 64):
        np.testing.assert_array_equal(multiply(rows[:count], b), expected[:count], str(count))


def test_output_major_moves_the_summed_axes_last() -> None:
    """The equation still gives the same result."""
    for equation, (_, axes) in EQUATIONS.items():
        a, b = _inputs(equation)
        moved, c = matmul.output_major(equation, b)
        assert sorted(moved.split(",")[1].split("->")[0]) == sorted(axes)
        np.testing.assert_allclose(
            np.einsum(moved, a, c), np.einsum(equation, a, b), rtol=1e-5, atol=1e-5
        )
