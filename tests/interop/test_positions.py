"""Rotary and relative positions against those of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from transformer_jax.model.positions import RelativeBias, rotated


def test_rotation_is_that_of_llama() -> None:
    q, k = np.asarray(jax.random.normal(jax.random.key(0), (2, 1, 5, 3, 8)))
    frequencies = 10000.0 ** -(np.arange(0, 8, 2) / 8)
    angles = torch.tensor(np.tile(np.arange(5)[:, None] * frequencies[None], 2))[None].float()
    heads_first = (torch.tensor(x).transpose(1, 2) for x in (q, k))
    theirs = apply_rotary_pos_emb(*heads_first, angles.cos(), angles.sin())
    for x, turned in zip((q, k), theirs, strict=True):
        ours = rotated(jnp.asarray(x), jnp.arange(5)[None])
        np.testing.assert_allclose(ours, turned.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_distances_share_the_buckets_of_t5(causal: bool) -> None:
    bias = RelativeBias(1, causal=causal, rngs=nnx.Rngs(0))
    bias.table[...] = jnp.arange(32.0)[:, None]  # shows the bucket
    positions = jnp.arange(300)[None]
    ahead = np.arange(300)[None] - np.arange(300)[:, None]
    theirs = T5Attention._relative_position_bucket(
        torch.tensor(ahead), bidirectional=not causal, num_buckets=32, max_distance=128
    )
    np.testing.assert_array_equal(np.asarray(bias(positions, positions))[0, 0], theirs)
