"""Models from arrays by name, and the table of names in docs/own_models.md."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax import (
    ModelConfig,
    Transformer,
    UserError,
    model_from_arrays,
    parameter_shapes,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own_models.md"
SMALL = {"vocab_size": 20, "d_model": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1}
CONFIG = ModelConfig(**SMALL, dtype="float32")
SIZES = {"V": 20, "D": 16, "F": 32, "H": 2, "K": 8, "L": 1024, "R": 32}
EVERYTHING = [
    ModelConfig(
        **SMALL,
        positions="learned",
        tie_embeddings="none",
        softmax_bias=True,
        attention_bias=True,
        activation="swiglu",
        norm="pre",
        embedding_norm=True,
    ),
    ModelConfig(**SMALL, positions="relative"),
]


def arrays_of(model: Transformer) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(value[...]) for path, value in flat}


def test_a_model_from_its_arrays_is_the_same_model() -> None:
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    arrays = arrays_of(model)
    assert {name: array.shape for name, array in arrays.items()} == parameter_shapes(CONFIG)
    copy = model_from_arrays(CONFIG, arrays)
    tokens_BL = jnp.array([[5, 6, 2]])
    np.testing.assert_array_equal(copy(tokens_BL, tokens_BL), model(tokens_BL, tokens_BL))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x.pop("target_embedding.matrix"), r"lack 1 .*\(target_embedding.matrix\)"),
        (lambda x: x.update(fc=np.ones(2, np.float32)), r"have 1 others \(fc\)"),
        (
            lambda x: x.update({"target_embedding.matrix": np.ones((16, 20))}),
            r"target_embedding.matrix is float64 with shape \[16, 20\]; expected .* \[20, 16\]",
        ),
        (
            lambda x: x.update({"target_embedding.matrix": np.ones((20, 16), int)}),
            "target_embedding.matrix is int64",
        ),
    ],
)
def test_wrong_arrays_are_named(change, message) -> None:
    arrays = arrays_of(Transformer(CONFIG, rngs=nnx.Rngs(0)))
    change(arrays)
    with pytest.raises(UserError, match=message):
        model_from_arrays(CONFIG, arrays)


def test_the_documented_table_has_every_parameter_with_its_axes() -> None:
    section = PAGE.read_text().split("## Parameter names")[1].split("\n#")[0]
    documented = {}
    for names, axes in re.findall(r"^\| (`[^|]+`) \| `\[([^\]]+)\]` \|", section, re.M):
        for name in re.findall(r"`([^`]+)`", names):
            documented[name] = tuple(SIZES[axis] for axis in axes.split(", "))
    actual = {}
    for config in EVERYTHING:
        for name, shape in parameter_shapes(config).items():
            side, _, rest = name.partition(".")
            key = f"SIDE.{rest}" if side in ("encoder", "decoder") else name
            actual[re.sub(r"(layers|relative_biases)\.0\.", r"\1.N.", key)] = shape
    assert documented == actual
