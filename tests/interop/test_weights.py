"""The table of weight names maps in both directions."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from transformer_jax.interop.weights import (
    CTRANSLATE2,
    HUGGING_FACE,
    blank_weights,
    from_library,
    model_of,
    plain_weights,
    to_library,
)

FIELDS = {"num_layers": 1, "attention_bias": True, "tie_embeddings": "none", "softmax_bias": True}


@pytest.mark.parametrize("library", [HUGGING_FACE, CTRANSLATE2])
def test_round_trip_through_the_names_of_a_library(library, joint, make) -> None:
    config, model = make(joint, **FIELDS)
    weights = plain_weights(model)
    others = {
        "source_embedding.matrix": "source",
        "target_embedding.matrix": "target",
        "softmax_matrix": "softmax",
        "softmax_bias": "bias",
    }
    tensors = to_library(weights, library, others)
    joined = 10 if library is CTRANSLATE2 else 0  # 4 in each self-attention, 2 in cross-attention
    assert len(tensors) == len(weights) - joined
    blank = blank_weights(config.model)
    assert {name: x.shape for name, x in blank.items()} == {n: x.shape for n, x in weights.items()}
    back = from_library(tensors, blank, library, others)
    assert back.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(back[name], weight, err_msg=name)


@pytest.mark.parametrize(
    "fields", [FIELDS, {"norm": "pre"}, {"positions": "learned", "max_positions": 24}]
)
def test_round_trip_through_plain_weights(fields, joint, make) -> None:
    config, model = make(joint, **fields)
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    after = nnx.to_pure_dict(nnx.state(model_of(plain_weights(model), config.model), nnx.Param))
    assert jax.tree.structure(after) == jax.tree.structure(before)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), after, before)
