"""Conversion of weights to and from other libraries, with one table of names for both directions.

"Plain" weights are a flat dict of float32 NumPy arrays under our own names
(``encoder.layers.0.self_attention.query.kernel``), with heads concatenated. A tied matrix appears
once. Additional axis letters: I inputs, O outputs of a linear layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from flax import nnx

from transformer_jax.devices.sharding import parameters_by_name
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer, parameter_shapes
from transformer_jax.pretrained.files import LazyArray
from transformer_jax.settings.config import ModelConfig

Weights = dict[str, np.ndarray]

_LAYER_PARAMETER = re.compile(
    r"(encoder|decoder)\.(?:(?:layers|relative_biases)\.(\d+)\.)?"
    r"(?:(.+?)(?:\.norm)?\.(kernel|bias|scale)|table)"
)


class WeightNames(NamedTuple):
    """A library's weight names. Its kernels are [O, I]."""

    names: Mapping[str, str]
    """The library's names for weights outside the layers, for ``final_norm``, where {side} is the
    encoder or the decoder, and for the parts of a layer. In a part's name, {} stands for the name
    of a kernel, a bias, or the scale or bias of a norm. If the encoder and the decoder use
    different names, the key starts with ``encoder.`` or ``decoder.``. Weights with the same name
    are one array, concatenated in this order along the output axis."""
    layer: str
    """Format string for the prefix of a layer's weight names: {side} is the encoder or the decoder,
    {number} is the index of the layer."""
    norm: tuple[str, str] = ("weight", "bias")
    """Names of a norm's scale and bias, and ..."""
    linear: tuple[str, str] = ("weight", "bias")
    """... of the kernel and the bias of other modules."""
    first_layer: int = 0
    """Index of the first layer."""
    sines_first: bool = False
    """Sinusoids are the paper's, with all sines before all cosines."""


def to_library(weights: Weights, library: WeightNames) -> Weights:
    """Convert plain weights to weights of ``library``."""
    tensors = {}
    for foreign_name, names in _names(weights, library).items():
        parts = []
        for name in names:
            x = weights[name]
            x = put_sines_first(name, x) if library.sines_first else x
            parts.append(_with_foreign_axes(name, x, foreign_name))
        tensors[foreign_name] = np.ascontiguousarray(np.concatenate(parts))
    return tensors


def from_library(
    tensors: Mapping[str, LazyArray],
    config: ModelConfig,
    library: WeightNames,
    location: str,
    *,
    optional: str,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, LazyArray]:
    """Find the parameters of a model, by name, among the arrays of ``library``.

    Missing arrays are zero if their names match the regular expression ``optional``. ``shapes`` of
    the parameters are those of a ``Transformer`` by default.

    Raises ``UserError``, which begins with ``location``, for missing or unexpected names and wrong
    shapes, and, when a parameter is read, for NaN and infinity.
    """

    if shapes is None:
        _check_layers(tensors, config, library, location)
        shapes = parameter_shapes(config)
    names_of_array = _names(shapes, library)
    expected = {
        foreign_name: _foreign_shape(foreign_name, names, shapes)
        for foreign_name, names in names_of_array.items()
    }
    tied = {*library.names.values()} - expected.keys()
    arrays = {
        name: LazyArray.of(np.zeros(shape, np.float32))
        for name, shape in expected.items()
        if re.search(optional, name)
    } | {name: x for name, x in tensors.items() if name not in tied}
    _check_shapes(arrays, expected, location)

    def read(name: str, foreign_name: str, index: int, num_parts: int) -> np.ndarray:
        """Read a parameter, which is one of the parts of an array."""
        array = arrays[foreign_name].read()
        check_finite(array, f"{location} have", foreign_name)
        part = np.split(array, num_parts)[index]
        return _to_own_axes(name, part, config, library).reshape(shapes[name])

    return {
        name: LazyArray(shapes[name], partial(read, name, foreign_name, index, len(names)))
        for foreign_name, names in names_of_array.items()
        for index, name in enumerate(names)
    }


def _to_own_axes(
    name: str, part: np.ndarray, config: ModelConfig, library: WeightNames
) -> np.ndarray:
    """Convert a parameter's part of an array of ``library`` to our order of its elements."""
    x = part.T if name.endswith("kernel") else part
    x = put_sines_first(name, x, inverse=True) if library.sines_first else x
    scale = _scale(name, config)
    return x / scale if scale else x


