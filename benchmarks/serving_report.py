"""The report of ``serving.py``."""

from __future__ import annotations

import math
import sys
from statistics import median
from typing import Any

from benchmarks.serving_engines import Turn, medians

_COLUMNS = {  # of the table: what stands above, and decimals
    "sentences_per_second": ("sent/s", 1),
    "p50_ms": ("p50 ms", 1),
    "p95_ms": ("p95", 1),
    "p99_ms": ("p99", 1),
    "max_ms": ("max", 1),
    "requests": ("requests", 0),
    "errors": ("errors", 0),
    "differ": ("differ", 0),
    "memory_mb_start": ("MB", 0),
    "memory_mb_end": ("at end", 0),
    "cpu_seconds": ("CPU s", 1),
    "cpu_ms_per_sentence": ("ms/sent", 1),
    "load_cpu_seconds": ("clients'", 1),
    "others": ("others", 2),
}

_SHOWN = 6  # errors and answers that differ, of an engine and a load

Turns = dict[tuple[str, str], list[Turn]]
"""The turns of each engine (``ours``) and load (``64 clients``)."""


def load_of(clients: int) -> str:
    """What the table calls this load."""
    return f"{clients} client{'s' * (clients != 1)}"


def compared(turns: Turns) -> dict[str, float]:
    """Ratios of speeds at the same load, or of the largest load to all lines at once; and what the
    service adds to the latency of a line. Medians over rounds.
    """
    found = {}
    loads = [load for name, load in turns if name == "ours"]
    for load in loads:
        ours = turns["ours", load]
        others = [("ct2", load)]
        if load == max(loads, key=lambda load: int(load.split()[0])):
            others += [("translator", "all lines"), ("decode", "all lines")]
        for other in others:
            if other in turns:
                ratios = [_speed(a) / _speed(b) for a, b in zip(ours, turns[other], strict=True)]
                found[f"sentences/s: ours, {load} / {', '.join(other)}"] = median(ratios)
        for alone in ("translator", "one_by_one"):
            if load == "1 client" and (alone, "one line") in turns:
                added = [
                    median(a.ms_of_lines[i] - b.ms_of_lines[i] for i in common)
                    for a, b in zip(ours, turns[alone, "one line"], strict=True)
                    if (common := a.ms_of_lines.keys() & b.ms_of_lines.keys())
                ]
                found[f"ms added to a line: ours, 1 client - {alone}"] = median(added or [math.nan])
    return found


def _speed(turn: Turn) -> float:
    return turn.figures["sentences_per_second"] or math.nan


def print_report(turns: Turns, ratios: dict[str, float]) -> None:
    """The table, and what it comes to."""
    heads = " ".join(f"{head:>{max(8, len(head))}}" for head, _ in _COLUMNS.values())
    print(f"{'':<24}{heads}")
    for (name, load), each in turns.items():
        print(row(name, load, medians(each)))
    for each in (each for (name, _), each in turns.items() if name == "decode"):
        figures = medians(each)
        print(
            f"decode: {figures['program_seconds']:.2f} s for all lines, "
            f"{figures['startup_seconds']:.2f} s for an empty one"
        )
    for name, value in ratios.items():
        print(f"{name}: {value:.3f}")
    for (name, load), each in turns.items():
        if name == "ct2" and not any(turn.figures["errors"] for turn in each):
            continue  # it may find others
        shown = dict.fromkeys(text for turn in each for text in turn.wrong)
        for text in list(shown)[:_SHOWN]:
            print(f"{name}, {load}: {text}")
    sys.stdout.flush()


def row(name: str, load: str, figures: dict[str, Any]) -> str:
    """One line of the table."""
    cells = []
    for key, (_, decimals) in _COLUMNS.items():
        value = figures.get(key, math.nan)
        cells.append(f"{'' if math.isnan(value) else f'{value:,.{decimals}f}':>8}")
    return f"{name:<11} {load:<11} {' '.join(cells)}"


def without_nan(value: Any) -> Any:
    """JSON has no NaN; and numbers of at most five digits are enough."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_nan(each) for each in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.5g}")
    return value
