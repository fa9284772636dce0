"""Figures for the report: curves and attention heat maps on a transparent background."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from transformer_jax.report.attention import attention_maps


def curves_chart(curves: Iterable[tuple[Sequence[float], Sequence[float], Any]], scale: str) -> str:
    """Plot curves of (steps, values, style) on a linear or log ``scale``. Returns a data URL."""
    figure = Figure(figsize=(4.4, 2.6), layout="constrained")
    axes = figure.subplots()
    for steps, values, style in curves:
        axes.plot(steps, values, **style)
    axes.set(xlabel="step", yscale=scale)
    axes.grid(alpha=0.3)
    return _data_url(figure)


def heat_maps(queries: Sequence[str], keys: Sequence[str], weights_NHTS: np.ndarray) -> str:
    """Plot the last layer's attention as one heat map per head, with queries as rows and keys as
    columns. Returns a data URL.

    Long sentences are truncated to 60 tokens.
    """
    maps = attention_maps(queries[:60], keys[:60], weights_NHTS[..., :60, :60], layers=[-1])
    return _data_url(maps)


def _data_url(figure: Figure) -> str:
    """Encode the figure as a data URL, which isolates it from the page's ids and styles."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # keep text as text
        figure.savefig(buffer, format="svg", transparent=True)
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
