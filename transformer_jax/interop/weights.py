"""A model's weights as the plain matrices that other libraries keep: heads side by side, every bias
there, float32 NumPy.

Letters beside the package's own: I inputs, O outputs of a linear layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.layers import sinusoidal_positions
from transformer_jax.model.transformer import Transformer


class Linear(NamedTuple):
    """x kernel + bias."""

    kernel_IO: np.ndarray
    bias_O: np.ndarray


class Norm(NamedTuple):
    """The parameters of a layer norm."""

    scale_D: np.ndarray
    bias_D: np.ndarray


class Attention(NamedTuple):
    """The four projections, and the norm of the residual that the layer stands in."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    norm: Norm


class FeedForward(NamedTuple):
    """Both layers, and the norm of their residual."""

    inner: Linear
    output: Linear
    norm: Norm


class Layer(NamedTuple):
    """A decoder layer, or, without cross-attention, an encoder layer."""

    self_attention: Attention
    cross_attention: Attention | None
    feed_forward: FeedForward


class Weights(NamedTuple):
    """All of a model. Matrices that are tied are one array, so ``is`` tells."""

    source_matrix_VD: np.ndarray
    target_matrix_VD: np.ndarray
    softmax_matrix_VD: np.ndarray
    softmax_bias_V: np.ndarray
    # learned ones, as they are added to the scaled embeddings; else None
    source_positions_LD: np.ndarray | None
    target_positions_LD: np.ndarray | None
    encoder: tuple[Layer, ...]
    decoder: tuple[Layer, ...]
    encoder_norm: Norm | None  # the final norm of a pre-norm stack
    decoder_norm: Norm | None


def plain_weights(model: Transformer, *, head_width: int | None = None) -> Weights:
    """The weights of ``model``, every head's queries, keys and values ``head_width`` wide (default:
    the larger of d_k, d_v).

    Where heads are narrower they are filled up with zeros, and queries scaled so that what is
    divided by sqrt(head_width) has the scores of d_k: an exact copy.
    """
    config = model.config
    tree = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    width = head_width or max(config.head_width_k, config.head_width_v)
    target = _array(tree["target_embedding"]["matrix"])
    source = _array(tree["source_embedding"]["matrix"]) if "source_embedding" in tree else target
    positions = {
        name: _learned(tree.get(name), config.d_model)
        for name in ("source_embedding", "target_embedding")
    }
    return Weights(
        source_matrix_VD=source,
        target_matrix_VD=target,
        softmax_matrix_VD=_array(tree["softmax_matrix"]) if "softmax_matrix" in tree else target,
        softmax_bias_V=_array(tree["softmax_bias"])
        if "softmax_bias" in tree
        else np.zeros(config.vocab_size, np.float32),
        source_positions_LD=positions[
            "source_embedding" if "source_embedding" in tree else "target_embedding"
        ],
        target_positions_LD=positions["target_embedding"],
        encoder=tuple(
            _layer(tree["encoder"]["layers"][i], width) for i in range(config.num_layers)
        ),
        decoder=tuple(
            _layer(tree["decoder"]["layers"][i], width) for i in range(config.decoder_layers)
        ),
        encoder_norm=_norm(tree["encoder"]["final_norm"]) if config.norm == "pre" else None,
        decoder_norm=_norm(tree["decoder"]["final_norm"]) if config.norm == "pre" else None,
    )


def parameters(weights: Weights, config: ModelConfig) -> dict[str, Any]:
    """The way back: parameters, as ``nnx.to_pure_dict`` gives them, of a Transformer of this
    config.
    """
    tree: dict[str, Any] = {
        "target_embedding": {"matrix": weights.target_matrix_VD},
        "encoder": {
            "layers": {
                i: _layer_parameters(layer, config) for i, layer in enumerate(weights.encoder)
            }
        },
        "decoder": {
            "layers": {
                i: _layer_parameters(layer, config) for i, layer in enumerate(weights.decoder)
            }
        },
    }
    if config.tie_embeddings != "all":
        tree["source_embedding"] = {"matrix": weights.source_matrix_VD}
    if config.tie_embeddings == "none":
        tree["softmax_matrix"] = weights.softmax_matrix_VD
    if config.softmax_bias:
        tree["softmax_bias"] = weights.softmax_bias_V
    if config.positions == "learned":
        for name, table_LD in (
            ("source_embedding", weights.source_positions_LD),
            ("target_embedding", weights.target_positions_LD),
        ):
            if name in tree and table_LD is not None:
                tree[name]["position_matrix"] = table_LD / np.float32(config.d_model**0.5)
    return tree


