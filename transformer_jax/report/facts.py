"""Tables of the page: results, environment, settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from transformer_jax import Config
from transformer_jax.report.runs import Run, is_number

_ENVIRONMENT = ("devices", "processes", "cpu", "cpu_cores", "platform", "python", "versions")
_ELSEWHERE = {"kind", "time", "environment", *_ENVIRONMENT}  # no results


def results(run: Run) -> dict[str, str]:
    """The best evaluation, and the latest value of each field of metrics.jsonl and summary.json."""
    facts = {"status": run.status}
    for name, best in (("dev_loss", min), ("dev_bleu", max)):
        if values := run.curve("dev", name)[1]:
            facts[f"best {name}"] = _text(best(values))
    latest: dict[str, Any] = {}
    for entry in run.entries:
        latest |= entry
        if is_number(entry.get("time")):
            when = datetime.fromtimestamp(min(abs(entry["time"]), 2e11), UTC)  # dates end there
            facts["last entry"] = f"{when:%Y-%m-%d %H:%M UTC}"
    return facts | _flat({name: latest[name] for name in latest if name not in _ELSEWHERE})


def environment(run: Run) -> dict[str, str]:
    """Hardware and versions at the last start or at the end."""
    latest: dict[str, Any] = {}
    for entry in run.entries:
        given = entry.get("environment", entry)
        latest |= given if isinstance(given, dict) else {}
    return _flat({name: latest[name] for name in _ENVIRONMENT if name in latest})


def by_label(columns: Sequence[dict[str, str]]) -> list[list[str]]:
    """Rows of a table: a label, and its text in each column."""
    labels = dict.fromkeys(label for column in columns for label in column)
    return [[label, *(column.get(label, "") for column in columns)] for label in labels]


def settings(runs: Sequence[Run]) -> dict[str, list[list[str]]]:
    """Tables of settings, first those that differ: name, the value of each run, the default."""
    *columns, defaults = (
        _flat(dataclasses.asdict(config)) if config else {}
        for config in (*(run.config for run in runs), Config())
    )
    tables: dict[str, list[list[str]]] = {
        "Different between the runs": [],
        "Not the default": [],
        "The default": [],
    }
    different, chosen, unchanged = tables.values()
    for row in by_label([*columns, defaults]) if any(columns) else ():
        values = {value for value, column in zip(row[1:], columns) if column}
        rows = different if len(values) > 1 else unchanged if values <= {row[-1]} else chosen
        rows.append(row)
    return {title: rows for title, rows in tables.items() if rows}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """``{"model.d_model": "512", ...}``."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        nested = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": _text(value)}
    return flat


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if type(value) is int else str(value)
