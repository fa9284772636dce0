"""The report, rendered with the template page.html: tables, curves and attention heat maps.

Figures are data URLs with a transparent background.
"""

from __future__ import annotations

import base64
import difflib
import io
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from jinja2 import Environment, StrictUndefined
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from transformer_jax.evaluation import METRICS
from transformer_jax.report.attention import SentenceAttention, attention_maps
from transformer_jax.report.facts import (
    by_label,
    environment_texts,
    result_texts,
    setting_tables,
)
from transformer_jax.report.runs import Run

_CURVES = {
    "Loss": ("loss", "dev_loss", "linear"),
    "Perplexity": ("perplexity", "dev_perplexity", "log"),
    **{metric.label: ("", f"dev_{name}", "linear") for name, metric in METRICS.items()},
    "Learning rate": ("learning_rate", "", "linear"),
    "Gradient norm": ("gradient_norm", "", "log"),
    "Tokens per second": ("tokens_per_second", "", "linear"),
}
"""Maps a title to its fields in training and evaluation entries, and its scale."""
_MAPS: dict[str, Literal["encoder", "decoder", "cross"]] = {
    "Cross-attention": "cross",
    "Encoder self-attention": "encoder",
    "Decoder self-attention": "decoder",
}


def page(runs: Sequence[Run]) -> bytes:
    """Render the report on these runs as HTML."""
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = jinja.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    pairs = dict.fromkeys(pair for run in runs for pair in run.translations)
    html = template.render(
        runs=runs,
        now=f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}",
        colors=[to_hex(f"C{place}") for place, _ in enumerate(runs)],
        curves=list(_curves(runs)),
        results=by_label([result_texts(run) for run in runs]),
        environment=by_label([environment_texts(run) for run in runs]),
        settings=setting_tables([run.config for run in runs]),
        pairs=pairs,
        word_diff=word_diff,
        attention=[
            (run.name, text, _all_heat_maps(attention))
            for run in runs
            for text, attention in run.attention.items()
        ],
    )
    return html.encode(errors="replace")  # unpaired surrogates


def _curves(runs: Sequence[Run]) -> Iterator[tuple[str, str, str]]:
    """Yield the title, image and alt text of each figure."""
    for title, (train, dev, scale) in _CURVES.items():
        figure = Figure(figsize=(4.4, 2.6), layout="constrained")
        latest_values = list[str]()
        axes = figure.subplots()
        for place, run in enumerate(runs):
            for kind, name in (("train", train), ("dev", dev)):
                steps, values = run.curve(kind, name)
                if steps:
                    style: dict[str, Any] = {"marker": "."} if kind == "dev" else {"alpha": 0.6}
                    axes.plot(steps, values, color=f"C{place}", **style)
                    latest = f"{values[-1]:.4g} at step {steps[-1]:.0f}"
                    latest_values.append(f"{run.name} ({kind}): {latest}")
        if latest_values:
            axes.set(xlabel="step", yscale=scale)
            axes.grid(alpha=0.3)
            yield title, _data_url(figure), f"{title} by step. {'; '.join(latest_values)}."


def _all_heat_maps(attention: SentenceAttention) -> dict[str, str]:
    """Plot each type of attention. Returns data URLs by title."""
    return {title: _heat_maps(*attention.of(kind)) for title, kind in _MAPS.items()}


def _heat_maps(queries: Sequence[str], keys: Sequence[str], weights_NHTS: np.ndarray) -> str:
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


def word_diff(reference: str, translation: str) -> list[tuple[str, str]]:
    """Compute a diff of words, or of characters if there are no spaces. Returns (tag, text) pairs
    with tags "" (equal), "del" and "ins".
    """
    has_spaces = " " in reference + translation
    separator = " " if has_spaces else ""
    old_words = reference.split() if has_spaces else list(reference)
    new_words = translation.split() if has_spaces else list(translation)
    matcher = difflib.SequenceMatcher(None, old_words, new_words, autojunk=False)
    diff = []
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind == "equal":
            parts = [("", old_words[i:j])]
        else:
            parts = [("del", old_words[i:j]), ("ins", new_words[k:m])]
        for tag, words in parts:
            if words:
                diff.append((tag, separator.join(words)))
                diff.append(("", separator))
    return diff
