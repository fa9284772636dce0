"""Figures by matplotlib: attention, the positional encoding, the learning rate, rows of a table.

The background is transparent, weights are shades of opacity, and text has a medium grey: one file
can be read on light and on dark pages. Sizes are in points, 72 an inch.
"""

from __future__ import annotations

import colorsys
import io
import logging
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps, font_manager
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage
from matplotlib.textpath import text_to_path
from matplotlib.ticker import LogLocator, MaxNLocator

from transformer_jax.errors import UserError
from transformer_jax.storage import write_atomically

logger = logging.getLogger(__name__)

_INK, _BLUE, _ORANGE = "#7b7b7b", "#2a7ad2", "#d9661f"
_FONT = "DejaVu Sans"  # matplotlib brings it
_FAINTEST = 0.02  # of the largest weight; fainter lines are not drawn
_MARGIN, _HEADING, _FOOTER = 14.0, 14.0, 28.0
_NARROWEST_MAP, _LINES = 90.0, 130.0


def attention_maps(
    queries: Sequence[str],
    keys: Sequence[str],
    weights_NHTS: np.ndarray,
    *,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
    title: str = "",
) -> Figure:
    """A map for each layer and head: how much a query (row) attends to a key (column).

    Args:
      queries, keys: T and S tokens.
      weights_NHTS: attention weights of N layers and H heads. One scale is for all maps.
      layers, heads: which are drawn, from 1 as in the paper; -1 is the last. Default: all.

    Raises:
      UserError: no such layer or head; weights of another shape.
    """
    weights_NHTS = _of_shape(weights_NHTS, len(queries), len(keys))
    layers, heads = _chosen("layer", layers, weights_NHTS), _chosen("head", heads, weights_NHTS)
    queries, keys, longest = _drawable(queries), _drawable(keys), max(weights_NHTS.shape[2:])
    font = _font_size(longest)
    cell = max(1.3 * font, _NARROWEST_MAP / longest)
    columns = len(heads) if len(layers) > 1 else min(len(heads), 4)
    largest = float(weights_NHTS[np.ix_(layers, heads)].max()) or 1.0
    with _style([*queries, *keys, title], font):
        size = cell * len(keys), cell * len(queries)
        margins = _width(queries, font), max(0, _NARROWEST_MAP - size[0]), _width(keys, font)
        figure, panels = _panels(len(layers) * len(heads), columns, size, margins, title)
        for axes, (layer, head) in zip(panels, product(layers, heads), strict=True):
            image = _image(axes, weights_NHTS[layer, head], (0, largest), _BLUE)
            axes.set_title(f"layer {layer + 1}, head {head + 1}", loc="left")
            axes.set_xticks(
                range(len(keys)), keys, rotation=90, rotation_mode="anchor", ha="right", va="center"
            )
            axes.set_yticks(range(len(queries)), queries)
            axes.grid(alpha=0.15, linewidth=0.4)
        scale = _axes(figure, margins[0] + _MARGIN, -_FOOTER, _NARROWEST_MAP, 6)
        bar = figure.colorbar(image, cax=scale, orientation="horizontal")
        bar.set_ticks([0, largest], labels=["0", f"{largest:.2g}"])
        bar.set_label("weight", labelpad=-font)
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
    """Lines as in the paper's figures 3 to 5: from each query (left) to the keys it attends to.

    Opacity and width of a line grow with its weight, its colour is its head's. There is a pair of
    columns for each layer.

    Args:
      only: the queries, from 0, whose lines are drawn; the others' tokens are faint. Default: all.
      queries, keys, weights_NHTS, layers, heads: as those of ``attention_maps``.
    """
    weights_NHTS = _of_shape(weights_NHTS, len(queries), len(keys))
    layers, heads = _chosen("layer", layers, weights_NHTS), _chosen("head", heads, weights_NHTS)
    queries, keys, longest = _drawable(queries), _drawable(keys), max(weights_NHTS.shape[2:])
    font, only = _font_size(longest), only or range(len(queries))
    row = 1.4 * font
    colours = distinct_colours(weights_NHTS.shape[1])
    with _style([*queries, *keys, title], font):
        margins = _width(queries, font), max(_width(keys, font), 16 * len(heads) - _LINES), 0
        size = _LINES, row * longest
        figure, panels = _panels(len(layers), min(len(layers), 3), size, margins, title)
        drawn_NHTS = weights_NHTS[np.ix_(layers, heads, only)]
        largest = float(drawn_NHTS.max()) or 1.0
        for axes, layer, drawn_HTS in zip(panels, layers, drawn_NHTS / largest, strict=True):
            axes.set_title(f"layer {layer + 1}")
            axes.set(xlim=(0, 1), ylim=(longest - 0.5, -0.5))
            axes.axis("off")
            _draw_lines(axes, drawn_HTS, only, [colours[head] for head in heads], row)
            for t, token in enumerate(queries):
                axes.text(0, t, token, ha="right", va="center", alpha=1 if t in only else 0.5)
            for s, token in enumerate(keys):
                axes.text(1, s, token, ha="left", va="center")
        legend = _axes(figure, _MARGIN, -_FOOTER, _LINES, _HEADING)
        legend.set(xlim=(0, _LINES), ylim=(0, _HEADING))  # points
        legend.axis("off")
        legend.text(0, 5, "head", fontsize=9)
        for place, head in enumerate(heads):
            legend.text(30 + 16 * place, 5, str(head + 1), color=colours[head], fontsize=9)
        legend.text(0, -8, f"largest weight {largest:.2g}", fontsize=9)
    return figure