def _foreign_shape(
    foreign_name: str, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the shape of the array that concatenates these parameters, for example of queries,
    keys and values: [3 O, I] for kernels [I, O].
    """
    name = names[-1]
    part = np.broadcast_to(0, _plain_shape(name, shapes[name]))
    num_rows, *other_axes = _with_foreign_axes(name, part, foreign_name).shape
    return (len(names) * num_rows, *other_axes)


def _check_shapes(
    arrays: Mapping[str, LazyArray], expected: Mapping[str, tuple[int, ...]], location: str
) -> None:
    for name in sorted(expected.keys() | arrays.keys()):
        actual = f"shape {arrays[name].shape}" if name in arrays else "no tensor"
        expected_shape = f"shape {expected[name]}" if name in expected else "no tensor"
        if actual != expected_shape:
            raise UserError(
                f"{location} have {actual} for {name}; expected {expected_shape}. Use weights and "
                "settings of the same model."
            )


def check_finite(x: np.ndarray, location: str, name: str) -> None:
    """Raise ``UserError``, which begins with ``location``, for NaN and infinity in an array."""
    with np.errstate(invalid="ignore"):  # inf - inf
        total = x.sum(dtype=np.float64)  # needs no memory, unlike isfinite(x)
    if not np.isfinite(total):
        count = np.count_nonzero(~np.isfinite(x))
        raise UserError(
            f"{location} {count:,} NaN or infinite values in {name}; expected finite numbers. "
            "Download or train the weights again."
        )


def _check_layers(
    tensors: Mapping[str, LazyArray], config: ModelConfig, library: WeightNames, location: str
) -> None:
    """Check that the last layers exist, before a model of hundreds of layers is built."""
    for side, count in (("encoder", config.num_layers), ("decoder", config.decoder_layers)):
        number = count - 1 + library.first_layer
        prefix = library.layer.format(side=side, number=number)
        if not any(name.startswith(prefix) for name in tensors):
            raise UserError(
                f"{location} have no tensor for {prefix.rstrip('._')}; expected {count} layers in "
                f"the {side}. Use weights and settings of the same model."
            )


def plain_weights(model: Transformer) -> Weights:
    """Return the plain weights of ``model``. Learned positions are scaled like the embeddings."""
    weights = {}
    parameters = parameters_by_name(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    for name, parameter in parameters.items():
        x = np.asarray(parameter).reshape(_plain_shape(name, parameter.shape))
        scale = _scale(name, model.config)
        weights[name] = x * scale if scale else x
    return weights


def with_biases(model: Transformer) -> Weights:
    """Return the plain weights of ``model``, with zeros for all biases that it does not have."""
    config = model.config
    weights = plain_weights(model)
    biases: Weights = {"softmax_bias": np.zeros(config.vocab_size, np.float32)}
    for name, x in weights.items():
        if name.endswith("kernel"):
            biases[name.replace("kernel", "bias")] = np.zeros(x.shape[1], np.float32)
        if name.endswith("norm.scale") and config.norm_type == "layer":
            biases[name.replace("scale", "bias")] = np.zeros(len(x), np.float32)
    return biases | weights


def put_sines_first(name: str, x: np.ndarray, *, inverse: bool = False) -> np.ndarray:
    """Permute the d_model dimension of a plain weight, so that all sines come before all cosines:
    0 2 4 ... 1 3 5 ...; or ``inverse``.

    If all weights and positions are permuted, the model computes the same function.
    """
    # d_model is the first axis of these kernels, and the last axis of other weights.
    is_input_side = re.search(r"\.(query|key|value|inner|gate)\.", name)
    if name == "softmax_bias" or (is_input_side and not name.endswith("kernel")):
        return x
    axis = 0 if is_input_side else -1
    order_D = np.arange(x.shape[axis]).reshape(-1, 2).T.ravel()
    return x.take(np.argsort(order_D) if inverse else order_D, axis)


def _plain_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter with concatenated heads."""
    if re.search(r"_attention\.(query|key|value)\.", name):
        return (*shape[:-2], shape[-2] * shape[-1])
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape


def _scale(name: str, config: ModelConfig) -> np.float32 | None:
    """Return the factor of a table of learned positions, if it has one."""
    is_scaled = name.endswith("position_matrix") and config.embedding_scale == "all"
    return np.float32(config.d_model**0.5) if is_scaled else None


def _with_foreign_axes(name: str, x: np.ndarray, foreign_name: str) -> np.ndarray:
    """Change the axes of a plain weight to those of the array ``foreign_name``."""
    if foreign_name == "final_logits_bias":
        return x[None]
    return x.T if name.endswith("kernel") else x


def _names(weights: Iterable[str], library: WeightNames) -> dict[str, list[str]]:
    """Map each library name to the names of the weights that its array concatenates."""
    key_order = list(library.names)
    positions: list[tuple[int, str, str]] = []
    for weight in weights:
        key, foreign_name = _foreign_name(weight, library)
        positions.append((key_order.index(key), foreign_name, weight))
    names: dict[str, list[str]] = {}
    for _, foreign_name, weight in sorted(positions):
        names.setdefault(foreign_name, []).append(weight)
    return names


def _foreign_name(weight: str, library: WeightNames) -> tuple[str, str]:
    """Return the key of ``library.names`` for a weight, and the weight's name in the library."""
    match = _LAYER_PARAMETER.fullmatch(weight)
    if not match:
        return weight, library.names[weight].format("")
    side, number, part, leaf = match.groups("relative_bias")
    key = part if part in library.names else f"{side}.{part}"
    prefix = ""
    if match[2]:
        prefix = library.layer.format(side=side, number=int(number) + library.first_layer)
    scale, bias = library.norm if "norm" in weight else library.linear
    name = bias if leaf.endswith("bias") else scale
    return key, prefix + library.names[key].format(name, side=side)
