"""What a run left in its work directory, as far as it can be read.

Damage raises nothing; it is noted for the reader of the page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_jax.config import Config
from transformer_jax.config_io import from_json
from transformer_jax.errors import UserError
from transformer_jax.storage import is_url, local_path, locked, object_or_empty

_LARGEST = 1e24  # a figure above that is damage


@dataclass
class Run:
    """A run, under the name that the page gives it."""

    name: str
    location: str  # what --workdir named
    workdir: Path  # the same, or the copy of a URL
    running: bool
    config: Config | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)
    """Those of metrics.jsonl; of an ended run also summary.json, as an entry of kind "end"."""
    checkpoints: list[int] = field(default_factory=list)  # their steps
    problems: list[str] = field(default_factory=list)  # what is missing or damaged

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """The entries of these kinds."""
        return [entry for entry in self.entries if entry["kind"] in kinds]

    def curve(self, kinds: str, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of a figure in entries of one kind or several, where it is a number."""
        values = [(entry["step"], number(entry, name)) for entry in self.of(*kinds.split())]
        known = [(step, value) for step, value in values if value is not None]
        return [step for step, _ in known], [value for _, value in known]

    @property
    def environment(self) -> dict[str, Any]:
        """Hardware and versions, as the run wrote them at its last start or at its end."""
        found: dict[str, Any] = {}
        for entry in self.of("start", "end"):
            given = entry.get("environment", entry)
            found |= given if isinstance(given, dict) else {}
        return found

    @property
    def step(self) -> int:
        """The last step of which anything is known."""
        return int(max((entry["step"] for entry in self.entries), default=0))

    @property
    def status(self) -> str:
        """Where the run stands."""
        how = "interrupted" if self.entries else "nothing trained"
        for end in self.of("end"):
            how = f"stopped by {end['stopped_by']}" if end.get("stopped_by") else "finished"
        goal = f" of {self.config.training.steps:,}" if self.config else ""
        return f"{'running' if self.running else how}, step {self.step:,}{goal}"


def read_run(name: str, location: str) -> Run:
    """What the work directory holds, a folder or a URL; ``UserError`` if there is none."""
    workdir = local_path(location)
    if is_url(location):
        from transformer_jax.remote_workdir import local_workdir  # not at the top: brings JAX

        workdir = local_workdir(location)
    if not workdir.is_dir():
        raise UserError(f"workdir is {location!r}; expected the folder of a training run.")
    run = Run(name, location, workdir, running=_is_locked(workdir / ".lock"))
    if text := _read(run, "config.json", "settings"):
        try:
            run.config = from_json(text)
        except UserError as error:
            run.problems.append(f"config.json: {error}")
    _read_entries(run)
    if not run.running:  # else it is of an earlier end
        _read_summary(run)
    manifests = workdir.glob("checkpoints/*/manifest.json")
    run.checkpoints = sorted(int(p.parent.name) for p in manifests if p.parent.name.isdigit())
    if not run.checkpoints:
        run.problems.append("There is no complete checkpoint: nothing can be translated.")
    return run


def number(values: dict[str, Any], name: str) -> float | None:
    """A figure, ``test.bleu`` that of an inner object; None if it is no finite number."""
    found: Any = values
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return found if is_number and abs(found) < _LARGEST else None


def _read(run: Run, name: str, what: str) -> str:
    try:
        return (run.workdir / name).read_bytes().decode(errors="replace")
    except FileNotFoundError:
        run.problems.append(f"{name} is missing: no {what}.")
    except OSError as error:
        run.problems.append(f"{name} cannot be read ({error.strerror}): no {what}.")
    return ""


def _read_entries(run: Run) -> None:
    lines = _read(run, "metrics.jsonl", "curves, throughput and compile times").split("\n")
    wrong = []
    for place, line in enumerate(lines, 1):
        entry = object_or_empty(line)
        if number(entry, "step") is not None and isinstance(entry.get("kind"), str):
            run.entries.append(entry)
        elif line and not (run.running and place == len(lines)):  # not one being written
            wrong.append(place)
    if wrong:
        run.problems.append(
            f"metrics.jsonl is damaged: {len(wrong)} of {len(lines)} lines are left out, the first "
            f"is line {wrong[0]}."
        )


def _read_summary(run: Run) -> None:
    if text := _read(run, "summary.json", "figures on the test set, no totals"):
        summary = object_or_empty(text)
        step = number(summary, "steps")
        if step is not None and step >= run.step:
            run.entries.append(summary | {"kind": "end", "step": step})
        else:
            wrong = "damaged: it has no steps" if step is None else "of before the run was resumed"
            run.problems.append(f"summary.json is left out: it is {wrong}.")


def _is_locked(path: Path) -> bool:
    """Whether a run is at work; ``training/workdir.py`` locks its folder."""
    try:
        if path.exists():
            with locked(path):
                pass
    except BlockingIOError:
        return True
    except OSError:  # a folder that can only be read
        pass
    return False
