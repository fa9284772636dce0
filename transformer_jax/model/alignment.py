"""Soft alignments: where the decoder looks in the source while it writes given targets."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_jax.errors import UserError
from transformer_jax.model.attention import attention_mask
from transformer_jax.model.cache import mean_weights
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID, PAD_ID


def cross_attention_weights(
    model: Transformer, source_BS: jax.Array, target_BT: jax.Array, *, layer: int = -1
) -> jax.Array:
    """Cross-attention weights of one decoder layer, mean over its heads: float32 [B, T, S].

    Row t says where the decoder looked when it predicted token t. The rows of real tokens sum to 1;
    padding, in source and target, has 0. A pass of its own: the hot paths do not carry their
    weights out.

    Args:
      source_BS, target_BT: tokens and EOS, padded with PAD_ID, one sentence a row (as
        ``Transformer.hidden`` takes them).
      layer: number of the decoder layer; negative from the last one.

    Raises:
        UserError: no such layer.
    """
    layers = list(model.decoder.layers)
    if not -len(layers) <= layer < len(layers):
        raise UserError(
            f"The alignment layer is {layer}; expected one of the decoder's, {-len(layers)} to {len(layers) - 1}."
        )
    source_mask_BS, target_mask_BT = source_BS != PAD_ID, target_BT != PAD_ID
    memory_BSD = model.encode(source_BS)
    length = target_BT.shape[1]
    inputs_BT = jnp.pad(target_BT[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID)
    x_BTD = model.target_embedding(
        inputs_BT, jnp.arange(length, dtype=jnp.int32)[None], num_positions=length
    )
    self_mask_BHTT = attention_mask(
        target_mask_BT.astype(jnp.int32), target_mask_BT.astype(jnp.int32), causal=True
    )
    cross_mask_BHTS = source_mask_BS[:, None, None]

    *before, chosen = layers[: layer % len(layers) + 1]
    for earlier in before:
        x_BTD = earlier(x_BTD, memory_BSD, self_mask_BHTT, cross_mask_BHTS)

    seen = []

    def cross_attention(y_BTD: jax.Array) -> jax.Array:
        k_BHSK = chosen.cross_attention.key(memory_BSD).swapaxes(1, 2)
        seen.append(
            mean_weights(
                chosen.cross_attention.query(y_BTD), (k_BHSK,), source_mask_BS[:, None, :, None]
            )
        )
        return y_BTD  # what the layer would make of it does not matter

    chosen.connect(x_BTD, lambda y: chosen.self_attention(y, y, self_mask_BHTT), cross_attention)
    return seen[0] * target_mask_BT[:, :, None]
