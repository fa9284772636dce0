"""The page: pictures and tables, laid out by the template page.html."""

from __future__ import annotations

import base64
import difflib
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from transformer_jax.attention import READABLE, Kind, SentenceAttention
from transformer_jax.pictures.drawing import (
    attention_maps,
    curves_picture,
    distinct_colours,
    picture_bytes,
)
from transformer_jax.report.facts import by_label, environment, figures, settings, text, versions
from transformer_jax.report.runs import Run, number
from transformer_jax.report.samples import Samples

_CURVES = {
    "Loss": ("loss", "dev_loss"),
    "Perplexity": ("perplexity", "dev_perplexity"),
    "BLEU": ("", "dev_bleu"),
    "Learning rate": ("learning_rate", ""),
    "Gradient norm": ("gradient_norm", ""),
    "Tokens a second": ("tokens_per_second", ""),
    "Share of real tokens, target side": ("target_fill", ""),
}
"""By title a figure of entries of training, and one of evaluations."""

_MAPS: dict[Kind, str] = {
    "cross": "From translation to source",
    "encoder": "Within the source",
    "decoder": "Within the translation",
}


def page(runs: Sequence[Run], samples: Samples) -> bytes:
    """The report of these runs, as HTML."""
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    jinja.filters |= {"quote": lambda path: shlex.quote(str(path)), "number": number, "text": text}
    template = jinja.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    html = template.render(
        runs=runs,
        now=text(time.time(), "date"),
        colours=[to_hex(colour) for colour in distinct_colours(len(runs))],
        curves=list(_curves(runs)),
        figures=by_label(runs, figures),
        environment=by_label(runs, environment),
        settings=settings(runs),
        versions=[versions(run) for run in runs],
        translations=[
            (pair, [(name, word_diff(pair[1], found)) for name, found in by_run.items()])
            for pair, by_run in samples.translations.items()
        ],
        attention=[
            (which, {title: _map(found, kind) for kind, title in _MAPS.items()})
            for which, found in samples.attention.items()
        ],
    )
    return html.encode(errors="replace")  # halves of surrogate pairs


def _curves(runs: Sequence[Run]) -> Iterator[tuple[str, str, str]]:
    """Titles, pictures and what they show in words."""
    for title, names in _CURVES.items():
        curves, said = [], []
        for run, colour in zip(runs, distinct_colours(len(runs))):
            for kind, name in zip(("train", "dev"), names):
                steps, values = run.curve(kind, name)
                if not steps:
                    continue
                pale = kind == "train" and names[1]
                style: dict[str, Any] = {"color": colour, "alpha": 0.7 if pale else 1}
                style["marker"] = "." if kind == "dev" or len(steps) == 1 else ""
                curves.append((steps, values, style | {"linewidth": 1.2 if pale else 1.6}))
                ends = dict.fromkeys([(steps[0], values[0]), (steps[-1], values[-1])])
                told = (f"{value:.4g} at step {step:.0f}" for step, value in ends)
                said.append(f"{run.name} ({kind}): {', '.join(told)}")
        if curves:
            yield title, _svg(curves_picture(curves)), f"{title} by step. {'; '.join(said)}."


def _map(attention: SentenceAttention, kind: Kind) -> tuple[str, str]:
    """A picture of the last layer's heads, and what it shows in words."""
    queries, keys, weights_NHTS = attention.of(kind)
    view = queries[:READABLE], keys[:READABLE], weights_NHTS[..., :READABLE, :READABLE]
    strongest_T = weights_NHTS[-1].mean(axis=0).argmax(axis=-1)
    looks = (f"{token} to {keys[place]}" for token, place in zip(queries, strongest_T))
    said = f"Each row's largest weight, on average over heads: {', '.join(looks)}."
    return _svg(attention_maps(*view, layers=[-1])), said


def _svg(figure: Figure) -> str:
    """A data URL: in an image its names and styles do not mix with the page's."""
    return f"data:image/svg+xml;base64,{base64.b64encode(picture_bytes(figure, 'svg')).decode()}"


def word_diff(reference: str, translation: str) -> list[tuple[str, str]]:
    """Words under "", "del" (missing) and "ins" (added); characters if there are no spaces."""
    split, blank = (str.split, " ") if " " in reference + translation else (list, "")
    old, new = split(reference), split(translation)
    found = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        parts = [("del", old[i:j]), ("ins", new[k:m])] if kind != "equal" else [("", old[i:j])]
        for tag, words in parts:
            found += [(tag, blank.join(words)), ("", blank)] if words else []
    return found