def _draw_lines(
    axes: Axes, weights_HTS: np.ndarray, queries: Sequence[int], colours: Sequence[Any], row: float
) -> None:
    h_P, t_P, s_P = np.nonzero(weights_HTS >= _FAINTEST)
    weights_P = weights_HTS[h_P, t_P, s_P]
    # Heads lie side by side, so that none hides another.
    shift_P = 0.6 * ((h_P + 0.5) / len(colours) - 0.5)
    left_P, right_P = np.array(queries)[t_P] + shift_P, s_P + shift_P
    lines_P = [((0.02, left), (0.98, right)) for left, right in zip(left_P, right_P)]
    shades_P4 = np.column_stack([np.array(colours)[h_P], weights_P])
    widths_P = 0.2 + weights_P * np.clip(row / len(colours), 0.8, 3)
    axes.add_collection(LineCollection(lines_P, colors=shades_P4, linewidths=widths_P))


def positions_picture(table_LD: np.ndarray) -> Figure:
    """Position vectors, such as ``sinusoidal_positions``: blue below 0, orange above."""
    largest = float(np.abs(table_LD).max())
    height, width = np.clip(np.array(table_LD.shape) * (4, 2), 200, 800)
    with _style([], 9):
        figure = _figure(width + 110, height + 50)
        axes = _axes(figure, 45, 10, width, height)
        image = _image(axes, table_LD, (-largest, largest), _BLUE, _ORANGE)
        axes.set(xlabel="dimension", ylabel="position")
        figure.colorbar(image, cax=_axes(figure, width + 60, 10, 8, height))
    return figure