def position_tables(
    weights: Weights, config: ModelConfig, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """What is added to source and target embeddings at each of ``length`` positions (learned ones:
    all there are).
    """
    if weights.source_positions_LD is not None and weights.target_positions_LD is not None:
        return weights.source_positions_LD, weights.target_positions_LD
    table_LD = sinusoidal_positions(length, config.d_model, layout=config.positions)
    return table_LD, table_LD


def sines_first(d_model: int) -> np.ndarray:
    """The order of dimensions that makes interleaved sinusoids split ones, with the same
    wavelengths: 0 2 4 ... 1 3 5 ...
    """
    return np.concatenate([np.arange(0, d_model, 2), np.arange(1, d_model, 2)])


def reordered(weights: Weights, order_D: np.ndarray) -> Weights:
    """The same model with its d_model dimensions in another order: new dimension i is old dimension
    ``order_D[i]``.

    A function of tokens and positions as before if positions are taken in the same order.
    """

    def norm(n: Norm) -> Norm:
        return Norm(n.scale_D[order_D], n.bias_D[order_D])

    def reads(linear: Linear) -> Linear:
        return Linear(linear.kernel_IO[order_D], linear.bias_O)

    def writes(linear: Linear) -> Linear:
        return Linear(linear.kernel_IO[:, order_D], linear.bias_O[order_D])

    def attention(a: Attention) -> Attention:
        return Attention(
            reads(a.query), reads(a.key), reads(a.value), writes(a.output), norm(a.norm)
        )

    def layer(x: Layer) -> Layer:
        cross = None if x.cross_attention is None else attention(x.cross_attention)
        feed_forward = FeedForward(
            reads(x.feed_forward.inner), writes(x.feed_forward.output), norm(x.feed_forward.norm)
        )
        return Layer(attention(x.self_attention), cross, feed_forward)

    def table(x_LD: np.ndarray | None) -> np.ndarray | None:
        return None if x_LD is None else x_LD[:, order_D]

    matrices = {id(x_VD): x_VD[:, order_D] for x_VD in weights[:3]}  # tied ones stay one array
    source, target, softmax = (matrices[id(x_VD)] for x_VD in weights[:3])
    return weights._replace(
        source_matrix_VD=source,
        target_matrix_VD=target,
        softmax_matrix_VD=softmax,
        source_positions_LD=table(weights.source_positions_LD),
        target_positions_LD=table(weights.target_positions_LD),
        encoder=tuple(map(layer, weights.encoder)),
        decoder=tuple(map(layer, weights.decoder)),
        encoder_norm=None if weights.encoder_norm is None else norm(weights.encoder_norm),
        decoder_norm=None if weights.decoder_norm is None else norm(weights.decoder_norm),
    )


def square_head_width(config: ModelConfig, library: str) -> int:
    """d_model / num_heads for a library that knows no other width; ``UserError`` where the model's
    heads are wider.
    """
    width = config.d_model // config.num_heads
    for name, ours in (("d_k", config.head_width_k), ("d_v", config.head_width_v)):
        if ours > width or config.d_model % config.num_heads:
            raise UserError(
                f"model.{name} is {ours}; {library} has heads of width model.d_model / model.num_heads = "
                f"{config.d_model} / {config.num_heads} only, so expected at most that. Narrower heads can be exported."
            )
    return width


def check_epsilon(config: ModelConfig, theirs: float, library: str) -> list[str]:
    """A note where layer norm adds another epsilon there; ``UserError`` where that would show in
    the output.
    """
    if config.norm_epsilon > 1e-5:
        raise UserError(
            f"model.norm_epsilon is {config.norm_epsilon:g}, which {library} does not know: it always adds {theirs:g}. "
            "Expected at most 1e-05."
        )
    if config.norm_epsilon == theirs:
        return []
    return [
        f"layer norm adds {theirs:g} to the variance in {library}, {config.norm_epsilon:g} here: a few 1e-6 of its output."
    ]


def _array(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def _learned(embedding: dict[str, Any] | None, d_model: int) -> np.ndarray | None:
    if embedding is None or "position_matrix" not in embedding:
        return None
    return _array(embedding["position_matrix"]) * np.float32(d_model**0.5)


def _layer(tree: dict[str, Any], width: int) -> Layer:
    feed_forward = tree["feed_forward"]
    return Layer(
        _attention(tree, "self_attention", width),
        _attention(tree, "cross_attention", width) if "cross_attention" in tree else None,
        FeedForward(
            Linear(_array(feed_forward["inner"]["kernel"]), _array(feed_forward["inner"]["bias"])),
            Linear(
                _array(feed_forward["output"]["kernel"]), _array(feed_forward["output"]["bias"])
            ),
            _norm(tree["feed_forward_residual"]["norm"]),
        ),
    )


def _attention(tree: dict[str, Any], name: str, width: int) -> Attention:
    def heads(part: str) -> Linear:
        kernel_DHK = _array(tree[name][part]["kernel"])
        bias = tree[name][part].get("bias")
        bias_HK = np.zeros(kernel_DHK.shape[1:], np.float32) if bias is None else _array(bias)
        more = width - kernel_DHK.shape[2]
        scale = (
            np.float32((width / kernel_DHK.shape[2]) ** 0.5) if part == "query" else np.float32(1)
        )
        kernel_DHK = np.pad(kernel_DHK * scale, ((0, 0), (0, 0), (0, more)))
        return Linear(
            kernel_DHK.reshape(len(kernel_DHK), -1),
            np.pad(bias_HK * scale, ((0, 0), (0, more))).reshape(-1),
        )

    kernel_HKD = _array(tree[name]["output"]["kernel"])
    bias = tree[name]["output"].get("bias")
    bias_D = np.zeros(kernel_HKD.shape[2], np.float32) if bias is None else _array(bias)
    kernel_HKD = np.pad(kernel_HKD, ((0, 0), (0, width - kernel_HKD.shape[1]), (0, 0)))
    output = Linear(kernel_HKD.reshape(-1, kernel_HKD.shape[2]), bias_D)
    return Attention(
        heads("query"),
        heads("key"),
        heads("value"),
        output,
        _norm(tree[f"{name}_residual"]["norm"]),
    )


def _norm(tree: dict[str, Any]) -> Norm:
    return Norm(_array(tree["scale"]), _array(tree["bias"]))


def _layer_parameters(layer: Layer, config: ModelConfig) -> dict[str, Any]:
    heads, d_model = config.num_heads, config.d_model

    def attention(a: Attention) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for name, linear in (("query", a.query), ("key", a.key), ("value", a.value)):
            parts[name] = {"kernel": linear.kernel_IO.reshape(d_model, heads, -1)}
            if config.attention_bias:
                parts[name]["bias"] = linear.bias_O.reshape(heads, -1)
        parts["output"] = {"kernel": a.output.kernel_IO.reshape(heads, -1, d_model)}
        if config.attention_bias:
            parts["output"]["bias"] = a.output.bias_O
        return parts

    def residual(norm: Norm) -> dict[str, Any]:
        return {"norm": {"scale": norm.scale_D, "bias": norm.bias_D}}

    ff = layer.feed_forward
    tree = {
        "self_attention": attention(layer.self_attention),
        "self_attention_residual": residual(layer.self_attention.norm),
        "feed_forward": {
            "inner": {"kernel": ff.inner.kernel_IO, "bias": ff.inner.bias_O},
            "output": {"kernel": ff.output.kernel_IO, "bias": ff.output.bias_O},
        },
        "feed_forward_residual": residual(ff.norm),
    }
    if layer.cross_attention is not None:
        tree["cross_attention"] = attention(layer.cross_attention)
        tree["cross_attention_residual"] = residual(layer.cross_attention.norm)
    return tree
