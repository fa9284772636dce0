"""What training costs in FLOPs (the paper's Table 2), counted."""

from __future__ import annotations

import numpy as np

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.corpus import Corpus


def training_flops(config: Config, corpus: Corpus, *, tokens: int) -> float:
    """FLOPs of the model's products for so many real tokens, source and target, of this corpus."""
    lengths_2KN = corpus.lengths()
    passes = 2 if config.training.r_drop else 1
    return passes * model_flops(config.model, *lengths_2KN) / float(lengths_2KN.sum()) * tokens


def model_flops(
    model: ModelConfig, source_lengths: np.ndarray, target_lengths: np.ndarray
) -> float:
    """FLOPs of the matrix products that training on sentence pairs of these lengths needs: three
    times forward. Padding and recomputation are not counted; causal attention is, as if full.
    """
    S, T = source_lengths.ravel().astype(float), target_lengths.ravel().astype(float)
    D, heads = model.d_model, model.num_heads * (model.head_width_k + model.head_width_v)
    # Queries and outputs, or keys and values, of a token; the feed-forward layer of a token.
    projections = D * heads
    feed_forward = (3 if model.activation == "swiglu" else 2) * D * model.d_ff
    source, target = S.sum(), T.sum()
    encoder_layer = source * (2 * projections + feed_forward)
    encoder_layer += S @ np.minimum(S, model.encoder_window or np.inf) * heads
    # Cross-attention has keys and values of the source, queries and outputs of the target.
    decoder_layer = target * (3 * projections + feed_forward) + source * projections
    decoder_layer += (T @ T + S @ T) * heads
    forward = model.num_layers * encoder_layer + model.decoder_layers * decoder_layer
    return float(3 * 2 * (forward + target * D * model.vocab_size))