def schedule_picture(curves: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Learning rates: by name of a curve its steps, from 1, and their rates."""
    with _style(curves, 9):
        figure = _figure(480, 290)
        axes = _axes(figure, 60, 10, 400, 240)
        for colour, (name, (steps, rates)) in zip(distinct_colours(len(curves)), curves.items()):
            axes.plot(steps, rates, label=name, color=colour)
        axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend(frameon=False)
    return figure


def rows_picture(
    rows: Sequence[str],
    panels: Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]],
) -> Figure:
    """Rows of a table beside those of the paper, whose base is at 0.

    In each panel, by its label: the paper's value of each row, and what was measured, a small dot
    each and their mean a large one; none where nothing was.
    """
    height = 16.0 * len(rows)
    with _style(rows, 9):
        left, width = 16 + _width(rows, 9), 250.0
        figure = _figure(left + len(panels) * (width + _MARGIN), height + 60)
        for place, (label, (paper, measured)) in enumerate(panels.items()):
            axes = _axes(figure, left + place * (width + _MARGIN), 24, width, height)
            axes.plot(paper, range(len(rows)), "D", color=_ORANGE, fillstyle="none", label="paper")
            means = [float(np.mean(values)) if values else math.nan for values in measured]
            axes.plot(means, range(len(rows)), "o", color=_BLUE, label="here")
            for row, values in enumerate(measured):
                axes.plot(values, [row] * len(values), ".", color=_BLUE, alpha=0.6, markersize=4)
            axes.axvline(0, color=_INK, linewidth=0.6)
            axes.grid(axis="y", alpha=0.3)
            axes.set(xlabel=label, ylim=(len(rows) - 0.5, -0.5))
            axes.set_yticks(range(len(rows)), [] if place else rows)
        figure.legend(*axes.get_legend_handles_labels(), loc="upper center", ncols=2, frameon=False)
    return figure


def curves_picture(
    curves: Iterable[tuple[Sequence[float], Sequence[float], dict[str, Any]]],
) -> Figure:
    """Figures by step, in a small picture without legend: steps, values and how to draw them (as
    ``matplotlib.axes.Axes.plot`` has it). The scale is logarithmic where values go far.
    """
    with _style([], 9):
        figure = _figure(300, 186)
        axes = _axes(figure, 52, 8, 240, 148)
        values: list[float] = []
        for steps, figures, settings in curves:
            axes.plot(steps, figures, **settings)
            values += figures
        axes.set(xlabel="step")
        axes.grid(alpha=0.3, linewidth=0.4)
        if values and 0 < 20 * min(values) < max(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_formatter("")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda x, _: f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.6g}")
    return figure


def save_picture(figure: Figure, output: str | Path) -> None:
    """Write a picture; the ending of ``output`` (.svg, .png, .pdf) chooses the format."""
    write_atomically(Path(output), picture_bytes(figure, Path(output).suffix[1:]))


def picture_bytes(figure: Figure, form: str) -> bytes:
    """A picture as a file of the format svg, png or pdf.

    In SVG text stays text, and the fonts are the viewer's.
    """
    buffer = io.BytesIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "transformer_jax", "pdf.fonttype": 42}
    settings["font.sans-serif"] = [_FONT]  # .svg names each
    dates: Any = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    dpi = min(150, 65_000 / max(figure.get_size_inches()))  # Agg's limit is 2^16 pixels
    with _no_warnings_of_glyphs(), matplotlib.rc_context(settings):
        figure.savefig(buffer, format=form, dpi=dpi, metadata=dates.get(form))
    return buffer.getvalue()


def _of_shape(weights: Any, T: int, S: int) -> np.ndarray:
    weights = np.asarray(weights)
    if weights.ndim != 4 or weights.shape[2:] != (T, S) or not weights.size:
        raise UserError(
            f"weights_NHTS is of shape {weights.shape}; expected (layers, heads, {T}, {S}), for "
            f"{T} queries and {S} keys."
        )
    return weights


def _chosen(what: str, numbers: Sequence[int], weights_NHTS: np.ndarray) -> list[int]:
    total = weights_NHTS.shape[what == "head"]
    for number in numbers:
        if not 1 <= abs(number) <= total:
            raise UserError(
                f"{what} is {number}; expected 1 to {total}, or -1 (the last) to -{total}."
            )
    return [number - 1 if number > 0 else total + number for number in numbers] or [*range(total)]


def _drawable(tokens: Sequence[str]) -> list[str]:
    """Tokens without control characters, which XML cannot hold."""
    allowed = " -~\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff"
    return [re.sub(f"[^{allowed}]", "\ufffd", token) for token in tokens]


def _font_size(tokens: int) -> float:
    return float(np.interp(tokens, [20, 60], [9, 6.5]))


def distinct_colours(number: int) -> list[Any]:
    """Red, green and blue, from 0 to 1: of medium lightness, none of them grey as the text is."""
    if number > 9:
        return [colorsys.hls_to_rgb(i / number, 0.45, 0.8) for i in range(number)]
    tab10: Any = colormaps["tab10"]
    return [colour for colour in tab10.colors if len({*colour}) > 1][:number]


@contextmanager
def _style(texts: Iterable[str], font: float) -> Iterator[None]:
    grey = "text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"
    settings: Any = dict.fromkeys((*grey, "grid.color"), _INK)
    settings |= dict.fromkeys(("font.size", "xtick.labelsize", "ytick.labelsize"), font)
    settings |= {"font.family": _families("".join(texts)), "text.parse_math": False}
    settings |= {"axes.titlesize": 9, "axes.titlepad": 3, "axes.linewidth": 0.6}
    settings |= {"xtick.major.size": 2, "ytick.major.size": 2, "axes.facecolor": "none"}
    with matplotlib.rc_context(settings):
        yield


def _families(text: str) -> list[str]:
    """Fonts that together have the text's characters, as far as installed ones have them."""
    families, missing = [_FONT], {*map(ord, text)}
    # The "last resort" has a box for every character.
    fonts = [font for font in font_manager.fontManager.ttflist if "Last Resort" not in font.name]
    for font in sorted(fonts, key=lambda font: (font.name != _FONT, font.name)):
        if not missing:
            break
        try:
            found = missing & font_manager.get_font(font.fname).get_charmap().keys()
        except (OSError, RuntimeError):  # a font of bitmaps, or gone
            continue
        if found and font.name not in families:
            families.append(font.name)
        missing -= found
    if missing:
        logger.warning(
            "No installed font has %s: .png and .pdf show boxes, a browser shows .svg right.",
            " ".join(map(chr, sorted(missing))),
        )
    return [*families, "sans-serif"]


@contextmanager
def _no_warnings_of_glyphs() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


def _width(tokens: Sequence[str], font: float) -> float:
    """Points that the longest token takes beside an axis."""
    measure, properties = text_to_path.get_text_width_height_descent, FontProperties(size=font)
    with _no_warnings_of_glyphs():
        return 8 + max(measure(token, properties, False)[0] for token in tokens)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width / 72, height / 72), facecolor="none")


