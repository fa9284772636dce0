"""Tables for the report: results, environment, settings."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from transformer_jax import Config
from transformer_jax.evaluation import METRICS
from transformer_jax.report.runs import Run
from transformer_jax.settings.config_files import flatten

_DIFFERENT = "Different between runs"
_CHANGED = "Changed from the default"
_DEFAULT = "Default"


def result_texts(run: Run) -> dict[str, str]:
    """Return the best evaluation, and the latest value of every metric and summary field."""
    facts = {"status": run.status}
    best_of = {"dev_loss": min}
    for metric_name, metric in METRICS.items():
        best_of[f"dev_{metric_name}"] = max if metric.higher_is_better else min
    for name, best in best_of.items():
        _, values = run.curve("dev", name)
        if values:
            facts[f"best {name}"] = _text(best(values))
    latest = run.latest()
    if time := latest.get("time"):
        facts["last entry"] = f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M UTC}"
    # summary.json repeats the environment's fields.
    shown_elsewhere = {"kind", "step", "time", "environment", *latest.get("environment", {})}
    return facts | _texts({name: latest[name] for name in latest if name not in shown_elsewhere})


def environment_texts(run: Run) -> dict[str, str]:
    """Return the hardware and versions recorded when the run last started."""
    return _texts(run.latest().get("environment", {}))


def by_label(columns: Sequence[dict[str, str]]) -> list[list[str]]:
    """Build table rows: a label and its text in each column."""
    labels = dict.fromkeys(label for column in columns for label in column)
    return [[label, *(column.get(label, "") for column in columns)] for label in labels]


def setting_tables(configs: Sequence[Config]) -> dict[str, list[list[str]]]:
    """Build tables of settings: name, value in each run, default. Settings that differ between runs
    come first.
    """
    tables: dict[str, list[list[str]]] = {_DIFFERENT: [], _CHANGED: [], _DEFAULT: []}
    columns = [_texts(config) for config in (*configs, Config())]
    for row in by_label(columns):
        _, *values, default = row
        if len(set(values)) > 1:
            title = _DIFFERENT
        elif values[0] != default:
            title = _CHANGED
        else:
            title = _DEFAULT
        tables[title].append(row)
    return {title: rows for title, rows in tables.items() if rows}


def _texts(values: Any) -> dict[str, str]:
    """Format nested fields: ``{"model.d_model": "512", ...}``."""
    return {name: _text(value) for name, value in flatten(values).items()}


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if type(value) is int else str(value)
