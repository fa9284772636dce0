"""What a run tells: metrics.jsonl, TensorBoard curves, and the terminal."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from transformer_jax.data.batching import BatchPlan
from transformer_jax.distributed import is_first
from transformer_jax.machine import num_cores
from transformer_jax.training.loss import LossSums
from transformer_jax.training.step import StepMetrics


def means(sums: LossSums, prefix: str = "") -> dict[str, float]:
    """Per-token figures of summed losses: loss (smoothed), nll, perplexity, accuracy."""
    count = max(float(sums.tokens), 1.0)
    nll = float(sums.nll) / count
    return {
        f"{prefix}loss": float(sums.loss) / count,
        f"{prefix}nll": nll,
        f"{prefix}perplexity": math.exp(min(nll, 700.0)),
        f"{prefix}accuracy": float(sums.correct) / count,
    }


class Meter:
    """Figures between two log entries, and totals for the summary."""

    def __init__(self, progress: dict[str, Any], plan: BatchPlan, start: int):
        self._progress = progress
        self._plan = plan
        self._step = start
        self._sums: list[LossSums] = []  # of steps that were not skipped
        self._source_tokens = self._target_tokens = 0.0
        self._positions = np.zeros(2)  # source, target; padding included
        self._waited = 0.0
        self._since = self._since_booked = time.perf_counter()

    def add(self, metrics: StepMetrics) -> None:
        if not metrics.bad_in_a_row:
            self._sums.append(metrics.sums)
        self._source_tokens += float(metrics.source_tokens)
        self._target_tokens += float(metrics.sums.tokens)
        rows, source_length, target_length = self._plan.shape(self._step)
        self._positions += rows * source_length, rows * target_length
        self._step += 1
        self._progress["source_tokens"] += int(metrics.source_tokens)
        self._progress["target_tokens"] += int(metrics.sums.tokens)

    def entry(self, waited: float) -> dict[str, Any]:
        """Means since the last entry (NaN: of no step); ``waited``: seconds the loop has waited for
        data so far.
        """
        nothing = np.full((1, len(LossSums._fields)), np.nan)
        sums = LossSums(*np.sum(np.asarray(self._sums) if self._sums else nothing, axis=0))
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        values: dict[str, Any] = means(sums) | {
            "tokens_per_second": (self._source_tokens + self._target_tokens) / seconds,
            "target_tokens_per_second": self._target_tokens / seconds,
            "source_fill": self._source_tokens / self._positions[0],
            "target_fill": self._target_tokens / self._positions[1],
            "data_wait_share": (waited - self._waited) / seconds,
        }
        self._sums, self._source_tokens, self._target_tokens, self._waited, self._since = (
            [],
            0.0,
            0.0,
            waited,
            now,
        )
        self._positions[:] = 0
        return values

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside counts as no training time."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            length = time.perf_counter() - begin
            self._since += length
            self._since_booked += length

    def book(self) -> None:
        """Add the training seconds so far to the progress that goes into the checkpoint."""
        now = time.perf_counter()
        self._progress["train_seconds"] += now - self._since_booked
        self._since_booked = now


class _Board:
    """TensorBoard's file. Of tensorboardX it takes what writes at once: the thread of its
    ``SummaryWriter`` ends with the first error of the disk, and who writes to it waits for ever
    from then on.
    """

    def __init__(self, folder: Path, purge_step: int):
        """What was written from ``purge_step`` on shall not be shown any more."""
        # Where PyTorch is installed tensorboardX would load that too: two seconds and much memory,
        # for nothing here.
        hidden = sys.modules.setdefault("torch", None) is None  # type: ignore[arg-type]
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
        finally:
            if hidden:
                del sys.modules["torch"]
        folder.mkdir(parents=True, exist_ok=True)
        self._new_event, self._writer = Event, EventsWriter(str(folder / "events"))
        log = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=purge_step, session_log=log))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        event = self._new_event(wall_time=time.time(), step=step)
        for tag, value in scalars.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Reporter:
    """Writes entries of one run to metrics.jsonl and TensorBoard and shows its progress on
    stderr.
    """

    def __init__(self, workdir: Path, *, steps: int, start_step: int, evaluation_due: bool = False):
        """Entries after ``start_step`` come from a run that went on unsaved; they are dropped, the
        run writes them again.

        So is a dev entry of that step, if its evaluation is due once more.
        """
        first = is_first()  # of several processes the others tell nothing
        path = workdir / "metrics.jsonl" if first else Path(os.devnull)
        if first:
            _truncate(path, start_step, evaluation_due)
        self._file = path.open("a", encoding="utf-8")
        self._failed = False
        self._board = _Board(workdir / "tensorboard", purge_step=start_step + 1) if first else None
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not first)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (first and self.console.is_terminal),
        )
        # Log lines go above the bar as well, not through it.
        self._logger = logging.getLogger("transformer_jax")
        self._handler = _Lines(self)
        if first:
            self._logger.addHandler(self._handler)
            self._logger.propagate = False
        self._task = self._progress.add_task("train", total=steps, completed=start_step, status="")
        self._progress.start()

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One line in metrics.jsonl, with null for what is not finite, and one point a number in
        TensorBoard.
        """
        told = {
            name: None if isinstance(x, float) and not math.isfinite(x) else x
            for name, x in values.items()
        }
        entry = {"kind": kind, "step": step, "time": round(time.time(), 3), **told}
        with self._reporting_errors():
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        if self._board is not None:
            numbers = {
                f"{kind}/{name}": value
                for name, value in told.items()
                if isinstance(value, int | float)
            }
            with self._reporting_errors():
                self._board.write(step, numbers)

    def training(self, step: int, values: dict[str, Any]) -> None:
        """A log entry of the training loop."""
        self.write("train", step, values)
        status = (
            f"loss {values['loss']:.3f}  lr {values['learning_rate']:.2e}  {values['tokens_per_second']:,.0f} tokens/s"
            f"  epoch {values['epoch']:.2f}"
        )
        self._progress.update(self._task, completed=step, status=status)
        if not self.console.is_terminal:
            self.say(f"step {step}  {status}")

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        self.console.print(text, markup=False)

    def close(self) -> None:
        """Flush everything."""
        self._progress.stop()
        self._logger.removeHandler(self._handler)
        self._logger.propagate = True
        if self._board is not None:
            with self._reporting_errors():
                self._board.close()
        with self._reporting_errors():
            self._file.close()

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """A full disk costs entries, not the run."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self.say(f"metrics cannot be written: {error}")
            self._failed = True


class _Lines(logging.Handler):
    def __init__(self, reporter: Reporter):
        super().__init__()
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        self._reporter.say(self.format(record))


def peak_memory_bytes() -> dict[str, int]:
    """Peak resident memory of this process, and of the first device where the backend tells."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        peaks["device"] = statistics["peak_bytes_in_use"]
    return peaks


def environment() -> dict[str, Any]:
    """Versions and hardware, for summary.json."""
    packages = (
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "grain",
        "sentencepiece",
        "sacrebleu",
        "numpy",
    )
    return {
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "cpu": _processor(),
        "cpu_cores": num_cores(),
        "devices": [str(device.device_kind) for device in jax.devices()],
        "processes": jax.process_count(),
    }


def _processor() -> str:
    """Name, family and widest vectors of the CPU; virtual machines hide the exact name, and the
    speed hangs on the vectors.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].split("\n")
    except OSError:
        return platform.machine()
    known = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    name = known.get("model name", platform.machine())
    family = f", family {known['cpu family']}" if "cpu family" in known else ""
    features = known.get("flags", known.get("Features", "")).split()
    widest = next(
        (f", {each}" for each in ("avx512f", "avx2", "avx", "sve", "asimd") if each in features), ""
    )
    return name + family + widest


def _truncate(path: Path, last_step: int, evaluation_due: bool) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            entry = json.loads(line)
            again = evaluation_due and (entry["kind"], entry["step"]) == ("dev", last_step)
            if entry["step"] <= last_step and not again:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line that a kill cut short
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.rename(path)
