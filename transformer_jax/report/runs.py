"""Files of a run, as far as they can be read. Missing and corrupt ones are listed on the page."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_jax import Config, SentenceAttention, UserError, load_config_file, local_workdir


@dataclass
class Run:
    """What the page shows of a run.

    Attributes:
      entries: the lines of metrics.jsonl, and summary.json as an entry of kind "end".
      problems: missing and corrupt files.
      translations: by (source, reference).
      attention: by sentence.
    """

    name: str
    workdir: Path
    config: Config | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    translations: dict[tuple[str, str], str] = field(default_factory=dict)
    attention: dict[str, SentenceAttention] = field(default_factory=dict)

    def curve(self, kind: str, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of a field in the entries of a kind, where it is a number."""
        known = [e for e in self.entries if e["kind"] == kind and is_number(e.get(name))]
        return [entry["step"] for entry in known], [entry[name] for entry in known]

    @property
    def status(self) -> str:
        """For example "finished, step 4 of 4"."""
        how = "unfinished"
        if self.entries and (end := self.entries[-1])["kind"] == "end":
            how = f"stopped by {end['stopped_by']}" if end.get("stopped_by") else "finished"
        step = max((entry["step"] for entry in self.entries), default=0)
        return f"{how}, step {step:,.0f}" + (
            f" of {self.config.training.steps:,}" if self.config else ""
        )


def read_run(location: str) -> Run:
    """The run in a work directory, a folder or a URL; ``UserError`` without one."""
    run = Run(location, local_workdir(location))
    if not run.workdir.is_dir():
        raise UserError(f"workdir is {location!r}; expected the folder of a training run.")
    try:
        run.config = load_config_file(run.workdir / "config.json")
    except UserError as error:
        run.problems.append(str(error))
    lines = _read(run, "metrics.jsonl").splitlines()
    for place, entry in enumerate(map(_object, lines), 1):
        if isinstance(entry.get("kind"), str) and is_number(entry.get("step")):
            run.entries.append(entry)
        else:
            run.problems.append(f"metrics.jsonl, line {place} of {len(lines)}, is corrupt.")
    if text := _read(run, "summary.json"):
        summary = _object(text)
        step = summary.get("steps")
        if is_number(step) and all(step >= entry["step"] for entry in run.entries):
            run.entries.append(summary | {"kind": "end", "step": step})
        else:
            run.problems.append("summary.json is left out: it is corrupt, or training went on.")
    return run


def is_number(value: Any) -> bool:
    """Whether a value of an entry is a finite number, and not so large that it must be corrupt."""
    return isinstance(value, int | float) and abs(value) < 1e24


def _read(run: Run, name: str) -> str:
    try:
        return (run.workdir / name).read_bytes().decode(errors="replace")
    except OSError as error:
        run.problems.append(f"{name} cannot be read: {error.strerror}.")
        return ""


def _object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
