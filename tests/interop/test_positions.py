"""Rotary positions against those of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from transformer_jax.model.positions import rotated


def test_rotation_is_that_of_llama() -> None:
    q, k = np.asarray(jax.random.normal(jax.random.key(0), (2, 1, 5, 3, 8)))
    frequencies = 10000.0 ** -(np.arange(0, 8, 2) / 8)
    angles = torch.tensor(np.tile(np.arange(5)[:, None] * frequencies[None], 2))[None].float()
    heads_first = (torch.tensor(x).transpose(1, 2) for x in (q, k))
    theirs = apply_rotary_pos_emb(*heads_first, angles.cos(), angles.sin())
    for x, turned in zip((q, k), theirs, strict=True):
        ours = rotated(jnp.asarray(x), jnp.arange(5)[None])
        np.testing.assert_allclose(ours, turned.transpose(1, 2), atol=1e-5)
