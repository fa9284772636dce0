"""Matplotlib figures of attention."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer_jax import UserError, needs_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FONT = 8  # points
_CELL = 0.17  # inches per token


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


def save_picture(figure: Figure, output: str | Path) -> None:
    """Write a figure in the format of its suffix, such as .svg, .png or .pdf. SVG files store text
    as text, displayed in the viewer's fonts.

    Raises:
      UserError: the suffix is unsupported.
    """
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        if str(output).endswith(".svg"):
            warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        try:
            figure.savefig(output, dpi=150)
        except ValueError as error:
            raise UserError(f"output is {str(output)!r}: {error}") from None


def _figure(width: float, height: float) -> Figure:
    """Create an empty figure of at most 100 by 100 inches."""
    with needs_extra("figures"):
        from matplotlib.figure import Figure
    return Figure(figsize=(min(width, 100), min(height, 100)), layout="constrained")


def _selected(
    weights_NHTS: np.ndarray, queries: Sequence[str], keys: Sequence[str], *numbers: Sequence[int]
) -> list[list[int]]:
    """Convert layer and head numbers, which start at 1, to indices. Default: all."""
    shape = weights_NHTS.shape
    if len(shape) != 4 or shape[2:] != (len(queries), len(keys)) or not weights_NHTS.size:
        raise UserError(
            f"weights_NHTS has shape {shape}; expected (layers, heads, {len(queries)}, "
            f"{len(keys)}), for {len(queries)} queries and {len(keys)} keys."
        )
    found = []
    for what, chosen, total in zip(("layer", "head"), numbers, shape):
        for number in chosen:
            if not 1 <= abs(number) <= total:
                raise UserError(
                    f"{what} is {number}; expected 1 to {total}, or -1 (the last) to -{total}."
                )
        found.append([n - 1 if n > 0 else total + n for n in chosen] or [*range(total)])
    return found
