"""Transformer: causality, padding, packing, cached decoding, dropout, attention weights."""

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify
from random_weights import random_transformer

from transformer_jax.errors import UserError
from transformer_jax.model.kv_cache import DecoderCache
from transformer_jax.model.transformer import AttentionWeights, Transformer
from transformer_jax.settings.config import ModelConfig
from transformer_jax.tokenization.special_ids import EOS_ID, PAD_ID
from transformer_jax.training.loss import smoothed_cross_entropy

Array = jax.Array | np.ndarray

TINY = ModelConfig(vocab_size=40, d_model=16, d_ff=24, num_heads=2, num_layers=1, dtype="float32")
VARIANTS = {
    "paper": {},
    "pre-norm, untied, biases": {
        "norm": "pre",
        "tie_embeddings": "none",
        "source_vocab_size": 30,
        "attention_bias": True,
    },
    "target-tied, narrow keys": {"tie_embeddings": "target", "d_k": 3, "d_v": 5},
    "learned, deep encoder": {
        "positions": "learned",
        "max_positions": 12,
        "num_layers": 2,
        "num_decoder_layers": 1,
        "activation": "silu",
    },
    "as nn.Transformer, deep decoder": {
        "final_norm": True,
        "attention_bias": True,
        "activation": "gelu",
        "num_decoder_layers": 2,
    },
    "remat": {"activation": "gelu_tanh", "remat": True},
    "no biases": {
        "feed_forward_bias": False,
        "norm_bias": False,
        "tie_embeddings": "embeddings",
    },
    "modern": {"norm": "pre", "norm_type": "rms", "activation": "swiglu", "d_v": 5},
    "t5": {
        **{"positions": "relative", "relative_buckets": 9, "relative_distance": 6, "d_k": 3},
        **{"attention_scale": False, "embedding_scale": "none", "output_scale": True},
        **{"num_layers": 2, "remat": True},
    },
    "umt5": {
        **{"positions": "relative", "relative_buckets": 8, "relative_distance": 5},
        **{"num_layers": 2, "relative_bias": "layer"},
    },
    "bart": {
        **{"positions": "learned", "max_positions": 12, "position_offset": 2},
        **{"share_positions": False, "embedding_norm": True, "softmax_bias": True},
    },
    "m2m_100": {"positions": "tensor2tensor", "position_offset": 2, "embedding_scale": "tokens"},
}


@functools.cache
def build(**changes: object) -> Transformer:
    return random_transformer(dataclasses.replace(TINY, **changes))


@nnx.jit
def compute(model: Transformer, *args: Array, **kwargs: Array) -> jax.Array:
    return model(*args, **kwargs)


def run(model: Transformer, *args: Array, **kwargs: Array) -> np.ndarray:
    return np.asarray(compute(model, *args, **kwargs))


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 30, shape, np.int32)


def changed(array: np.ndarray, *changes: tuple[object, int]) -> np.ndarray:
    """A copy with other values at some positions."""
    array = array.copy()
    for place, value in changes:
        array[place] = value
    return array


def start_cache(
    backend: str, model: Transformer, source: np.ndarray, **settings: object
) -> DecoderCache:
    """Start the cache in the layout for ``backend``, to be used on a CPU."""

    @jax.jit
    def start(source: jax.Array) -> DecoderCache:
        return model.start_cache(model.encode(source), source != 0, **settings)  # type: ignore[arg-type]

    with mock.patch.object(jax, "default_backend", return_value=backend):
        return start(source)


def check_cached_steps(
    model: Transformer, source: np.ndarray, target: np.ndarray, *, backend: str = "cpu"
) -> None:
    """Compare decoding steps with teacher forcing at all real target positions."""
    rows, length = target.shape
    logits = run(model, source, target)
    cache = start_cache(backend, model, source, beam_size=2, max_length=length)
    step = jax.jit(lambda tokens, cache: model.decode_step(tokens, cache))
    last = np.full((rows, 2), 1, np.int32)
    for t in range(length):
        scores, cache = step(last, cache)
        real = target[:, t] > 0
        for beam in range(2):
            found = np.asarray(scores)[real, beam]
            np.testing.assert_allclose(found, logits[real, t], rtol=1e-5, atol=1e-5)
        last = np.repeat(target[:, t : t + 1], 2, axis=1)


