"""Matplotlib figures of attention."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer_jax import UserError, needs_extra, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FONT = 8  # points
_CELL = 0.17  # inches per token
_FAINTEST = 0.02  # relative to the largest weight; fainter lines are not drawn


def attention_maps(
    queries: Sequence[str],
    keys: Sequence[str],
    weights_NHTS: np.ndarray,
    *,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
    title: str = "",
) -> Figure:
    """Draw one attention heat map per layer and head, with queries as rows and keys as columns.

    Args:
      queries, keys: T and S tokens.
      weights_NHTS: attention weights of N layers and H heads. All maps share one color scale.
      layers, heads: layers and heads to draw, numbered from 1 as in the paper; -1 is the last.
        Default: all.

    Raises:
      UserError: a layer or head is invalid, the weights have the wrong shape, or matplotlib is not
        installed.
    """
    layers, heads = _selected(weights_NHTS, queries, keys, layers, heads)
    largest = weights_NHTS[np.ix_(layers, heads)].max()
    width, height = (0.3 + _CELL * max(len(tokens), 6) for tokens in (keys, queries))
    figure = _figure(2 + width * len(heads), 1 + height * len(layers))
    grid = figure.subplots(len(layers), len(heads), sharex=True, sharey=True, squeeze=False)
    for axes, (layer, head) in zip(grid.flat, product(layers, heads)):
        image = axes.imshow(weights_NHTS[layer, head], vmin=0, vmax=largest, cmap="Blues")
        axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=_FONT)
    style: Any = {"fontsize": _FONT, "parse_math": False}
    for axes in grid[-1]:
        axes.set_xticks(range(len(keys)), keys, rotation=90, **style)
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(queries)), queries, **style)
    figure.colorbar(image, ax=grid, label="weight")
    figure.suptitle(title, **style)
    return figure


def attention_lines(
    queries: Sequence[str],
    keys: Sequence[str],
    weights_NHTS: np.ndarray,
    *,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
    only: Sequence[int] = (),
    title: str = "",
) -> Figure:
    """Draw lines as in the paper's figures 3 to 5, from each query (left) to the keys (right).

    Opacity is proportional to weight, normalized to the largest drawn weight. Each head has a
    color, and each layer has two columns of tokens.

    Args:
      only: queries to draw, numbered from 1; -1 is the last. Default: all.
      queries, keys, weights_NHTS, layers, heads: see ``attention_maps``.
    """
    layers, heads, only = _selected(weights_NHTS, queries, keys, layers, heads, only)
    largest = weights_NHTS[np.ix_(layers, heads, only)].max()
    length = max(len(queries), len(keys))
    figure = _figure(3 * len(layers), 1 + _CELL * length)
    style: Any = {"fontsize": _FONT, "parse_math": False}

    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    colors = colormaps["tab10" if weights_NHTS.shape[1] <= 10 else "tab20"]
    for axes, layer in zip(figure.subplots(1, len(layers), squeeze=False)[0], layers):
        for place, head in enumerate(heads):
            # Offset the heads, so that they do not hide each other.
            shift = 0.6 * ((place + 0.5) / len(heads) - 0.5)
            lines, opacity = [], []
            for t, s in product(only, range(len(keys))):
                if (weight := weights_NHTS[layer, head, t, s] / largest) >= _FAINTEST:
                    lines.append([(0, t + shift), (1, s + shift)])
                    opacity.append(weight)
            axes.add_collection(LineCollection(lines, color=colors(head % 20), alpha=opacity))
            axes.plot([], [], color=colors(head % 20), label=f"head {head + 1}")  # for the legend
        for x, tokens, side in ((-0.03, queries, "right"), (1.03, keys, "left")):
            for y, token in enumerate(tokens):
                axes.text(x, y, token, ha=side, va="center", **style)
        axes.set_title(f"layer {layer + 1}", fontsize=_FONT)
        axes.set_ylim(length - 0.5, -0.5)
        axes.axis("off")
    figure.legend(
        *axes.get_legend_handles_labels(),
        title=f"largest weight {largest:.2g}",
        loc="outside lower center",
        ncols=3 * len(layers),
        fontsize=_FONT,
        title_fontsize=_FONT,
    )
    figure.suptitle(title, **style)
    return figure


def save_picture(figure: Figure, output: str | Path) -> None:
    """Write a figure as .svg, .png or .pdf. SVG files store text as text, displayed in the viewer's
    fonts.

    Raises:
      UserError: ``output`` has an unsupported suffix.
    """
    import matplotlib

    form, buffer = Path(output).suffix[1:], io.BytesIO()
    if form not in ("svg", "png", "pdf"):
        raise UserError(f"output is {str(output)!r}; expected a .svg, .png or .pdf file.")
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "transformer_jax"}
    undated: Any = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        if form == "svg":
            warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(buffer, format=form, metadata=undated.get(form), dpi=150)
    write_atomically(Path(output), buffer.getvalue())


def _figure(width: float, height: float) -> Figure:
    """Create an empty figure of at most 100 by 100 inches."""
    with needs_extra("figures"):
        from matplotlib.figure import Figure
    return Figure(figsize=(min(width, 100), min(height, 100)), layout="constrained")


def _selected(
    weights_NHTS: np.ndarray, queries: Sequence[str], keys: Sequence[str], *numbers: Sequence[int]
) -> list[list[int]]:
    """Convert layer, head or query numbers, which start at 1, to indices. Default: all."""
    shape = weights_NHTS.shape
    if len(shape) != 4 or shape[2:] != (len(queries), len(keys)) or not weights_NHTS.size:
        raise UserError(
            f"weights_NHTS has shape {shape}; expected (layers, heads, {len(queries)}, "
            f"{len(keys)}), for {len(queries)} queries and {len(keys)} keys."
        )
    found = []
    for what, chosen, total in zip(("layer", "head", "query"), numbers, shape):
        for number in chosen:
            if not 1 <= abs(number) <= total:
                raise UserError(
                    f"{what} is {number}; expected 1 to {total}, or -1 (the last) to -{total}."
                )
        found.append([n - 1 if n > 0 else total + n for n in chosen] or [*range(total)])
    return found
