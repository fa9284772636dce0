"""Attention kernels against their reference implementation: results, gradients, selection."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from reference import against_reference, with_gradients

from benchmarks.hlo import collectives
from transformer_jax.decoding.engine import Engine
from transformer_jax.decoding.length_buckets import pad_batch
from transformer_jax.decoding.search import Sentence
from transformer_jax.devices.sharding import batch_sharding, make_mesh
from transformer_jax.model import attention_kernel
from transformer_jax.model.attention import (
    MultiHeadAttention,
    attention_mask,
    dot_product_attention,
)
from transformer_jax.model.attention_kernel import short_attention
from transformer_jax.model.transformer import Transformer
from transformer_jax.settings.config import DecodingConfig, MeshConfig, ModelConfig
from transformer_jax.translation import scoring
from transformer_jax.translation.scoring import Scorer

# T, S, d_k, d_v: powers of two, or lengths that leave a block partly empty
SHAPES = [
    (32, 32, 64, 64),
    (1, 32, 16, 16),
    (7, 33, 16, 32),
    (33, 1, 32, 16),
    (64, 100, 128, 64),
    (100, 100, 64, 128),
]


def _inputs(T: int, S: int, d_k: int, d_v: int, dtype: Any = np.float32) -> list[np.ndarray]:
    """Queries, keys, values and the cotangent for 2 rows and 2 heads."""
    rng = np.random.default_rng(T)
    shapes = (2, T, 2, d_k), (2, S, 2, d_k), (2, S, 2, d_v), (2, T, 2, d_v)
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def _packed(length: int, *, first: int = 1) -> np.ndarray:
    """Segment ids of a row of several sentences with padding, and of a row of padding only."""
    row = first + np.arange(length) // 9
    row[length - length // 5 :] = 0
    return np.array([row, np.zeros(length)], np.int32)


def _with_gradients(
    attention: Callable[..., jax.Array], mask: jax.Array, inputs: list[jax.Array]
) -> list[np.ndarray]:
    *arrays, cotangent = inputs
    return with_gradients(lambda *x: attention(*x, mask), arrays, cotangent)


def _kernel(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    return short_attention(q, k, v, mask, interpret=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_attention_and_its_gradient(shape: tuple[int, ...]) -> None:
    T, S = shape[:2]
    mask = attention_mask(_packed(T), _packed(S, first=0))
    if T == S:
        mask = attention_mask(_packed(T), _packed(T), causal=True)
    *arrays, cotangent = _inputs(*shape)
    against_reference(
        lambda *x: _kernel(*x, mask),
        lambda *x: dot_product_attention(*x, mask),
        arrays,
        {"rtol": 1e-4, "atol": 1e-5},
        cotangent=cotangent,
    )


def test_bfloat16_is_nearly_as_exact_as_the_reference_implementation() -> None:
    """Like flash attention, the kernel also rounds the gradient of the scores for its matmuls."""
    mask = attention_mask(_packed(33), _packed(33), causal=True)
    inputs = _inputs(33, 33, 64, 64, jnp.bfloat16)
    exact = _with_gradients(dot_product_attention, mask, [x.astype(np.float32) for x in inputs])
    ours, plain = (_with_gradients(f, mask, inputs) for f in (_kernel, dot_product_attention))
    for x, other, expected in zip(ours, plain, exact, strict=True):
        assert np.linalg.norm(x - expected) < 1.3 * np.linalg.norm(other - expected)


@pytest.mark.parametrize(
    ("memory", "d_v", "use_bias"),
    [(False, 16, False), (False, 32, True), (True, 16, True), (True, 32, False)],
)
def test_merged_projections_equal_separate_projections(
    memory: bool, d_v: int, use_bias: bool
) -> None:
    """Results and gradients of self-attention and cross-attention."""
    layer = MultiHeadAttention(
        32, 2, d_k=16, d_v=d_v, use_bias=use_bias, dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    graph, parameters = nnx.split(layer)
    parameters = jax.tree.map(lambda x: x + 0.1, parameters)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((2, length, 32), np.float32) for length in (13, 21)[: 1 + memory]]
    mask = attention_mask(_packed(13), _packed(21) if memory else _packed(13))

    def merged(parameters: Any, *inputs: jax.Array) -> jax.Array:
        layer = nnx.merge(graph, parameters)
        arrays = layer.project(*inputs, merged=True)
        return layer.output(short_attention(*arrays, mask, interpret=True))

    def separate(parameters: Any, *inputs: jax.Array) -> jax.Array:
        return nnx.merge(graph, parameters)(*inputs, mask_BHTS=mask)

    def run(function: Callable[..., jax.Array]) -> Any:
        out, gradient = jax.vjp(function, parameters, *inputs)
        return out, gradient(jnp.cos(out))

    chex.assert_trees_all_close(
        *map(jax.jit(run, static_argnums=0), (merged, separate)), rtol=1e-4, atol=1e-5
    )


def test_a_fully_masked_query_has_equal_weights_and_no_gradient() -> None:
    inputs = _inputs(20, 20, 16, 16)
    mask = np.zeros((2, 1, 20, 20), bool)
    out, d_q, d_k, _ = _with_gradients(_kernel, mask, inputs)
    expected = np.broadcast_to(inputs[2].mean(axis=1, keepdims=True), out.shape)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    assert not d_q.any()
    assert not d_k.any()


def test_activation_checkpointing_gives_the_same_bits() -> None:
    inputs, mask = _inputs(16, 16, 16, 16), np.ones((2, 1, 16, 16), bool)
    once = _with_gradients(_kernel, mask, inputs)
    again = _with_gradients(jax.checkpoint(_kernel), mask, inputs)
    for x, y in zip(once, again, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.devices(4)
def test_devices_share_rows_and_heads_without_communication() -> None:
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    mask = attention_mask(_packed(24), _packed(24), causal=True)
    inputs = _inputs(24, 24, 16, 16)
    alone = _with_gradients(_kernel, mask, inputs)

    def run(mask: jax.Array, *inputs: jax.Array) -> Any:
        *arrays, cotangent = inputs
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            out, gradient = jax.vjp(lambda *x: _kernel(*x, mask), *arrays)
        return out, *gradient(cotangent)

    heads = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    shardings = batch_sharding(mesh), *[heads] * 4
    compiled = jax.jit(run, in_shardings=shardings).lower(mask, *inputs).compile()
    assert not collectives(compiled.as_text())
    together = compiled(*jax.device_put((mask, *inputs), shardings))
    for x, y in zip(together, alone, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def _kernels(attention: Callable[..., Any], *arrays: jax.Array, platform: str = "cuda") -> int:
    """Count the kernels in a program lowered for an absent GPU."""
    gpu = AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        lowered = jax.jit(attention).trace(*arrays).lower(lowering_platforms=(platform,))
    return lowered.as_text().count("gpu.triton")


@pytest.mark.usefixtures("on_a_gpu")
def test_the_kernel_is_selected_for_bfloat16_without_attention_dropout() -> None:
    layer = MultiHeadAttention(128, 2, dropout=0.1, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    queries, memory = (np.ones((2, length, 128), jnp.bfloat16) for length in (50, 24))
    inputs = queries, memory, np.ones((2, 1, 50, 24), bool)

    def gradients(queries: jax.Array, memory: jax.Array, mask: jax.Array) -> Any:
        def total(*arrays: jax.Array) -> jax.Array:
            return layer(*arrays, mask).astype(jnp.float32).sum()

        return jax.grad(total, argnums=(0, 1))(queries, memory)

    def with_weights(*arrays: jax.Array) -> Any:
        sowing = nnx.clone(layer)
        sowing.sow_weights = True
        return nnx.capture(sowing, nnx.Intermediate)(*arrays)

    assert _kernels(layer, *inputs) == 1
    assert _kernels(gradients, *inputs) == 1  # the result itself is not needed
    assert _kernels(partial(layer, dropout_key=jax.random.key(0)), *inputs) == 0
    assert _kernels(layer, *inputs, platform="cpu") == 0
    assert _kernels(with_weights, *inputs) == 0


def _chosen(*shape: int, mask: bool = True, dtype: Any = jnp.bfloat16) -> bool:
    """Check whether the kernel is selected for T, S, d_k, d_v with 2 rows and 2 heads."""
    T, S, d_k, d_v = shape
    mask_B1TS = jax.ShapeDtypeStruct((2, 1, T, S), bool) if mask else None
    x_BTD = jax.ShapeDtypeStruct((2, T, 8), dtype)
    query, value = (
        SimpleNamespace(kernel=jax.ShapeDtypeStruct((8, 2, width), jnp.float32), dtype=dtype)
        for width in (d_k, d_v)
    )
    return attention_kernel.supports(x_BTD, query, value, mask_B1TS)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_layer_has_two_matmuls_on_a_gpu() -> None:
    """One computes queries, keys and values; one computes the output."""
    layer = MultiHeadAttention(32, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    mask = np.ones((2, 1, 13, 13), bool)
    x = np.ones((2, 13, 32), jnp.bfloat16)
    gpu = AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        traced = jax.jit(lambda x: layer(x, mask_BHTS=mask)).trace(x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("gpu.triton") == 1
    assert text.count("stablehlo.dot_general") == 2


@pytest.mark.usefixtures("on_a_gpu")
def test_kernels_are_selected_by_length_width_dtype_and_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _chosen(64, 7, 64, 32)
    assert not _chosen(64, 7, 64, 32, dtype=jnp.float32)
    assert not _chosen(64, 7, 64, 24)
    assert not _chosen(64, 7, 64, 32, mask=False)
    assert not _chosen(64, 66, 64, 64)
    for sizes, splits in (((2, 1, 2), True), ((2, 2, 1), False), ((1, 1, 4), False)):
        with jax.sharding.use_abstract_mesh(AbstractMesh(sizes, ("data", "fsdp", "tensor"))):
            assert _chosen(32, 32, 64, 64) is splits

    def gpu(capability: str) -> None:
        device = SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda: [device])

    gpu("9.0")
    assert _chosen(64, 7, 64, 32)
    for other in ("7.5", "gfx942"):  # no bfloat16 matmuls; AMD
        gpu(other)
        assert not _chosen(64, 7, 64, 32)
    gpu("9.0")
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert not _chosen(64, 7, 64, 32)


@pytest.mark.usefixtures("on_a_gpu")
def test_cpu_computations_on_a_gpu_machine_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = attention_mask(_packed(24), _packed(24))
    layer = MultiHeadAttention(32, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x, _, _, cotangent = (x.reshape(2, 24, 32) for x in _inputs(24, 24, 16, 16, jnp.bfloat16))

    def compute() -> list[np.ndarray]:
        return with_gradients(jax.jit(lambda x: layer(x, mask_BHTS=mask)), [x], cotangent)

    chosen = compute()
    monkeypatch.undo()
    for found, expected in zip(chosen, compute(), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("program", ["encoder of a search", "scorer"])
def test_programs_of_one_device_use_the_kernel_beside_other_devices(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    config = ModelConfig(40, d_model=32, d_ff=32, num_heads=2, num_layers=1, dtype="bfloat16")
    model = Transformer(config, rngs=nnx.Rngs(0))
    tokens = np.full((4, 24), 5, np.int32)
    if program == "scorer":
        monkeypatch.setattr(scoring, "check_vocabulary", lambda *_: None)
        scorer: Any = Scorer(model, cast(Any, None))
        assert _kernels(scorer._score_batch, scorer._parameters[0], tokens, tokens) > 0
    else:
        engine = Engine(model, DecodingConfig(batch_size=4))
        bucket = engine.buckets[0]
        block = pad_batch(
            bucket,
            [Sentence([5] * 23)] * 4,
            lambda _: 24,
            engine.method,
        )
        encode = partial(engine._search.encode, bucket=bucket)
        assert _kernels(encode, engine._weights, block) == 1
