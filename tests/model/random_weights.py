"""Transformers with random weights, without compiling an initializer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.model.transformer import Transformer
from transformer_jax.settings.config import ModelConfig


def random_transformer(config: ModelConfig, seed: int = 0) -> Transformer:
    """Draw matrices at the scale of a new model. Biases and norm scales are random too."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)

    def draw(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        noise = rng.standard_normal(like.shape)
        spread, center = config.d_model**-0.5, 0.0
        if len(like.shape) == 1:
            spread, center = 0.1, float("scale" in jax.tree_util.keystr(path))
        return jnp.asarray(center + spread * noise, like.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, shapes))
