"""Conversion of weights to and from other libraries, with one table of names for both directions.

"Plain" weights are a flat dict of float32 NumPy arrays under our own names
(``encoder.layers.0.self_attention.query.kernel``), with heads concatenated and all biases present.
A tied matrix appears once. Additional axis letters: I inputs, O outputs of a linear layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax import ModelConfig, Transformer, UserError, sinusoidal_positions

Weights = dict[str, np.ndarray]

_SOURCE, _TARGET = "source_embedding.position_matrix", "target_embedding.position_matrix"
_IN_LAYER = re.compile(
    r"(encoder|decoder)\.(?:layers|relative_biases)\.(\d+)\.(?:(.+?)\.(kernel|bias|norm\.\w+)|table)"
)


class Library(NamedTuple):
    """A library's weight names. Its kernels are [O, I]."""

    names: Mapping[str, str]
    """The library's names for weights outside the layers and for the parts of a layer. In a part's
    name, {} stands for the name of a kernel, a bias, or the scale or bias of a norm. If the encoder
    and the decoder use different names, the key starts with ``encoder.`` or ``decoder.``. Weights
    with the same name are one array, concatenated in this order along the output axis."""
    layer: str
    """Format string for the prefix of a layer's weight names: {side} is the encoder or the decoder,
    {number} is the index of the layer."""
    norm: tuple[str, str] = ("weight", "bias")
    """Names of a norm's scale and bias. Other modules use weight and bias."""


def to_library(weights: Weights, library: Library) -> Weights:
    """Convert plain weights to weights of ``library``."""
    tensors = {}
    for theirs, ours in _names(weights, library).items():
        shares = [transposed(name, weights[name]) for name in ours]
        tensors[theirs] = np.concatenate(shares) if len(shares) > 1 else shares[0]
    return tensors


def from_library(
    tensors: Weights, config: ModelConfig, library: Library, where: str
) -> Transformer:
    """Build a model with copies of the weights of ``library``. Missing biases are zero.

    Raises ``UserError``, which begins with ``where``, for missing or unexpected names, wrong
    shapes, and NaN or infinity.
    """
    graph, blank = nnx.split(blank_model(config), nnx.Param)
    parameters, zero = nnx.to_flat_state(blank), np.float32(0)
    shapes = {parameter_name(path): np.broadcast_to(zero, x.shape) for path, x in parameters}
    like = _plain(shapes, config)
    expected = to_library(like, library)
    tied = {*library.names.values()} - expected.keys()
    biases = {name: np.zeros_like(x) for name, x in expected.items() if name.endswith("bias")}
    tensors = biases | {name: x for name, x in tensors.items() if name not in tied}
    _check(tensors, expected, where)
    weights = {}
    for theirs, ours in _names(like, library).items():
        for name, share in zip(ours, np.split(tensors[theirs], len(ours))):
            weights[name] = transposed(name, share)
    scale, flat = np.float32(config.d_model**0.5), {}
    for path, x in parameters:
        weight = weights[parameter_name(path)]
        weight = weight / scale if path[-1] == "position_matrix" else weight
        flat[path] = jnp.array(weight).reshape(x.shape)
    return nnx.merge(graph, nnx.traversals.unflatten_mapping(flat))


def _check(tensors: Weights, expected: Weights, where: str) -> None:
    for name in sorted(expected.keys() | tensors.keys()):
        found, wanted = (
            f"shape {each[name].shape}" if name in each else "no tensor"
            for each in (tensors, expected)
        )
        if found != wanted:
            raise UserError(f"{where} have {found} for {name}; expected {wanted}.")
        if count := np.count_nonzero(~np.isfinite(tensors[name])):
            raise UserError(
                f"{where} have {count:,} NaN or infinite values in {name}; expected finite "
                "numbers. Download or train the weights again."
            )


def parameter_shapes(config: ModelConfig) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """Return the shapes of a model's parameters by path."""
    flat = nnx.to_flat_state(nnx.state(blank_model(config), nnx.Param))
    return {path: x.shape for path, x in flat}


def library_names(paths: Iterable[tuple[Any, ...]], library: Library) -> dict[str, str]:
    """Map the names of parameters to their names in a library that concatenates none of them."""
    ours = dict.fromkeys(map(parameter_name, paths), np.empty(0))
    return {names[0]: theirs for theirs, names in _names(ours, library).items()}


