"""Model FLOPs of a training step, and peak speeds of devices."""

from __future__ import annotations

from transformer_jax.settings.config import Config

# TFLOP/s in dense bfloat16 matmuls by part of JAX's device_kind, from the vendors' data sheets.
_PEAKS = {
    "A100": 312,
    "H100 80GB HBM3": 989,  # SXM
    "H200": 989,
    "B200": 2250,
    "TPU v4": 275,
    "TPU v5e": 197,
    "TPU v5": 459,  # v5p
    "TPU v6e": 918,
}


def peak_tflops(device_kind: str) -> float | None:
    """Return a device's peak TFLOP/s in dense bfloat16 matmuls, None if unknown, as for CPUs."""
    kind = device_kind.replace(" lite", "e")  # TPU v5 lite
    return next((peak for name, peak in _PEAKS.items() if name in kind), None)


def training_flops(config: Config, B: int, S: int, T: int) -> float:
    """Count the model FLOPs of a training step on B rows of S source and T target positions.

    As in PaLM (Chowdhery et al. 2022, appendix B), only matmuls count: 6 FLOPs for each position
    and weight (2 in the forward pass, 4 in the backward pass) and, in attention, 6 FLOPs for each
    query, key and number in a head's key and value, with h = H (d_k + d_v) such numbers per key:

        encoder layer: S (2 D h + F) weights and S S h
        decoder layer: S D h weights (cross-attention's keys and values), T (3 D h + F) weights and
            T T h + T S h
        softmax: T D V weights

    F = 2 D d_ff weights in a feed-forward layer (swiglu: 3). All positions count, also padding and
    masked keys; with R-Drop, each row counts twice. Norms, Adam and activations that ``model.remat``
    recomputes do not count.
    """
    model = config.model
    D, h = model.d_model, model.num_heads * (model.head_width_k + model.head_width_v)
    F = (3 if model.activation == "swiglu" else 2) * D * model.d_ff
    encoder = model.num_layers * S * (h * (2 * D + S) + F)
    decoder = model.decoder_layers * (S * D * h + T * (h * (3 * D + S + T) + F))
    rows = B * 2 if config.training.r_drop else B
    return 6 * rows * (encoder + decoder + T * D * model.vocab_size)
