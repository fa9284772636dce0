"""Progress reporting: metrics.jsonl, TensorBoard, and the terminal."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from transformer_jax.devices.distributed import is_first
from transformer_jax.errors import LossyStream, UserError, one_line
from transformer_jax.evaluation import METRICS
from transformer_jax.settings.config import Config
from transformer_jax.storage.files import parse_object, write_atomically

logger = logging.getLogger(__name__)


class MetricsLog(ABC):
    """A place to which metrics are written. ``Reporter`` writes to each class in ``_LOGS``."""

    @abstractmethod
    def __init__(self, folder: Path, config: Config, start_step: int):
        """Open the log of a run that continues from ``start_step``. ``folder`` is for files.

        Drops the entries that an interrupted run wrote after that step: this run will write them
        again.
        """

    @abstractmethod
    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Write an entry. NaN and infinity are None in ``values``. Raises ``OSError``."""

    @abstractmethod
    def close(self) -> None:
        """Close the log."""


class Reporter:
    """Writer of metrics and terminal output, in the first process only."""

    def __init__(self, folder: Path, config: Config, *, start_step: int):
        """Open the logs, with files in ``folder``, of a run that continues from ``start_step``."""
        self._logs: list[MetricsLog] = []
        if is_first():
            self._logs = [log(folder, config, start_step) for log in _LOGS]
        self._failed = False
        file: Any = sys.stderr and LossyStream(sys.stderr)
        self._console = Console(file=file, highlight=False, soft_wrap=True, quiet=not is_first())
        self._bar = ProgressBar(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(16),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),  # truncated in narrow terminals
            console=self._console,
            disable=not (is_first() and self._console.is_terminal),
        )
        self._task = self._bar.add_task(
            "", total=config.training.steps, completed=start_step, status=""
        )
        self._bar.start()
        self._console.show_cursor()  # a second Ctrl-C would leave it hidden

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write an entry to each log.

        NaN and infinity become null. If the disk is full, entries are lost but the run continues.
        """
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        try:
            for log in self._logs:
                log.write(step, kind, finite)
        except OSError as error:
            if not self._failed:
                self.say(f"Metrics cannot be written: {one_line(error)}")
            self._failed = True

    def training(self, step: int, values: dict[str, Any]) -> None:
        """Log training metrics."""
        self.write("train", step, values)
        mfu = f" (MFU {values['mfu']:.1%})" if "mfu" in values else ""
        status = (
            f"loss {values['loss']:.3f}  {values['tokens_per_second']:,.0f} tokens/s  "
            f"{values['tflops_per_device']:.3g} TFLOP/s{mfu}  "
            f"epoch {values['epoch']:.2f}  lr {values['learning_rate']:.2e}"
        )
        self.show(status=status)
        if not self._console.is_terminal:
            self.say(f"step {step}  {status}")

    def dev(self, step: int, metrics: dict[str, Any], example: str) -> None:
        """Log an evaluation on the dev set. ``example`` is a sample translation."""
        self.write("dev", step, metrics)
        text = (
            f"step {step}: dev loss {metrics['dev_loss']:.4f}, "
            f"perplexity {metrics['dev_perplexity']:.3f}, accuracy {metrics['dev_accuracy']:.2%}"
        )
        if example:
            for name, metric in METRICS.items():
                text += f", {metric.label} {metrics[f'dev_{name}']:.2f}"
                languages = [
                    f"{key.removeprefix(f'dev_{name}_')} {value:.2f}"
                    for key, value in metrics.items()
                    if key.startswith(f"dev_{name}_")
                ]
                if languages:
                    text += f" ({', '.join(languages)})"
            text += f"\n{example}"
        self.say(text)

    def show(self, **fields: Any) -> None:
        """Update the progress bar's ``status`` text or number of ``completed`` steps."""
        self._bar.update(self._task, **fields)

    def say(self, text: str) -> None:
        """Print text above the progress bar."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Close the logs and release the terminal."""
        self._bar.stop()
        for log in self._logs:
            with suppress(OSError):
                log.close()


class _MetricsFile(MetricsLog):
    """metrics.jsonl."""

    def __init__(self, folder: Path, config: Config, start_step: int):
        path = folder / "metrics.jsonl"
        _truncate(path, start_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        entry = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _TensorBoard(MetricsLog):
    """TensorBoard event file, which has the numbers only. TensorBoard hides events of the earlier
    run after ``start_step``.

    tensorboardX's ``SummaryWriter`` is not used, because its thread dies on the first disk error
    and later writes block forever.
    """

    def __init__(self, folder: Path, config: Config, start_step: int):
        from tensorboardX.event_file_writer import EventsWriter  # imports PyTorch if installed
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder = folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._new_event = Event
        self._writer = EventsWriter(str(folder / "events"))
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(
            Event(wall_time=time.time(), step=start_step + 1, session_log=start)
        )

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        event = self._new_event(wall_time=time.time(), step=step)
        for name, value in values.items():
            if isinstance(value, int | float):
                event.summary.value.add(tag=f"{kind}/{name}", simple_value=value)
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


_LOGS: tuple[type[MetricsLog], ...] = (_MetricsFile, _TensorBoard)


def _truncate(path: Path, last_step: int) -> None:
    """Drop entries written after a step was saved, including the evaluation of that step."""
    if not path.exists():
        return
    entries = []
    unreadable = 0
    # The last line is empty, or was cut when the process was killed.
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in lines:
        try:
            entry = parse_object(line, str(path), step=int, kind=str)
        except UserError:
            unreadable += 1
            continue
        step = entry["step"]
        if step < last_step or (step == last_step and entry["kind"] != "dev"):
            entries.append(line + "\n")
    if unreadable:
        logger.warning("Dropped %d unreadable lines of %s.", unreadable, path)
    write_atomically(path, "".join(entries))
