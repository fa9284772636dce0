"""Bar chart of the summary table at the top of docs/performance.md, for light and dark pages.

    python -m benchmarks.chart --output docs

Writes speed-light.svg and speed-dark.svg. Bars show the ratio of our speed to another program's.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
COLORS = {  # text, bar where we are faster, bar where we are slower
    "light": ("#1f2328", "#2f81f7", "#d4843a"),
    "dark": ("#e6edf3", "#539bf5", "#c9803f"),
}


class Comparison(NamedTuple):
    task: str
    model: str
    hardware: str
    ours: str
    other: str
    ratio: float


def comparisons(page: str) -> list[Comparison]:
    """Parse the rows of the first table of docs/performance.md."""
    [rows] = re.findall(r"^\| task .*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [line.strip("| ").split(" | ") for line in rows.replace("`", "").splitlines()]
    return [Comparison(*row[:5], float(row[5])) for row in cells]


def chart(rows: list[Comparison], text: str, faster: str, slower: str) -> Figure:
    figure = Figure(figsize=(9.6, 0.34 * len(rows) + 0.9), layout="constrained")
    axes = figure.add_subplot()
    labels = [f"{row.task}: {row.model}, {row.hardware}" for row in rows]
    ratios = [row.ratio for row in rows]
    axes.barh(range(len(rows)), ratios, color=[slower if ratio < 1 else faster for ratio in ratios])
    for height, row in enumerate(rows):  # to the right of the line at 1
        place = (max(1, row.ratio) + 0.05, height)
        label = f"{row.ratio:g} × {row.other}"
        axes.annotate(label, place, va="center", color=text, fontsize=9)
    axes.set_yticks(range(len(rows)), labels, color=text, fontsize=9)
    axes.invert_yaxis()
    axes.axvline(1, color=text, linewidth=1, linestyle=":")
    axes.set_xlim(0, 1.5 * max(ratios))
    axes.set_xticks([])
    axes.set_title("Our speed divided by theirs; dotted: equal", color=text, fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def main() -> None:
    flags = ArgumentParser(description=__doc__)
    flags.add_argument("--output", type=Path, default=ROOT / "docs", help="folder")
    output: Path = flags.parse_args().output
    rows = comparisons((ROOT / "docs/performance.md").read_text())
    # keep text as text; make files reproducible
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "speed"})
    matplotlib.rcParams["font.sans-serif"] = ["Arial", "Helvetica", "DejaVu Sans"]
    for theme, colors in COLORS.items():
        path = output / f"speed-{theme}.svg"
        chart(rows, *colors).savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
