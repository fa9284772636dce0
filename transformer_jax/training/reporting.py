"""What a run reports while it trains: metrics.jsonl, TensorBoard curves, and the terminal."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from transformer_jax.data.batching import BatchPlan
from transformer_jax.distributed import is_first
from transformer_jax.evaluation import Evaluation
from transformer_jax.storage import write_atomically
from transformer_jax.training.loss import LossSums
from transformer_jax.training.progress import Progress
from transformer_jax.training.step import StepMetrics

_SECONDS_BETWEEN_LINES = 10  # about compiling


class Example(NamedTuple):
    """A sentence of the dev set and its translation."""

    source: str
    reference: str
    translation: str


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
    """Adds to the totals in ``progress``; gives the figures of the steps since the last entry."""

    def __init__(self, progress: Progress, plan: BatchPlan, step: int):
        self._progress, self._plan, self._step = progress, plan, step
        self._sums: list[LossSums] = []  # of good steps since the last entry
        self._last_step, self._last_waited, self._last = step, 0.0, copy(progress)
        self._since = time.perf_counter()  # seconds from here on are not in the totals yet

    def add(self, metrics: StepMetrics) -> None:
        """The next step's figures."""
        self._step += 1
        if not metrics.bad_in_a_row:
            self._sums.append(metrics.sums)
        self._progress.source_tokens += int(metrics.source_tokens)
        self._progress.target_tokens += int(metrics.sums.tokens)

    def entry(self, waited: float) -> dict[str, Any]:
        """Means since the last entry; NaN if all steps were skipped.

        ``waited``: seconds that the loop has waited for data so far.
        """
        self.book()
        now, last = self._progress, self._last
        seconds = max(now.train_seconds - last.train_seconds, 1e-9)
        source = now.source_tokens - last.source_tokens
        target = now.target_tokens - last.target_tokens
        shapes = np.array([self._plan.shape(i) for i in range(self._last_step, self._step)])
        source_positions, target_positions = shapes[:, 0] @ shapes[:, 1:]  # with padding
        nothing = np.full((1, len(LossSums._fields)), np.nan)
        sums = LossSums(*np.sum(np.asarray(self._sums or nothing), axis=0))
        values: dict[str, Any] = means(sums) | {
            "tokens_per_second": (source + target) / seconds,
            "target_tokens_per_second": target / seconds,
            "source_fill": source / source_positions,
            "target_fill": target / target_positions,
            "data_wait_share": (waited - self._last_waited) / seconds,
        }
        self._sums = []
        self._last_step, self._last_waited, self._last = self._step, waited, copy(now)
        return values

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count as training."""
        self.book()
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def book(self) -> None:
        """Add the seconds of training so far to ``progress``."""
        now = time.perf_counter()
        self._progress.train_seconds += now - self._since
        self._since = now


class Reporter:
    """Writes a run's entries to metrics.jsonl and TensorBoard and shows progress on stderr; of
    several processes only the first does.
    """

    def __init__(self, workdir: Path, *, steps: int, start_step: int, evaluation_due: bool = False):
        """Drops entries after ``start_step``, from a run whose later steps were not saved; this run
        writes them again. If that step's evaluation is due again, its dev entry is dropped as well.
        """
        first = is_first()
        path = workdir / "metrics.jsonl" if first else Path(os.devnull)
        if first:
            _truncate(path, start_step, evaluation_due)
        self._file = path.open("a", encoding="utf-8")
        self._failed = False
        self._board = _Board(workdir / "tensorboard", purge_step=start_step + 1) if first else None
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not first)
        self._bar = ProgressBar(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TextColumn("{task.fields[compiling]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (first and self.console.is_terminal),
        )
        self._task = self._bar.add_task(
            "train", total=steps, completed=start_step, status="", compiling=""
        )
        self._all_compiled, self._said = 0, 0.0  # shapes; at how many seconds of compiling
        self._bar.start()
        # On a terminal the bar has replaced sys.stderr by now, so that logs appear above it.
        self._logger, self._handler = logging.getLogger("transformer_jax"), logging.StreamHandler()
        if first:
            self._logger.addHandler(self._handler)
            self._logger.propagate = False

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """A line in metrics.jsonl, with null for NaN and infinity; its numbers go to TensorBoard,
        too.
        """
        told = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        entry = {"kind": kind, "step": step, "time": round(time.time(), 3), **told}
        numbers = {
            f"{kind}/{name}": value
            for name, value in told.items()
            if isinstance(value, int | float)
        }
        with self._reporting_errors():
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
            if self._board is not None:
                self._board.write(step, numbers)

    def training(self, step: int, values: dict[str, Any]) -> None:
        """A log entry of the training loop."""
        self.write("train", step, values)
        status = (
            f"loss {values['loss']:.3f}  lr {values['learning_rate']:.2e}  "
            f"{values['tokens_per_second']:,.0f} tokens/s  epoch {values['epoch']:.2f}"
        )
        self._bar.update(self._task, status=status)
        if not self.console.is_terminal:
            self.say(f"step {step}  {status}")

    def compiling(self, done: int, total: int, seconds: float) -> None:
        """How many shapes are compiled: in the bar, elsewhere a line every few seconds."""
        if done == self._all_compiled:
            return
        text = f"compiling {done + 1} of {total} shapes, {seconds:.0f} s"
        if done == total:
            text, self._all_compiled = "", total
            self.say(f"compiled {total} shapes in {seconds:.0f} s")
        elif not self.console.is_terminal and seconds - self._said > _SECONDS_BETWEEN_LINES:
            self._said = seconds
            self.say(text)
        self._bar.update(self._task, compiling=text)

    def dev(self, step: int, figures: dict[str, Any], example: Example | None) -> None:
        """An evaluation on the dev set."""
        self.write("dev", step, figures)
        text = (
            f"step {step}: dev loss {figures['dev_loss']:.4f}, "
            f"perplexity {figures['dev_perplexity']:.3f}, accuracy {figures['dev_accuracy']:.2%}"
        )
        if example is not None:
            text += (
                f", BLEU {figures['dev_bleu']:.2f}\n  source      {example.source}"
                f"\n  reference   {example.reference}\n  translation {example.translation}"
            )
        self.say(text)

    def test(self, figures: dict[str, Any], scores: Evaluation) -> None:
        """The evaluation on the test set."""
        count = figures["averaged_checkpoints"]
        which = f"mean of {count} checkpoints, the last" if count > 1 else "checkpoint"
        self.say(f"test, {which} of step {figures['checkpoint']}: {scores}")

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        self.console.print(text, markup=False)

    def close(self) -> None:
        """Close the files and release the terminal."""
        self._logger.removeHandler(self._handler)
        self._logger.propagate = True
        self._bar.stop()
        for file in (self._file, self._board):
            with self._reporting_errors():
                if file is not None:
                    file.close()

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """A full disk costs entries, not the run."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self.say(f"metrics cannot be written: {error}")
            self._failed = True


class _Board:
    """TensorBoard's file. tensorboardX's ``SummaryWriter`` is not used: its thread ends with the
    first error of the disk, and from then on writing blocks for ever.
    """

    def __init__(self, folder: Path, *, purge_step: int):
        """TensorBoard does not show what was written from ``purge_step`` on."""
        # If PyTorch is installed, tensorboardX would load it: two seconds and much memory.
        hidden = sys.modules.setdefault("torch", None) is None  # type: ignore[arg-type]
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
        finally:
            if hidden:
                del sys.modules["torch"]
        folder.mkdir(parents=True, exist_ok=True)
        self._new_event, self._writer = Event, EventsWriter(str(folder / "events"))
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        event = self._new_event(wall_time=time.time(), step=step)
        for tag, value in scalars.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


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
    write_atomically(path, "".join(kept))
