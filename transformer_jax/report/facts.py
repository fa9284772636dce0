"""What the tables of the page say: figures, hardware and versions, settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any

from transformer_jax.config import Config
from transformer_jax.config_io import flatten
from transformer_jax.report.runs import Run

_FIGURES: tuple[tuple[str, str, str, str, Callable[[list[float]], float]], ...] = (
    # label, format, kinds of entries, figure, which of its values or what of all of them
    ("parameters", ",.0f", "start", "parameters", max),
    ("epochs", ".2f", "train end", "epoch", max),
    ("skipped steps", ".0f", "train", "bad_steps", max),
    ("lowest dev loss", ".4f", "dev", "dev_loss", min),
    ("best dev BLEU", ".2f", "dev", "dev_bleu", max),
    ("test BLEU", ".2f", "end", "test.bleu", max),
    ("test BLEU as in the paper", ".2f", "end", "test.paper_bleu", max),
    ("test chrF", ".2f", "end", "test.chrf", max),
    ("test, exact matches", ".2%", "end", "test.exact_match", max),
    ("training time", "time", "end", "train_seconds", max),
    ("floating-point operations, counted", ".2e", "end", "training_flops.counted", max),
    ("tokens a second, median", ",.0f", "train", "tokens_per_second", median),
    ("of these target tokens", ",.0f", "train", "target_tokens_per_second", median),
    ("real tokens, source side", ".1%", "start", "source_fill", max),
    ("real tokens, target side", ".1%", "start", "target_fill", max),
    ("share of time waiting for data", ".2%", "train", "data_wait_share", median),
    ("training held up by saving", "time", "save", "held_seconds", sum),
    ("first step done after", "time", "end", "first_step_seconds", max),
    ("compiled functions", ".0f", "compile", "seconds", len),
    ("compile time, sum over threads", "time", "compile", "seconds", sum),
    ("compile time, longest", "time", "compile", "seconds", max),
    ("peak memory of the process", "bytes", "train end", "peak_memory_bytes.host", max),
    ("peak memory of a device", "bytes", "train end", "peak_memory_bytes.device", max),
    ("last entry", "date", "start train dev save", "time", max),
)
_DIFFERENT, _CHOSEN, _DEFAULT = "Different between the runs", "Not the default", "The default"


def by_label(runs: Sequence[Run], facts: Callable[[Run], dict[str, str]]) -> dict[str, list[str]]:
    """What is known of each run, by what it is."""
    columns = [facts(run) for run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = {label: [column.get(label, "") for column in columns] for label in labels}
    return {label: row for label, row in rows.items() if any(row)}


def figures(run: Run) -> dict[str, str]:
    """Quality, speed, compile times and memory, as far as they are known."""
    facts = {"status": run.status, "checkpoints": ", ".join(f"{n:,}" for n in run.checkpoints)}
    for label, form, kinds, name, of in _FIGURES:
        values = run.curve(kinds, name)[1]
        facts[label] = text(of(values), form) if values else ""
    for end in run.of("end"):
        if facts["test BLEU"]:
            facts["sacreBLEU's signature"] = str(end["test"].get("bleu_signature"))
    return facts


def environment(run: Run) -> dict[str, str]:
    """Hardware and versions."""
    names = ("devices", "processes", "cpu", "cpu_cores", "platform", "python")
    known = run.environment
    return {name: _setting(known[name]) for name in names if name in known} | versions(run)


def versions(run: Run) -> dict[str, str]:
    """Of packages."""
    found = run.environment.get("versions")
    return (
        {name: str(version) for name, version in found.items()} if isinstance(found, dict) else {}
    )


def settings(runs: Sequence[Run]) -> dict[str, list[list[str]]]:
    """Tables of settings, first those that differ: name, each run's value, the default."""
    flat = [flatten(run.config) if run.config else {} for run in runs]
    tables: dict[str, list[list[str]]] = {_DIFFERENT: [], _CHOSEN: [], _DEFAULT: []}
    for name, default in flatten(Config()).items() if any(flat) else ():
        first, *others = [each[name] for each in flat if each]
        same = all(value == first for value in others)
        kind = _DIFFERENT if not same else _DEFAULT if first == default else _CHOSEN
        values = [*(each.get(name, "") for each in flat), default]
        tables[kind].append([name, *map(_setting, values)])
    return {title: rows for title, rows in tables.items() if rows}


def text(value: float, form: str) -> str:
    """A figure, in a format of Python's or as ``time`` (seconds), ``date`` or ``bytes``."""
    seconds = min(abs(value), 2e11)  # what Python's dates can hold
    match form:
        case "time":
            return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
        case "date":
            return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S UTC}"
        case "bytes":
            return f"{value / 1e9:,.3f} GB"
    return format(value, form)


def _setting(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
