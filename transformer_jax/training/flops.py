"""What training costs in FLOPs (the paper's Table 2): by the paper's rule, and by counting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.corpus import Corpus
from transformer_jax.training.progress import Progress

# Sustained TFLOP/s by a part of the device's name: the paper's estimates for single precision
# (section 6.1, footnote 5); measured for bfloat16 products of large matrices (docs/performance.md).
_PAPER = {"K80": 2.8, "K40": 3.7, "M40": 6.0, "P100": 9.5}
_MEASURED = {"H200": 717.0}

_PAIRS_AT_A_TIME = 2**20


def training_flops(
    config: Config, corpus: Corpus, progress: Progress, *, devices: Sequence[str], dtype: str
) -> dict[str, float | None]:
    """What training has cost so far, for summary.json.

    Args:
      devices: their kinds.
      dtype: type of the products.
    """
    tokens = progress.source_tokens + progress.target_tokens
    passes = 2 if config.training.r_drop else 1
    return {
        "counted": passes * counted(config.model, corpus, tokens=tokens),
        "paper_rule": paper_rule(progress.train_seconds, devices, dtype),
    }


def paper_rule(train_seconds: float, devices: Sequence[str], dtype: str) -> float | None:
    """Time x devices x what one device sustains; None if that is not known for these devices (by
    kind) and products of this type.
    """
    known = _PAPER | (_MEASURED if dtype == "bfloat16" else {})
    found = [known[name] for kind in devices for name in known if name in kind]
    return train_seconds * sum(found) * 1e12 if len(found) == len(devices) else None


def counted(model: ModelConfig, corpus: Corpus, *, tokens: int) -> float:
    """FLOPs of the model's products for so many real tokens, source and target, of this corpus."""
    flops = corpus_tokens = 0.0
    for start in range(0, corpus.num_pairs, _PAIRS_AT_A_TIME):
        stop = min(start + _PAIRS_AT_A_TIME, corpus.num_pairs)
        source_lengths, target_lengths = corpus.lengths(start, stop)
        flops += model_flops(model, source_lengths, target_lengths)
        corpus_tokens += float(source_lengths.sum() + target_lengths.sum())
    return flops / corpus_tokens * tokens


def model_flops(
    model: ModelConfig, source_lengths: np.ndarray, target_lengths: np.ndarray
) -> float:
    """FLOPs of the matrix products that training on sentence pairs of these lengths needs: three
    times forward. Padding and recomputation are not counted; causal attention is, as if full.
    """
    S, T = source_lengths.astype(float), target_lengths.astype(float)
    D, heads = model.d_model, model.num_heads * (model.head_width_k + model.head_width_v)
    # Queries and outputs, or keys and values, of a token; the feed-forward layer of a token.
    projections = D * heads
    feed_forward = (3 if model.activation == "swiglu" else 2) * D * model.d_ff
    seen = np.minimum(S, model.encoder_window or np.inf)
    encoder_layer = S * (2 * projections + feed_forward) + S * seen * heads
    # Cross-attention has keys and values of the source, queries and outputs of the target.
    decoder_layer = T * (3 * projections + feed_forward) + S * projections
    decoder_layer += (T * T + S * T) * heads
    forward = model.num_layers * encoder_layer + model.decoder_layers * decoder_layer
    return float(3 * 2 * (forward + T * D * model.vocab_size).sum())
