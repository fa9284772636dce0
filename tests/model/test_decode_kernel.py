"""Decoding kernels against their reference implementation: results, selection, programs."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding
from random_weights import random_transformer

from benchmarks import compile_for, hlo
from transformer_jax.decoding.engine import Engine
from transformer_jax.model import decode_kernel
from transformer_jax.model.kv_cache import DecoderCache, empty_cache
from transformer_jax.model.transformer import Transformer, with_cast_weights
from transformer_jax.settings.config import DecodingConfig, ModelConfig

TINY = ModelConfig(
    vocab_size=40,
    d_model=16,
    d_ff=24,
    num_heads=2,
    num_layers=1,
    num_decoder_layers=2,
    dtype="float32",
)
# B, W, H, d_k, d_v, T, S
SHAPES = [(3, 4, 2, 16, 16, 32, 16), (4, 5, 1, 8, 32, 48, 33), (2, 1, 3, 64, 16, 16, 7)]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.fixture
def interpreted(on_a_gpu: None) -> Iterator[None]:
    """Decoding steps use interpreted kernels."""

    def cuda(*arrays: Any, cuda: Callable[..., Any], default: Any) -> Any:
        return cuda(*arrays)

    kernels = {
        name: partial(getattr(decode_kernel, name), interpret=True)
        for name in ("attend_to_history", "attend_to_source")
    }
    replaced = mock.patch.object(jax.lax, "platform_dependent", cuda)
    with replaced, mock.patch.multiple(decode_kernel, **kernels):
        yield


def _arrays(shape: tuple[int, ...], dtype: Any) -> tuple[Any, list[jax.Array]]:
    """Make a cache with random positions and ancestors, and queries, keys and values. Row 0 has no
    source, and row 1 is past the last position.
    """
    B, W, H, d_k, d_v, T, S = shape
    rng = np.random.default_rng(T)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    mask = rng.random((B, S)) < 0.7
    mask[0], mask[1, 2:] = False, False
    cache = empty_cache(
        [(normal(B, S, H, d_k), normal(B, S, H, d_v))], mask, beam_size=W, max_length=T
    )
    position = rng.integers(0, T, B, np.int32)
    position[1] = T + 2
    is_written = np.arange(T) < position[:, None, None]
    cache = dataclasses.replace(
        cache,
        history=jax.tree.map(lambda x: normal(*x.shape), cache.history),
        ancestors_BWT=jnp.asarray(np.where(is_written, rng.integers(0, W, (B, W, T)), -1)),
        position_B=jnp.asarray(position),
    )
    return cache, [normal(B, W, H, K) for K in (d_k, d_k, d_v)]


def _step(
    cache: DecoderCache, arrays: list[jax.Array], *, merged: bool = False
) -> tuple[Any, Any, DecoderCache]:
    [layer] = cache.layers()
    projected = [jnp.concatenate(arrays, axis=-1)] if merged else arrays
    out_BWHK, of_source_BWHK = (
        layer.attend_to_history(*projected),
        layer.attend_to_source(arrays[0]),
    )
    return out_BWHK, of_source_BWHK, cache.append([layer])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, jnp.float32) for shape in SHAPES),
        (SHAPES[0], jnp.bfloat16),
        pytest.param(SHAPES[1], jnp.bfloat16, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_kernels_equal_the_reference_implementation(
    shape: tuple[int, ...], dtype: Any, request: pytest.FixtureRequest
) -> None:
    with mock.patch.object(jax, "default_backend", return_value="gpu"):  # one block
        cache, arrays = _arrays(shape, dtype)
    expected = jax.jit(lambda *inputs: _step(*inputs))(cache, arrays)
    # Slots that no beam sees may hold anything.
    W, T = shape[1], shape[5]
    slots_TW = np.asarray(cache.ancestors_BWT)[:, :, :, None] == np.arange(W)
    unseen = ~slots_TW.any(axis=1).reshape(len(slots_TW), 1, T * W, 1)
    left = jax.tree.map(lambda x: jnp.where(unseen, jnp.inf, x), cache.history)
    request.getfixturevalue("interpreted")
    step = jax.jit(partial(_step, merged=arrays[0].shape == arrays[2].shape))
    found = step(dataclasses.replace(cache, history=left), arrays)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == jnp.float32 else {"atol": 0.03}
    for x, y in zip(found[:2], expected[:2], strict=True):
        assert x.dtype == y.dtype == dtype
        x, y = (np.asarray(each, np.float32) for each in (x, y))
        rows = slice(0 if x is found[0] else 1, None)
        np.testing.assert_allclose(x[rows], y[rows], **tolerance)
    new = np.arange(T * W)[:, None] // W == np.asarray(cache.position_B)[:, None, None, None]
    blocks = (jax.tree.leaves(each[2].history) for each in (found, expected))
    for x, y in zip(*blocks, strict=True):
        np.testing.assert_array_equal(np.where(unseen & ~new, np.inf, y), x)
    after = (dataclasses.replace(each[2], history=()) for each in (found, expected))
    jax.tree.map(np.testing.assert_array_equal, *after)


@pytest.mark.parametrize(
    "changes", [{"d_k": 16, "d_v": 16, "attention_bias": True}, {"d_k": 16, "d_v": 4}], ids=str
)
@pytest.mark.usefixtures("interpreted")
def test_cached_steps_with_kernels_equal_teacher_forcing(changes: dict[str, Any]) -> None:
    """Rows have different lengths, and caches hold NaN from earlier sentences."""
    model = random_transformer(dataclasses.replace(TINY, num_decoder_layers=1, **changes))
    source, target = np.random.default_rng(0).integers(4, 40, (2, 3, 37), np.int32)
    source[1, 4:] = 0
    logits = jax.jit(model)(source, target)
    cache = model.start_cache(model.encode(source), source != 0, beam_size=2, max_length=50)
    left = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), cache.history)
    cache = dataclasses.replace(cache, history=left)
    step, last = jax.jit(with_cast_weights(model).decode_step), np.full((3, 2), 1, np.int32)
    for t in range(37):
        scores, cache = step(last, cache)
        np.testing.assert_allclose(scores[:, 1], logits[:, t], rtol=1e-5, atol=1e-5)
        last = np.repeat(target[:, t : t + 1], 2, axis=1)


def _kernels(beam_size: int = 4, *, platform: str = "cuda", **changes: Any) -> int:
    """Count the kernels, which both layers share, in a step lowered for an absent GPU."""
    model = random_transformer(dataclasses.replace(TINY, **changes))
    source = jnp.ones((2, 5), jnp.int32)

    def step(source: jax.Array) -> Any:
        sizes = {"beam_size": beam_size, "max_length": 9}
        cache = model.start_cache(model.encode(source), source != 0, **sizes)
        return model.decode_step(jnp.ones((2, beam_size), jnp.int32), cache)

    gpu = AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        lowered = jax.jit(step).trace(source).lower(lowering_platforms=(platform,))
    return lowered.as_text().count("gpu.triton")


@pytest.mark.usefixtures("on_a_gpu")
def test_kernels_are_selected_by_width_beam_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _kernels() == _kernels(5) == _kernels(dtype="bfloat16", d_k=16, d_v=4) == 2
    assert _kernels(d_k=12) == _kernels(d_v=12) == _kernels(200) == 0
    assert _kernels(platform="cpu") == 0
    device = SimpleNamespace(compute_capability="7.5")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert _kernels() == 0


def test_the_search_on_an_h200_has_one_loop_and_copies_no_cache_and_no_weights(
    h200: jax.Device,
) -> None:
    config = dataclasses.replace(TINY, dtype="bfloat16", vocab_size=600, d_model=64)
    with compile_for.running_on("gpu", [h200]):
        engine = Engine(Transformer(config, rngs=nnx.Rngs(0)), DecodingConfig(batch_size=8))
        [bucket, *_] = engine.buckets
        text = compile_for.lowered_search(engine, SingleDeviceSharding(h200)).compile().as_text()
        rows = jax.eval_shape(lambda: engine.new_rows(bucket))
    every = hlo.computations(text)
    kernels = [
        [x for x in each.values() if "$xla.gpu.triton" in x.attributes] for each in every.values()
    ]
    assert [len(each) for each in kernels if each] == [4]
    shapes = {x.shape for x in jax.tree.leaves(rows.cache) if len(x.shape) == 4}
    names = [name for name in every if "fused" not in name]
    assert not hlo.copied(every, names, shapes)
    weights = [x for each in every.values() for x in each.values() if x.type.startswith("bf16")]
    assert "concatenate" not in {x.kind for x in weights}  # merged before the loop
