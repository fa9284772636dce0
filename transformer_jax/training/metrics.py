"""Metrics of training: means per token, speed, and model FLOPs."""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.devices.machine import peak_memory_bytes
from transformer_jax.runs.progress import Progress
from transformer_jax.settings.config import Config
from transformer_jax.training.loss import LossSums
from transformer_jax.training.step import StepMetrics
from transformer_jax.training.two_passes import two_passes

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


def means_per_token(sums: LossSums, prefix: str = "") -> dict[str, float]:
    """Compute mean loss (label-smoothed), nll, perplexity and accuracy per token from sums."""
    count = float(sums.tokens) or math.nan
    nll = float(sums.nll) / count
    return {
        f"{prefix}loss": float(sums.loss) / count,
        f"{prefix}nll": nll,
        f"{prefix}perplexity": math.exp(min(nll, 700.0)),
        f"{prefix}accuracy": float(sums.correct) / count,
    }


class Meter:
    """Running totals in ``progress``, and the log entry of the steps since the last entry."""

    def __init__(self, progress: Progress, devices: Sequence[jax.Device]):
        self._progress = progress
        self._devices = devices
        self._sums: LossSums
        self.restart()
        self._begin_entry()

    def restart(self) -> None:
        """Exclude the time since the last step from the training time."""
        self._last_time = time.perf_counter()

    def add(self, metrics: StepMetrics, flops: float) -> None:
        """Add one step's metrics and model FLOPs."""
        now = time.perf_counter()
        self._progress.train_seconds += now - self._last_time
        self._last_time = now
        self._progress.tokens += int(metrics.source_tokens + metrics.sums.tokens)
        self._flops += flops
        self._last_step = metrics
        if not metrics.bad_in_a_row:
            self._sums = jax.tree.map(operator.add, self._sums, metrics.sums)

    def entry(self, *, epoch: float) -> dict[str, Any]:
        """Return the log entry, and begin the next one.

        Means and speeds are of all steps since the last entry, NaN if all steps were skipped. Other
        values are of the last step.
        """
        seconds = max(self._progress.train_seconds - self._seconds_before, 1e-9)
        tflops = self._flops / 1e12 / seconds / len(self._devices)
        values: dict[str, Any] = {
            **means_per_token(self._sums),
            "tokens_per_second": (self._progress.tokens - self._tokens_before) / seconds,
            "tflops_per_device": tflops,
        }
        if peak := peak_tflops(self._devices[0].device_kind):
            values["mfu"] = tflops / peak
        values |= {
            "learning_rate": float(self._last_step.learning_rate),
            "gradient_norm": float(self._last_step.gradient_norm),
            "bad_steps": int(self._last_step.bad_steps),
            "epoch": epoch,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        self._begin_entry()
        return values

    def _begin_entry(self) -> None:
        self._seconds_before = self._progress.train_seconds
        self._tokens_before = self._progress.tokens
        self._flops = 0.0
        self._sums = LossSums(*np.zeros(4))


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
    D = model.d_model
    h = model.num_heads * (model.head_width_k + model.head_width_v)
    F = (3 if model.is_gated else 2) * D * model.d_ff
    encoder = model.num_layers * S * (h * (2 * D + S) + F)
    decoder = model.decoder_layers * (S * D * h + T * (h * (3 * D + S + T) + F))
    num_rows = B * 2 if two_passes(config.training) else B
    return 6 * num_rows * (encoder + decoder + T * D * model.vocab_size)