def plain_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter with concatenated heads."""
    if re.search(r"_attention\.(query|key|value)\.", name):
        return (*shape[:-2], shape[-2] * shape[-1])
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape


def plain_weights(model: Transformer) -> Weights:
    """Return the plain weights of ``model``. Learned positions are scaled like the
    embeddings. Raises ``UserError`` for a head size other than d_model / num_heads, which other
    libraries do not support.
    """
    config = model.config
    for name, width in (("d_k", config.head_width_k), ("d_v", config.head_width_v)):
        if width * config.num_heads != config.d_model:
            raise UserError(
                f"model.{name} is {width}; expected model.d_model / model.num_heads = "
                f"{config.d_model} / {config.num_heads}. Other libraries require this size."
            )
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return _plain({parameter_name(path): np.array(x[...]) for path, x in state}, config)


def with_position_tables(weights: Weights, config: ModelConfig, length: int) -> Weights:
    """Add the source and target position tables to ``weights``: sinusoids of ``length`` positions,
    or all learned positions.
    """
    table_LD = weights.get(_TARGET)
    if table_LD is None:
        table_LD = sinusoidal_positions(length, config.d_model)
    return {_SOURCE: table_LD, _TARGET: table_LD} | weights


def sines_first(d_model: int) -> np.ndarray:
    """Return the permutation that puts all sines before all cosines: 0 2 4 ... 1 3 5 ..."""
    return np.concatenate([np.arange(0, d_model, 2), np.arange(1, d_model, 2)])


def reordered(weights: Weights, order_D: np.ndarray) -> Weights:
    """Permute the d_model dimensions: new dimension i is old dimension ``order_D[i]``.

    If positions are permuted in the same way, the model computes the same function.
    """
    return {name: reordered_weight(name, x, order_D) for name, x in weights.items()}


def reordered_weight(name: str, x: np.ndarray, order_D: np.ndarray) -> np.ndarray:
    """Permute the d_model dimension of a plain weight."""
    # d_model is the first axis of these kernels, and the last axis of other weights.
    if re.search(r"\.(query|key|value|inner|gate)\.", name):
        return x[order_D] if name.endswith("kernel") else x
    return x if name == "softmax_bias" else x[..., order_D]


def _plain(flat: Weights, config: ModelConfig) -> Weights:
    weights: Weights = {"softmax_bias": np.zeros(config.vocab_size, np.float32)}
    for name, x in flat.items():
        x = x.reshape(plain_shape(name, x.shape))
        if name in (_SOURCE, _TARGET):
            x = x * np.float32(config.d_model**0.5)
        if name.endswith("kernel"):
            weights.setdefault(name.replace("kernel", "bias"), np.zeros(x.shape[1], np.float32))
        if name.endswith("norm.scale") and config.norm_type == "layer":
            weights.setdefault(name.replace("scale", "bias"), np.zeros(len(x), np.float32))
        weights[name] = x
    return weights


def _names(weights: Weights, library: Library) -> dict[str, list[str]]:
    """Map each library name to our names for the arrays that it concatenates."""
    found: dict[str, list[str]] = {}
    order, places = list(library.names), []
    for ours in weights:
        key, prefix, name = ours, "", ""
        if match := _IN_LAYER.fullmatch(ours):
            side, number, part, leaf = match.groups("relative_bias")
            key = part if part in library.names else f"{side}.{part}"
            prefix = library.layer.format(side=side, number=number)
            scale, bias = library.norm if leaf.startswith("norm") else ("weight", "bias")
            name = bias if leaf.endswith("bias") else scale
        places.append((order.index(key), prefix + library.names[key].format(name), ours))
    for _, theirs, ours in sorted(places):
        found.setdefault(theirs, []).append(ours)
    return found


def transposed(name: str, x: np.ndarray) -> np.ndarray:
    """Transpose kernels between [I, O] (ours) and [O, I]."""
    return x.T if name.endswith("kernel") else x


@cache
def blank_model(config: ModelConfig) -> Transformer:
    """Create a model whose parameters have shapes but no values."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def parameter_name(path: tuple[Any, ...]) -> str:
    """Return the name of the parameter at ``path``."""
    return ".".join(map(str, path))
