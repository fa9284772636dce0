"""Modules at their edges: sizes that do not match, export, summaries, meshes, dtypes."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array, export

from tests.model.random_weights import random_transformer
from transformer_jax import (
    BeamSearch,
    FeedForward,
    ModelConfig,
    MultiHeadAttention,
    Transformer,
    UserError,
    attention_mask,
    dot_product_attention,
    make_mesh,
    search,
    smoothed_cross_entropy,
)
from transformer_jax.devices.sharding import batch_sharding, check_rows, state_shardings
from transformer_jax.model.transformer import with_cast_weights
from transformer_jax.settings.config import MeshConfig

CONFIG = ModelConfig(vocab_size=20, d_model=16, d_ff=32, num_heads=2, num_layers=1, dtype="float32")
MODEL = random_transformer(CONFIG)
SOURCE_BS = jnp.array([[5, 6, 7, 8, 2], [5, 6, 2, 0, 0]])
TARGET_BT = jnp.array([[5, 6, 7, 2], [5, 2, 0, 0]])
X_BTD = jnp.ones((2, 4, 16))
MEMORY_BSD = jnp.ones((2, 5, 16))
ATTENTION = MultiHeadAttention(16, 4, rngs=nnx.Rngs(0))


def mask(*shape: int) -> Array:
    return jnp.ones(shape, bool)


def integers(*shape: int) -> Array:
    return jnp.ones(shape, int)


def loss(target_BT: Array, matrix_VD: Any = None, **options: Any) -> Any:
    matrix_VD = MODEL.output_matrix_VD if matrix_VD is None else matrix_VD
    return smoothed_cross_entropy(X_BTD, matrix_VD, target_BT, **options)


def attend(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *more: Any) -> Array:
    return dot_product_attention(jnp.ones(q), jnp.ones(k), jnp.ones(v), *more)


MISMATCHES: dict[str, tuple[Callable[[], Any], str]] = {
    "mask S": (
        lambda: ATTENTION(X_BTD, MEMORY_BSD, mask(2, 1, 4, 7)),
        "mask has shape [2, 1, 4, 7], axes B, H, T, S; expected S = 5, as in memory with shape "
        "[2, 5, 16].",
    ),
    "self mask S": (lambda: ATTENTION(X_BTD, None, mask(2, 1, 4, 7)), "mask .* S = 4"),
    "mask T": (lambda: ATTENTION(X_BTD, MEMORY_BSD, mask(2, 1, 3, 5)), "mask .* T = 4"),
    "mask H": (lambda: ATTENTION(X_BTD, MEMORY_BSD, mask(2, 3, 4, 5)), "mask .* H = 4"),
    "memory D": (lambda: ATTENTION(X_BTD, jnp.ones((2, 5, 8))), "memory .* D = 16"),
    "memory B": (lambda: ATTENTION(X_BTD, jnp.ones((1, 5, 16))), "memory .* B = 2"),
    "input D": (lambda: ATTENTION(jnp.ones((2, 5, 8))), "the input .* D = 16, as in weights"),
    "q, k: B": (lambda: attend((2, 4, 2, 8), (3, 5, 2, 8), (2, 5, 2, 8)), "k .* B = 2"),
    "q, k: K": (lambda: attend((2, 4, 2, 8), (2, 5, 2, 4), (2, 5, 2, 8)), "k .* K = 8"),
    "k, v: S": (lambda: attend((2, 4, 2, 8), (2, 5, 2, 8), (2, 6, 2, 8)), "v .* S = 5"),
    "bias S": (
        lambda: attend((2, 4, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8), None, jnp.ones((1, 2, 4, 6))),
        "bias .* S = 5",
    ),
    "segments B": (lambda: attention_mask(TARGET_BT, integers(3, 5)), "key_segments .* B = 2"),
    "causal": (lambda: attention_mask(TARGET_BT, SOURCE_BS, causal=True), "key_segments .* L = 4"),
    "target B": (lambda: MODEL(SOURCE_BS, integers(3, 4)), "target .* B = 2"),
    "target B of weights": (
        lambda: MODEL.attention_weights(SOURCE_BS, integers(3, 4)),
        "target .* B = 2",
    ),
    "source segments": (
        lambda: MODEL(
            SOURCE_BS, TARGET_BT, source_segments_BS=TARGET_BT, target_segments_BT=TARGET_BT
        ),
        "source_segments .* S = 5",
    ),
    "one side of segments": (
        lambda: MODEL(SOURCE_BS, TARGET_BT, source_segments_BS=SOURCE_BS),
        "Only one of source_segments_BS and target_segments_BT is given",
    ),
    "labels T": (lambda: loss(SOURCE_BS), "target .* T = 4, as in hidden"),
    "labels of one T": (lambda: loss(SOURCE_BS[:, :1]), "target .* T = 4, as in hidden"),
    "labels B": (lambda: loss(integers(3, 4)), "target .* B = 2"),
    "softmax D": (lambda: loss(TARGET_BT, jnp.ones((20, 8))), "matrix .* D = 16"),
    "softmax bias": (lambda: loss(TARGET_BT, bias_V=jnp.ones(19)), "bias .* V = 20"),
    "hidden D": (lambda: MODEL.logits(jnp.ones((2, 4, 8))), "hidden .* D = 16"),
    "source mask": (
        lambda: MODEL.start_cache(MEMORY_BSD, mask(2, 7), beam_size=2, max_length=8),
        "source_mask .* S = 5",
    ),
    "feed-forward D": (
        lambda: FeedForward(CONFIG, rngs=nnx.Rngs(0))(jnp.ones((2, 4, 8))),
        "the input .* D = 16",
    ),
    "layer mask": (
        lambda: MODEL.encoder.layers[0](X_BTD, mask(2, 1, 5, 5)),
        r"mask has shape \[2, 1, 5, 5\], axes B, H, S, S; expected S = 4, as in x",
    ),
    "decoder mask": (
        lambda: MODEL.decoder(X_BTD, MEMORY_BSD, mask(2, 1, 4, 4), mask(2, 1, 4, 6)),
        "cross_mask .* S = 5",
    ),
    "positions": (
        lambda: MODEL.target_embedding(SOURCE_BS, TARGET_BT, num_positions=9),
        "positions .* L = 5",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_wrong_size_is_named(name: str) -> None:
    call, message = MISMATCHES[name]
    pattern = message if ".*" in message or "\\" in message else re.escape(message)
    with pytest.raises(UserError, match=pattern):
        call()


def test_axes_of_size_1_broadcast_in_masks_and_biases() -> None:
    """Also the axis of heads, and values can be wider than keys."""
    q, k, v = (2, 4, 2, 8), (2, 5, 2, 8), (2, 5, 2, 3)
    out_BTHK = attend(q, k, v, mask(1, 1, 1, 5), jnp.zeros((1, 1, 4, 5)))
    assert out_BTHK.shape == (2, 4, 2, 3)


def translate(model: Transformer, source_BS: Array) -> tuple[Array, ...]:
    """Beam search over the model, as in docs/search.md."""
    mask_BS = source_BS != 0
    cache = model.start_cache(model.encode(source_BS), mask_BS, beam_size=2, max_length=8)
    result = search(
        BeamSearch(bos_id=1, eos_id=2, pad_id=0, beam_size=2),
        model.decode_step,
        cache,
        limit_B=mask_BS.sum(axis=1) + 2,
        max_length=8,
        reorder=lambda cache, parents_BW: cache.reorder(parents_BW),
    )
    return result.tokens_BNL, result.scores_BN


def exported(function: Callable[..., Any], *arrays: Any) -> Callable[..., Any]:
    """The function after a round trip through ``jax.export``, as in docs/own_models.md."""
    checks = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    program = export.export(jax.jit(function), disabled_checks=checks)(*arrays)
    return export.deserialize(program.serialize()).call


def tokens(*shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)]
)
def test_an_exported_translate_function_takes_any_number_and_length_of_sentences(dtype) -> None:
    config = ModelConfig(vocab_size=20, d_model=16, d_ff=32, num_heads=2, num_layers=1, dtype=dtype)
    model = with_cast_weights(random_transformer(config))

    def run(source_BS: Array) -> tuple[Array, ...]:
        return translate(model, source_BS)

    B, S = export.symbolic_shape("B, S", constraints=["S <= 32"])
    call = exported(run, tokens(B, S))
    for source_BS in (SOURCE_BS, SOURCE_BS[:1, :3]):
        for actual, expected in zip(call(source_BS), jax.jit(run)(source_BS), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"positions": "relative", "norm": "pre", "norm_type": "rms"},
        {"positions": "learned", "max_positions": 100},
    ],
    ids=["sinusoidal", "relative", "learned"],
)
def test_an_exported_model_takes_symbolic_lengths(settings: dict[str, Any]) -> None:
    config = ModelConfig(
        vocab_size=20, d_model=16, d_ff=32, num_heads=2, num_layers=1, dtype="float32", **settings
    )
    model = random_transformer(config)

    def run(source_BS: Array, target_BT: Array) -> Array:
        return model(source_BS, target_BT)

    B, S, T = export.symbolic_shape("B, S, T", constraints=["S <= 100", "T <= 90"])
    call = exported(run, tokens(B, S), tokens(B, T))
    np.testing.assert_array_equal(call(SOURCE_BS, TARGET_BT), jax.jit(run)(SOURCE_BS, TARGET_BT))
    if settings.get("positions") != "relative":
        B, S, T = export.symbolic_shape("B, S, T")
        with pytest.raises(UserError, match="The length S has no upper bound.*constraints="):
            export.export(jax.jit(run))(tokens(B, S), tokens(B, T))


def test_nnx_tabulate_shows_every_layer() -> None:
    table = nnx.tabulate(MODEL, SOURCE_BS, TARGET_BT, console_kwargs={"width": 240})
    for path in ("encoder/layers/0/feed_forward/inner", "decoder/layers/0/cross_attention/query"):
        assert path in table


def test_a_mesh_with_other_axes_is_refused_by_name() -> None:
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    message = "The axes of the mesh are data, model; expected data, fsdp and tensor"
    parameters = nnx.to_pure_dict(nnx.state(MODEL, nnx.Param))
    for call in (
        lambda: batch_sharding(mesh),
        lambda: check_rows(mesh, 8),
        lambda: state_shardings(parameters, mesh),
    ):
        with pytest.raises(UserError, match=message):
            call()
    logits = nnx.jit(lambda model: model(SOURCE_BS, TARGET_BT))
    with jax.set_mesh(mesh):  # of another program, which shards nothing of the model
        logits_BTV = logits(MODEL)
    np.testing.assert_allclose(logits_BTV, logits(MODEL), rtol=1e-6)
    assert batch_sharding(make_mesh(MeshConfig(), jax.devices()[:1])) is not None


def test_modules_alone_compute_in_the_dtype_of_models() -> None:
    """``auto`` means the same in a module that takes a ModelConfig and in one that does not."""
    feed_forward = FeedForward(ModelConfig(d_model=16, d_ff=32), rngs=nnx.Rngs(0))
    assert ATTENTION.query.dtype == feed_forward.inner.dtype
    exact = MultiHeadAttention(16, 4, dtype="float32", rngs=nnx.Rngs(0))
    assert exact.query.dtype == jnp.float32