def _axes(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    """Axes whose top left corner is x to the right and y down from the figure's (y < 0: up from
    its bottom).
    """
    all_x, all_y = figure.get_size_inches() * 72
    bottom = 1 - (y % all_y + height) / all_y
    return figure.add_axes((x / all_x, bottom, width / all_x, height / all_y))


def _panels(
    number: int,
    columns: int,
    size: tuple[float, float],
    margins: tuple[float, float, float],
    title: str,
) -> tuple[Figure, list[Axes]]:
    """Axes of one size in rows; their margins are to the left, to the right and below."""
    (width, height), (left, right, below) = size, margins
    step_x, step_y = left + width + right + _MARGIN, _HEADING + height + below + _MARGIN
    rows = -(-number // columns)
    all_x = max(columns * step_x, _width([title], 9)) + _MARGIN
    all_y = 2 * _HEADING + rows * step_y + _FOOTER
    figure = _figure(all_x, all_y)
    figure.text(_MARGIN / all_x, 1 - _MARGIN / all_y, title, fontsize=9, va="center")
    places = [divmod(place, columns) for place in range(number)]
    corners = [(_MARGIN + left + x * step_x, 3 * _HEADING + y * step_y) for y, x in places]
    return figure, [_axes(figure, *corner, width, height) for corner in corners]


def _image(axes: Axes, values: np.ndarray, limits: tuple[float, float], *colours: str) -> AxesImage:
    """Values as opacity: of one colour; or of two, from the first through nothing to the last."""
    solid, clear = ([to_rgba(colour, alpha) for colour in colours] for alpha in (1, 0))
    stops = [(0.0, clear[0]), (1.0, solid[0])]
    if len(colours) == 2:
        stops = [(0.0, solid[0]), (0.5, clear[0]), (0.5, clear[1]), (1.0, solid[1])]
    colormap = LinearSegmentedColormap.from_list("", stops)
    vmin, vmax = limits
    return axes.imshow(
        values, cmap=colormap, vmin=vmin, vmax=vmax, interpolation="none", aspect="auto"
    )
