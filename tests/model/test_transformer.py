"""Properties of the whole model: causality, padding, packing, cached decoding, and the paper's
parameter counts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.config import ModelConfig
from transformer_jax.model.layers import segment_positions, sinusoidal_positions
from transformer_jax.model.transformer import Transformer

TINY = ModelConfig(vocab_size=40, d_model=16, d_ff=24, num_heads=2, num_layers=2)
VARIANTS = {
    "paper": {},
    "pre-norm": {"norm": "pre"},
    "untied": {"tie_embeddings": "none", "source_vocab_size": 30},
    "target-tied": {"tie_embeddings": "target"},
    "biases": {"attention_bias": True},
    "learned": {"positions": "learned", "max_positions": 12},
    "split": {"positions": "split"},
    "narrow keys": {"d_k": 3, "d_v": 5},
    "deep encoder": {"num_decoder_layers": 1, "activation": "silu"},
    "remat": {"remat": True},
}


@functools.cache
def build(**changes: object) -> Transformer:
    make = nnx.jit(lambda: Transformer(dataclasses.replace(TINY, **changes), rngs=nnx.Rngs(0)))
    return make()


@nnx.jit
def run(model: Transformer, *args: jax.Array, **kwargs: jax.Array) -> jax.Array:
    return model(*args, **kwargs)


encode = nnx.jit(lambda model, source: model.encode(source))


def tokens(*shape: int, seed: int = 0, high: int = 30) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(4, high, shape), jnp.int32)


def check_cached_steps(model: Transformer, source: jax.Array, target: jax.Array) -> None:
    rows, length = target.shape
    logits = run(model, source, target)
    cache = model.start_cache(encode(model, source), source != 0, beam_size=2, max_length=length)
    step = jax.jit(lambda tokens, cache: model.decode_step(tokens, cache))
    last = jnp.full((rows, 2), 1)
    for t in range(length):
        scores, cache = step(last, cache)
        for beam in range(2):
            np.testing.assert_allclose(scores[:, beam], logits[:, t], rtol=1e-5, atol=1e-5)
        last = jnp.broadcast_to(target[:, t : t + 1], (rows, 2))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_cached_step_equals_teacher_forcing(changes: dict) -> None:
    check_cached_steps(build(**changes), tokens(3, 7).at[1, 4:].set(0), tokens(3, 6, seed=1))


def test_cached_step_equals_teacher_forcing_in_every_block_of_the_cache() -> None:
    # Blocks of self-attention end at 16, 32, 48, 64, 128 and 140, of the memory at 32, 64, 128 and
    # 135.
    source, target = tokens(3, 135).at[1, 4:].set(0).at[2, 70:].set(0), tokens(3, 140, seed=1)
    check_cached_steps(build(), source, target)


def test_reordered_cache_follows_each_beams_own_history() -> None:
    model = build()
    source = tokens(2, 5)
    cache = model.start_cache(encode(model, source), source != 0, beam_size=3, max_length=5)
    step = jax.jit(lambda tokens, cache: model.decode_step(tokens, cache))
    rng = np.random.default_rng(1)
    histories = np.zeros((2, 3, 0), np.int32)
    last = jnp.full((2, 3), 1)
    for t in range(5):
        scores, cache = step(last, cache)
        for beam in range(3):
            target = jnp.pad(
                jnp.asarray(histories[:, beam]), ((0, 0), (0, 5 - t)), constant_values=5
            )
            np.testing.assert_allclose(
                scores[:, beam], run(model, source, target)[:, t], rtol=1e-4, atol=1e-5
            )
        parents = rng.integers(0, 3, (2, 3))
        chosen = rng.integers(4, 40, (2, 3))
        histories = np.concatenate(
            [np.take_along_axis(histories, parents[:, :, None], axis=1), chosen[:, :, None]], axis=2
        )
        cache, last = cache.reorder(jnp.asarray(parents)), jnp.asarray(chosen)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_no_position_sees_a_later_target(norm: str) -> None:
    model = build(norm=norm)
    source, target = tokens(1, 5), tokens(1, 6, seed=1)

    @jax.jit
    def outputs(vectors: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((6, 6), bool))[None, None]
        return model.decoder(vectors, model.encode(source), mask, jnp.ones((1, 1, 6, 5), bool))[
            0, :, 0
        ]

    vectors = model.target_embedding(target, jnp.arange(6)[None], num_positions=6)
    jacobian = jnp.abs(jax.jacrev(outputs)(vectors)).sum(axis=-1)[:, 0]
    for t, gradient in enumerate(jacobian):
        assert (gradient[t + 1 :] == 0).all()
        assert (gradient[: t + 1] > 0).all()


def test_prediction_ignores_its_own_and_later_labels() -> None:
    model, source, target = build(), tokens(1, 5), tokens(1, 6, seed=1)
    changed = target.at[0, 3:].set(7)
    np.testing.assert_array_equal(
        run(model, source, target)[:, :4], run(model, source, changed)[:, :4]
    )


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_padding_changes_nothing(changes: dict) -> None:
    model, source, target = build(**changes), tokens(2, 5), tokens(2, 6, seed=1)
    padded = run(model, jnp.pad(source, ((0, 3), (0, 4))), jnp.pad(target, ((0, 3), (0, 2))))
    np.testing.assert_allclose(padded[:2, :6], run(model, source, target), rtol=1e-5, atol=1e-5)


def test_packed_rows_equal_separate_rows() -> None:
    model = build()
    sources, targets = (
        [tokens(1, n, seed=n) for n in (3, 5)],
        [tokens(1, n, seed=9 + n) for n in (4, 2)],
    )
    packed = run(
        model,
        jnp.pad(jnp.concatenate(sources, axis=1), ((0, 0), (0, 2))),
        jnp.pad(jnp.concatenate(targets, axis=1), ((0, 0), (0, 1))),
        source_segments_BS=jnp.array([[1] * 3 + [2] * 5 + [0] * 2]),
        target_segments_BT=jnp.array([[1] * 4 + [2] * 2 + [0]]),
    )
    np.testing.assert_allclose(
        packed[:, :4], run(model, sources[0], targets[0]), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        packed[:, 4:6], run(model, sources[1], targets[1]), rtol=1e-5, atol=1e-5
    )


def test_packed_rows_may_be_longer_than_the_learned_positions() -> None:
    model = build(positions="learned", max_positions=6)
    segments = jnp.array([[1] * 5 + [2] * 5, [1] * 3 + [0] * 7])
    packed = {"source_segments_BS": segments, "target_segments_BT": segments}
    rows = jnp.where(segments > 0, tokens(2, 10), 0)
    graph, parameters = nnx.split(model)
    loss = jax.jit(
        lambda p: (
            run(nnx.merge(graph, p), rows, rows, **packed) ** 2 * (segments > 0)[..., None]
        ).sum()
    )
    assert all(
        jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(parameters))
    )
    np.testing.assert_allclose(
        run(model, rows, rows, **packed)[1:, :3], run(model, rows[1:, :3], rows[1:, :3]), atol=1e-5
    )


def test_dropout_needs_a_key_and_is_repeatable() -> None:
    model, source, target = (
        build(dropout=0.5, attention_dropout=0.2, feed_forward_dropout=0.2),
        tokens(1, 5),
        tokens(1, 6),
    )
    plain = run(model, source, target)
    np.testing.assert_array_equal(plain, run(model, source, target))
    dropped = run(model, source, target, dropout_key=jax.random.key(1))
    assert not np.allclose(plain, dropped)
    np.testing.assert_array_equal(
        dropped, run(model, source, target, dropout_key=jax.random.key(1))
    )


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "feed_forward_dropout"])
def test_each_dropout_drops_by_itself(rate: str) -> None:
    model, source, target = build(**{"dropout": 0.0, rate: 0.5}), tokens(1, 5), tokens(1, 6)
    dropped = run(model, source, target, dropout_key=jax.random.key(1))
    assert not np.allclose(dropped, run(model, source, target))
    assert not np.allclose(dropped, run(model, source, target, dropout_key=jax.random.key(2)))
    np.testing.assert_array_equal(
        run(build(dropout=0.0), source, target), run(model, source, target)
    )


def test_sinusoids() -> None:
    table = sinusoidal_positions(50, 8)
    np.testing.assert_allclose(table[7, 0], np.sin(7), rtol=1e-6)
    np.testing.assert_allclose(table[7, 5], np.cos(7 / 10000 ** (4 / 8)), rtol=1e-6)
    # PE(pos + k) is a linear function of PE(pos) (section 3.5): rotations by a fixed angle.
    k, frequency = 3, 10000 ** (-2 / 8)
    rotation = np.array(
        [
            [np.cos(k * frequency), np.sin(k * frequency)],
            [-np.sin(k * frequency), np.cos(k * frequency)],
        ]
    )
    np.testing.assert_allclose(table[k:, 2:4], table[:-k, 2:4] @ rotation.T, atol=1e-5)
    split = sinusoidal_positions(50, 8, layout="split")
    np.testing.assert_allclose(split[7, [0, 3, 4]], [np.sin(7), np.sin(7e-4), np.cos(7)], rtol=1e-5)


def test_segment_positions() -> None:
    np.testing.assert_array_equal(
        segment_positions(jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3]])),
        [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 0, 1, 2]],
    )


def test_learned_positions_end_with_a_clear_error() -> None:
    with pytest.raises(ValueError, match="max_positions is 12"):
        build(positions="learned", max_positions=12)(tokens(1, 13), tokens(1, 3))


def test_computing_in_bfloat16_keeps_parameters_and_logits_in_float32() -> None:
    model = build(dtype="bfloat16")
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    logits = run(model, tokens(2, 5), tokens(2, 6))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(
        logits, run(build(dtype="float32"), tokens(2, 5), tokens(2, 6)), atol=0.1
    )
