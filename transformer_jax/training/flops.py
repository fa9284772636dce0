"""Model FLOPs of a training step, and peak speeds of devices."""

from __future__ import annotations

import re

from transformer_jax.settings.config import Config

# TFLOP/s in dense bfloat16 matmuls, from the vendors' data sheets. The keys are patterns for JAX's
# device_kind; the first match counts.
_PEAKS = {
    "A100": 312,
    "H100 80GB HBM3": 989,  # SXM
    "H200": 989,
    "B200": 2250,
    "TPU v4": 275,
    "TPU v5( lite|e)": 197,
    "TPU v5": 459,  # v5p
    "TPU v6( lite|e)": 918,
}


def peak_tflops(device_kind: str) -> float | None:
    """Return a device's peak TFLOP/s in dense bfloat16 matmuls, None if unknown, as for CPUs."""
    return next((peak for name, peak in _PEAKS.items() if re.search(name, device_kind)), None)


def training_flops(config: Config, B: int, S: int, T: int) -> float:
    """Count the model FLOPs of a training step on B rows of S source and T target positions.

    Only matmuls count, as in PaLM (Chowdhery et al. 2022, appendix B: 6 N + 12 L H Q T per token):
    6 FLOPs per multiplication and addition in the forward pass, because the backward pass has two
    matmuls for each one. Per row, with h = H (d_k + d_v) and F = 2 D d_ff (with a gate: 3 D d_ff),
    are

        encoder layer: S (2 D h + F) for projections and feed-forward layer, S S h for attention
        decoder layer: T (3 D h + F) + S D h (cross-attention's keys and values), (T T + T S) h
        softmax: T D V

    All positions count, including padding and masked keys; with R-Drop or SimCut, each row
    counts twice.
    Norms, the optimizer and activations that ``model.remat`` recomputes do not count. Gradients of
    frozen parameters count, although they are not computed.
    """
    model = config.model
    D, h = model.d_model, model.num_heads * (model.head_width_k + model.head_width_v)
    F = (3 if model.is_gated else 2) * D * model.d_ff
    encoder = model.num_layers * S * (h * (2 * D + S) + F)
    decoder = model.decoder_layers * (S * D * h + T * (h * (3 * D + S + T) + F))
    rows = B * 2 if config.training.r_drop or config.training.simcut else B
    return 6 * rows * (encoder + decoder + T * D * model.vocab_size)
