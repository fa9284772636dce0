"""Reads a run's files. The report lists missing and corrupt files instead of failing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_jax import Config, SentenceAttention, UserError, load_config_file, local_workdir


@dataclass
class Run:
    """Contents of a run for the report.

    Attributes:
      entries: the lines of metrics.jsonl, and summary.json as an entry of kind "end".
      problems: missing and corrupt files.
      translations: sample translations by (source, reference).
      attention: attention weights by sentence.
    """

    name: str
    workdir: Path
    config: Config | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    translations: dict[tuple[str, str], str] = field(default_factory=dict)
    attention: dict[str, SentenceAttention] = field(default_factory=dict)

    def curve(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of a field in entries of one kind, without null values (which
        were not finite).
        """
        known = [
            e for e in self.entries if e["kind"] == kind and isinstance(e.get(name), int | float)
        ]
        return [entry["step"] for entry in known], [entry[name] for entry in known]

    def latest(self) -> dict[str, Any]:
        """Return the latest value of each field."""
        return {name: value for entry in self.entries for name, value in entry.items()}

    @property
    def status(self) -> str:
        """Status such as "finished, step 4 of 4"."""
        latest = self.latest()
        how = "unfinished"
        if latest.get("kind") == "end":
            how = f"stopped by {by}" if (by := latest.get("stopped_by")) else "finished"
        steps = f" of {self.config.training.steps:,}" if self.config else ""
        return f"{how}, step {latest.get('step', 0):,}{steps}"


def read_run(location: str) -> Run:
    """Read the run in a work directory or at its URL. Raises ``UserError`` if it is missing."""
    run = Run(location, local_workdir(location))
    if not run.workdir.is_dir():
        raise UserError(f"workdir is {location!r}; expected the work directory of a training run.")
    try:
        run.config = load_config_file(run.workdir / "config.json")
    except UserError as error:
        run.problems.append(str(error))
    lines = _read(run, "metrics.jsonl").splitlines()
    for place, entry in enumerate(map(_object, lines), 1):
        if _is_sound(entry):
            run.entries.append(entry)
        else:
            run.problems.append(f"metrics.jsonl is corrupt at line {place} of {len(lines)}.")
    if text := _read(run, "summary.json"):
        summary = _object(text)
        end = summary | {"kind": "end", "step": summary.get("steps")}
        if _is_sound(end) and end["step"] >= run.latest().get("step", 0):
            run.entries.append(end)
        else:
            run.problems.append("summary.json is ignored: it is either corrupt or out of date.")
    return run


def _read(run: Run, name: str) -> str:
    try:
        return (run.workdir / name).read_text("utf-8", "replace")
    except OSError as error:
        run.problems.append(f"{name} cannot be read: {error.strerror}.")
        return ""


def _is_sound(entry: dict[str, Any]) -> bool:
    """Check that required fields exist and have the right types."""
    types = {"kind": str, "step": int, "time": int | float | None, "environment": dict | None}
    return all(isinstance(entry.get(name), kind) for name, kind in types.items())


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Returns an empty dict if the text is corrupt."""
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