# A full row, a padded row, and a row of padding only.
SOURCE = changed(tokens(3, 7), (np.s_[1, 4:], 0), (2, 0))
TARGET = changed(tokens(3, 6, seed=1), (np.s_[1, 3:], 0), (2, 0))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.exhaustive] if name in ("remat", "no biases", "umt5") else [],
        )
        for name in VARIANTS
    ],
)
def test_cached_step_equals_teacher_forcing(name: str) -> None:
    """The caches of accelerators, below, are tested with umt5."""
    check_cached_steps(build(**VARIANTS[name]), SOURCE, TARGET)


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
@pytest.mark.parametrize(
    "name", ["target-tied, narrow keys", "as nn.Transformer, deep decoder", "umt5"]
)
def test_cached_step_of_an_accelerator_equals_teacher_forcing(name: str, backend: str) -> None:
    """GPUs store keys in another order, TPUs store heads side by side."""
    check_cached_steps(build(**VARIANTS[name]), SOURCE, TARGET, backend=backend)


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("cpu", {}),
        ("cpu", {"positions": "relative"}),
        ("tpu", {}),
        pytest.param("tpu", {"positions": "relative"}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_cached_step_equals_teacher_forcing_in_every_block_of_the_cache(
    backend: str, changes: dict
) -> None:
    # Blocks end at 16, 32, 48, 64, 128 and 140 in self-attention, at 32, 64, 128 and 135 in
    # cross-attention.
    source = changed(tokens(3, 135), (np.s_[1, 4:], 0), (np.s_[2, 70:], 0))
    check_cached_steps(build(**changes), source, tokens(3, 140, seed=1), backend=backend)


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_an_infinite_value_does_not_reach_the_next_sentence(backend: str) -> None:
    """A row keeps the history of its last sentence, under a mask."""
    model, source, first = build(), tokens(2, 5), np.full((2, 2), 1, np.int32)
    broken = nnx.clone(model)
    value = broken.decoder.layers[0].self_attention.value.kernel
    value.set_value(jnp.full_like(value.get_value(), jnp.inf))
    fresh = start_cache(backend, model, source, beam_size=2, max_length=3)
    step = nnx.jit(lambda model, cache: model.decode_step(first, cache))
    logits, used = step(broken, fresh)
    assert not np.isfinite(logits).any()
    replaced = used.replace_rows(jnp.arange(2), fresh)
    for a, b in zip(used.history, replaced.history, strict=True):
        assert all(x is y for old, new in zip(a, b, strict=True) for x, y in zip(old, new))
    expected, found = fresh, replaced
    for _ in range(2):  # the second step attends to the history
        (scores, expected), (others, found) = (step(model, cache) for cache in (expected, found))
        np.testing.assert_array_equal(others, scores)


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_reordered_cache_follows_each_beams_own_history(backend: str) -> None:
    model = build()
    source = tokens(2, 5)
    cache = start_cache(backend, model, source, beam_size=3, max_length=5)
    step = jax.jit(lambda tokens, cache: model.decode_step(tokens, cache))
    reorder = jax.jit(DecoderCache.reorder)
    rng = np.random.default_rng(1)
    histories = np.zeros((2, 3, 0), np.int32)
    last = np.full((2, 3), 1, np.int32)
    for t in range(5):
        scores, cache = step(last, cache)
        for beam in range(3):
            target = np.pad(histories[:, beam], ((0, 0), (0, 5 - t)), constant_values=5)
            expected = run(model, source, target)[:, t]
            np.testing.assert_allclose(np.asarray(scores)[:, beam], expected, rtol=1e-4, atol=1e-5)
        parents = rng.integers(0, 3, (2, 3), np.int32)
        chosen = rng.integers(4, 40, (2, 3), np.int32)
        histories = np.concatenate(
            [np.take_along_axis(histories, parents[:, :, None], axis=1), chosen[:, :, None]], axis=2
        )
        cache, last = reorder(cache, parents), chosen


def test_a_cache_for_another_beam_size() -> None:
    model, source = build(), tokens(2, 5)
    cache = start_cache("cpu", model, source, beam_size=3, max_length=5)
    with pytest.raises(AssertionError, match=r"tokens_BW is \(2, 4\); the cache is for \(2, 3\)"):
        model.decode_step(jnp.ones((2, 4), int), cache)


def test_no_position_sees_a_later_target() -> None:
    model = build(norm="pre")
    source, target = tokens(1, 5), tokens(1, 6, seed=1)

    @jax.jit
    @jax.jacrev
    def jacobian_of(vectors: jax.Array) -> jax.Array:
        mask, everything = np.tril(np.ones((1, 1, 6, 6), bool)), np.ones((1, 1, 6, 5), bool)
        return model.decoder(vectors, model.encode(source), mask, everything)[0, :, 0]

    vectors = model.target_embedding(target, np.arange(6)[None], num_positions=6)
    jacobian = np.abs(jacobian_of(vectors)).sum(axis=-1)[:, 0]
    for t, gradient in enumerate(jacobian):
        assert (gradient[t + 1 :] == 0).all()
        assert (gradient[: t + 1] > 0).all()


def test_prediction_ignores_its_own_and_later_labels() -> None:
    before, after = (run(build(), SOURCE, x) for x in (TARGET, changed(TARGET, (np.s_[0, 3:], 7))))
    np.testing.assert_array_equal(before[:1, :4], after[:1, :4])
    assert not np.allclose(before[:1, 4:], after[:1, 4:])


@pytest.mark.parametrize("name", [*list(VARIANTS)[:1], *list(VARIANTS)[3:]])
def test_padding_changes_nothing(name: str) -> None:
    model = build(**VARIANTS[name])
    padded = run(model, SOURCE, TARGET)
    alone = run(model, SOURCE[1:2, :4], TARGET[1:2, :3])
    np.testing.assert_allclose(padded[1:2, :3], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["paper", "t5", "umt5", "bart", "m2m_100"])
def test_packed_rows_equal_separate_rows(name: str) -> None:
    model = build(**VARIANTS[name])
    (first, second), targets = tokens(2, 5), tokens(2, 4, seed=9)
    packed = run(
        model,
        np.array([[*first[:3], *second, 0, 0]]),
        np.array([[*targets[0], *targets[1, :2], 0]]),
        source_segments_BS=np.array([[1] * 3 + [2] * 5 + [0] * 2]),
        target_segments_BT=np.array([[1] * 4 + [2] * 2 + [0]]),
    )
    sources = np.array([[*first[:3], 0, 0], second])
    separate = run(model, sources, changed(targets, (np.s_[1, 2:], 0)))
    np.testing.assert_allclose(packed[0, :4], separate[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(packed[0, 4:6], separate[1, :2], rtol=1e-5, atol=1e-5)


def test_cut_tokens_in_packed_rows_equal_those_in_separate_rows() -> None:
    """The first input of each sentence is never cut, even if the token before it in the row is."""
    model = nnx.clone(build())  # others share it
    first, second = tokens(2, 4)
    segments = np.array([[1] * 3 + [2] * 4])
    row = np.array([[*first[:3], *second]])
    rows = np.array([[*first[:3], 0], second])
    model.set_attributes(zero_id=-1)
    for cut_tokens in (first[:3], second, first[2:3], row[0]):
        cut_row = np.where(np.isin(row, cut_tokens), -1, row)
        packed = run(
            model, cut_row, cut_row, source_segments_BS=segments, target_segments_BT=segments
        )
        cut_rows = np.where(np.isin(rows, cut_tokens), -1, rows)
        separate = run(model, cut_rows, cut_rows)
        assert np.isfinite(packed).all()
        np.testing.assert_allclose(packed[0, :3], separate[0, :3], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(packed[0, 3:], separate[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [False, True])
def test_the_first_input_of_each_packed_sentence_is_trained_or_none(trained: bool) -> None:
    model = build(tie_embeddings="none", train_decoder_start=trained)
    segments = np.array([[1] * 3 + [2] * 4])
    row = tokens(1, 7)
    graph, parameters = nnx.split(model)
    packed = {"source_segments_BS": segments, "target_segments_BT": segments}

    def loss(parameters: nnx.State) -> jax.Array:
        return (nnx.merge(graph, parameters)(row, row, **packed)[0, 3:] ** 2).sum()

    gradient = jax.jit(jax.grad(loss))(parameters)["target_embedding"]["matrix"][...]
    assert bool(np.any(gradient[model.config.decoder_start_id])) == trained
    assert np.any(gradient[row[0, 3]]) and not np.any(gradient[row[0, 0]])


def test_packed_rows_can_exceed_the_learned_positions() -> None:
    model = build(positions="learned", max_positions=6)
    segments = np.array([[1] * 5 + [2] * 5, [1] * 3 + [0] * 7])
    packed = {"source_segments_BS": segments, "target_segments_BT": segments}
    rows = np.where(segments > 0, tokens(2, 10), 0)
    graph, parameters = nnx.split(model)

    def loss(parameters: nnx.State) -> tuple[jax.Array, jax.Array]:
        logits_BTV = nnx.merge(graph, parameters)(rows, rows, **packed)
        return (logits_BTV**2 * (segments > 0)[..., None]).sum(), logits_BTV

    gradient, logits_BTV = jax.jit(jax.grad(loss, has_aux=True))(parameters)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    alone = run(model, rows[1:, :3], rows[1:, :3])
    np.testing.assert_allclose(np.asarray(logits_BTV)[1:, :3], alone, atol=1e-5)


RATES = {"dropout": 0.5, "attention_dropout": 0.2, "feed_forward_dropout": 0.3}


def test_dropout_needs_a_key_and_is_repeatable() -> None:
    model = build(**RATES)
    plain = run(model, SOURCE, TARGET)
    np.testing.assert_array_equal(plain, run(build(dropout=0.0), SOURCE, TARGET))
    np.testing.assert_array_equal(plain, run(model, SOURCE, TARGET))
    dropped = run(model, SOURCE, TARGET, dropout_key=jax.random.key(1))
    assert not np.allclose(plain, dropped)
    again = run(model, SOURCE, TARGET, dropout_key=jax.random.key(1))
    np.testing.assert_array_equal(dropped, again)


@pytest.mark.parametrize("name", ["paper", pytest.param("umt5", marks=pytest.mark.exhaustive)])
def test_activation_checkpointing_repeats_dropout(name: str) -> None:
    """And has the same gradients."""
    key, losses = jax.random.key(1), []
    for remat in (False, True):
        graph, state = nnx.split(build(**VARIANTS[name], **RATES, remat=remat))

        @jax.jit
        @jax.value_and_grad
        def loss(state: nnx.State, graph: object = graph) -> jax.Array:
            logits_BTV = nnx.merge(graph, state)(SOURCE, TARGET, dropout_key=key)
            return (logits_BTV**2 * (TARGET > 0)[..., None]).sum()

        losses.append(nnx.to_pure_dict(loss(state)[1]) | {"loss": loss(state)[0]})
    plain, recomputed = losses
    chex.assert_trees_all_close(recomputed, plain, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "feed_forward_dropout"])
def test_each_kind_of_dropout_works_alone(rate: str) -> None:
    model = build(**{"dropout": 0.0, rate: 0.5})
    dropped = run(model, SOURCE, TARGET, dropout_key=jax.random.key(1))
    assert not np.allclose(dropped, run(build(dropout=0.0), SOURCE, TARGET))
    assert not np.allclose(dropped, run(model, SOURCE, TARGET, dropout_key=jax.random.key(2)))


def test_too_many_learned_positions_are_an_error() -> None:
    with pytest.raises(
        UserError, match=r"has 13 positions; expected at most 12, the number of learned positions"
    ):
        run(build(**VARIANTS["learned, deep encoder"]), tokens(1, 13), tokens(1, 3))


def test_bfloat16_models_have_float32_parameters_and_logits() -> None:
    model = build(dtype="bfloat16")
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    logits = run(model, SOURCE, TARGET)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, run(build(), SOURCE, TARGET), atol=0.1)


def test_64_bit_types_change_nothing() -> None:
    settings = dict.fromkeys(("attention_bias", "softmax_bias"), True)

    def built() -> Transformer:
        return Transformer(dataclasses.replace(TINY, **settings), rngs=nnx.Rngs(0))

    def loss(model: Transformer) -> jax.Array:
        hidden = model.hidden(SOURCE, TARGET)
        return smoothed_cross_entropy(
            hidden, model.output_matrix_VD, TARGET, bias_V=model.output_bias_V
        ).loss

    expected = jax.tree.leaves(nnx.state(built()))
    with jax.enable_x64(True):
        model = built()
        for ours, theirs in zip(jax.tree.leaves(nnx.state(model)), expected, strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        gradients = nnx.jit(nnx.grad(loss))(model)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradients))
        check_cached_steps(model, SOURCE, TARGET)


def padded(rows: list[list[int]], length: int) -> np.ndarray:
    array_BL = np.full((len(rows), length), PAD_ID, np.int32)
    for row, ids in zip(array_BL, rows, strict=True):
        row[: len(ids) + 1] = [*ids, EOS_ID]
    return array_BL


SOURCE_BS = padded([[4, 5, 6, 7, 8], [9], []], 8)
TARGET_BT = padded([[7, 7, 4], [5, 6, 8, 9, 4], [6]], 7)


@pytest.mark.parametrize(
    "name",
    [
        "as nn.Transformer, deep decoder",
        pytest.param("remat", marks=pytest.mark.exhaustive),
        "no biases",
        "modern",
    ],
)
def test_attention_weights_of_every_layer_and_head(name: str) -> None:
    """Weights of real tokens sum to 1; padding and later targets get 0."""
    model = build(**VARIANTS[name])
    look = nnx.jit(lambda model, *sides: model.attention_weights(*sides))
    found = jax.tree.map(np.asarray, look(model, SOURCE_BS, TARGET_BT))
    config = model.config
    layers = config.decoder_layers
    assert [len(part) for part in found] == [config.num_layers, layers, layers]
    for part, rows, columns in (
        (found.encoder, SOURCE_BS, SOURCE_BS),
        (found.decoder, TARGET_BT, TARGET_BT),
        (found.cross, TARGET_BT, SOURCE_BS),
    ):
        for layer in part:
            shape = (3, 2, rows.shape[1], columns.shape[1])
            assert layer.shape == shape and layer.dtype == np.float32
            real = np.broadcast_to((rows != PAD_ID)[:, None], shape[:3])
            np.testing.assert_allclose(layer.sum(-1), real, atol=1e-5)
            padding = np.broadcast_to((columns == PAD_ID)[:, None, None], shape)
            assert (layer[padding] == 0).all()
    for layer in found.decoder:
        assert (layer == np.tril(layer)).all()


def test_unused_attention_weights_are_not_computed() -> None:
    model = build(num_layers=2)

    def flops(choose: Callable[[AttentionWeights], object]) -> float:
        look = jax.jit(lambda s, t: choose(model.attention_weights(s, t)))
        return look.lower(SOURCE_BS, TARGET_BT).compile().cost_analysis()["flops"]

    everything = flops(lambda found: found)
    assert flops(lambda found: found.cross[0]) < 0.9 * everything
    assert flops(lambda found: found.encoder[0]) < 0.3 * everything


def test_checkify_finds_token_ids_outside_the_vocabulary() -> None:
    """Its index checks work on any device and are off by default."""
    model, source, target = build(), tokens(1, 5), tokens(1, 6)
    check = jax.jit(checkify.checkify(model.__call__, errors=checkify.index_checks))
    assert check(source, target)[0].get() is None
    for wrong in (40, -1, -100):
        error, logits = check(changed(source, (np.s_[0, 2], wrong)), target)
        assert np.isnan(logits).any()
        assert f"index {wrong} is out of bounds for axis 0 with size 40" in error.get()
        assert check(source, changed(target, (np.s_[0, 2], wrong)))[0].get() is not None


def test_the_model_imports_little_beyond_flax() -> None:
    """Other projects can import single modules cheaply."""
    code = """
import sys, jax, numpy, flax.nnx
before = {name.split(".")[0] for name in sys.modules}
from transformer_jax import MultiHeadAttention, Transformer, dot_product_attention
import transformer_jax.model.transformer
print(*sorted({name.split(".")[0] for name in sys.modules} - before))
"""
    brought = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    assert set(brought) - sys.stdlib_module_names <= {"transformer_jax", "lazy_loader"}
