"""Training loop: step, read the previous step's metrics, save, evaluate, stop, summarize."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax

from transformer_jax.data.batching import Batch
from transformer_jax.data.loader import load_batches
from transformer_jax.devices.sharding import batch_sharding
from transformer_jax.errors import UserError
from transformer_jax.evaluation import selection_score
from transformer_jax.settings.config import Config
from transformer_jax.training.compiling import CompileAhead
from transformer_jax.training.evaluator import Evaluator
from transformer_jax.training.metrics import Meter, training_flops
from transformer_jax.training.prepare import PreparedRun, prepare
from transformer_jax.training.profiler import Profiler
from transformer_jax.training.reporting import Reporter
from transformer_jax.training.signals import Signals
from transformer_jax.training.step import StepMetrics
from transformer_jax.training.summary import report_start, write_summary
from transformer_jax.training.watchdog import TrainingError, Watchdog

__all__ = ["TrainingError", "train"]

logger = logging.getLogger(__name__)


def train(
    config: Config,
    workdir: str | Path,
    *,
    devices: Sequence[jax.Device] | None = None,
    allow_changes: bool = False,
) -> dict[str, Any]:
    """Train in ``workdir``, resuming from its newest checkpoint, and return a summary.

    The summary is also written to summary.json. Its ``stopped_by`` is the name of the signal if
    SIGTERM or Ctrl-C ended the run early.

    Args:
      workdir: a folder or a URL. Several processes need a shared folder or a gs:// URL.
      devices: devices to train on; default: all.
      allow_changes: resume even if ``Changeable`` settings differ; by default, a run must keep its
        config.

    Raises:
      UserError: settings or input are invalid, or there is not enough disk space for the first or
        last checkpoint.
      TrainingError: the loss stays non-finite, memory runs out, or contact with other processes is
        lost.
    """
    with (
        Watchdog() as watchdog,
        prepare(config, workdir, devices=devices, allow_changes=allow_changes) as run,
        closing(
            Reporter(run.workdir.folder, run.config, start_step=int(run.state.step))
        ) as reporter,
    ):
        loop = _Loop(run, reporter, watchdog)
        with closing(CompileAhead(run)) as compiled:
            report_start(run, reporter)
            stopped_by = loop.train(compiled)
            return write_summary(
                run, loop.evaluator, reporter, loop.show, step=loop.step, stopped_by=stopped_by
            )


class _Loop:
    """Takes the steps of a run. ``run.state`` is always the newest state."""

    def __init__(self, run: PreparedRun, reporter: Reporter, watchdog: Watchdog):
        self.step = int(run.state.step)  # number of completed steps
        self.evaluator = Evaluator(run)
        self._run = run
        self._training = run.config.training
        self._reporter = reporter
        self._watchdog = watchdog
        self._meter = Meter(run.progress, list(run.mesh.devices.flat))
        # Metrics and model FLOPs of the last step, while they are on the device.
        self._unread: tuple[StepMetrics, float] | None = None

    def train(self, compiled: CompileAhead) -> str | None:
        """Train until the last step, early stopping or a signal, and save the final state.

        Returns the name of the signal, if any.
        """
        run = self._run
        compiled.before_collectives(self.show)
        # A checkpoint is saved before its evaluation, so a resumed run repeats that evaluation.
        stop = self._stops_early() or (self._evaluation_due() and self._evaluate())
        last_step = self.step if stop else self._training.steps
        batches = load_batches(
            run.plan, sharding=batch_sharding(run.mesh), start=self.step, stop=last_step
        )
        if self.step < last_step:
            compiled.wait(run.plan.shape(self.step), self.show)
        # Before the first step there is nothing to save, so signals simply end the program.
        with closing(batches), closing(Profiler(run)) as profiler, Signals() as signals:
            for batch in batches:
                self._take_step(batch, compiled, profiler)
                stop = signals.stop_after(self.step)
                evaluate = self._evaluation_due()
                if stop or evaluate or self.step % self._training.checkpoint_every == 0:
                    self._save()
                if evaluate and not stop:
                    stop = self._evaluate()
                if stop:
                    break
            self._ensure_saved()
        return signals.received

    def show(self, activity: str) -> None:
        """Show the current activity, and reset the watchdog."""
        self._watchdog.poll(activity)
        self._reporter.show(status=activity)

    def _take_step(self, batch: Batch, compiled: CompileAhead, profiler: Profiler) -> None:
        run = self._run
        shape = (*batch.source_BS.shape, batch.target_BT.shape[1])
        train_step = compiled.wait(shape, self.show)
        self._watchdog.poll("step {}, {} rows of {} + {} tokens".format(self.step, *shape))
        run.state, metrics = profiler.run(train_step, self.step, run.state, batch)
        self._read_metrics()  # of step ``self.step``, while the next one runs
        self.step += 1
        self._unread = (metrics, training_flops(run.config, *shape))

    def _read_metrics(self) -> None:
        """Read the last step's metrics, unless already read, and log them if due."""
        if self._unread is None:
            return
        metrics, flops = jax.device_get(self._unread)
        self._unread = None
        self._meter.add(metrics, flops)
        self._reporter.show(completed=self.step)
        if metrics.bad_in_a_row:
            logger.warning(
                "Step %d had a non-finite loss or gradient; its update was skipped.", self.step
            )
        if metrics.bad_in_a_row >= self._training.max_bad_steps:
            raise TrainingError(
                f"The loss or gradient was not finite for {int(metrics.bad_in_a_row)} steps in a "
                f"row, up to step {self.step}. Lower optimizer.peak_learning_rate, raise "
                "optimizer.warmup_steps, or set optimizer.clip_norm, and run the command again "
                "with --allow-changes to resume from the last checkpoint."
            )
        if self.step % self._training.log_every == 0:
            epoch = self.step / self._run.plan.steps_per_epoch
            self._reporter.training(self.step, self._meter.entry(epoch=epoch))

    def _stops_early(self) -> bool:
        return self._run.progress.early_stopping_triggered(self._training.patience)

    def _evaluation_due(self) -> bool:
        if "dev" not in self._run.corpora or self.step == 0:
            return False
        return self.step % self._training.eval_every == 0 or self.step >= self._training.steps

    def _evaluate(self) -> bool:
        """Evaluate on the dev set. Returns True if early stopping triggers."""
        self.show(f"evaluating step {self.step}")
        state = self._run.state
        values, example = self.evaluator.dev(state.parameters if state.ema is None else state.ema)
        self._reporter.dev(self.step, values, example)
        score = partial(selection_score, self._training.select_by)
        self._run.progress.record_evaluation(values, score, step=self.step)
        self._meter.restart()
        return self._stops_early()

    def _save(self) -> None:
        self._read_metrics()  # the checkpoint contains the totals of all steps so far
        self._watchdog.poll(f"saving step {self.step}")
        self._run.checkpoints.save(self._run.state, self._run.progress)

    def _ensure_saved(self) -> None:
        """Wait for the last checkpoint. If saving failed, retry once."""
        self._watchdog.poll(f"saving step {self.step}")
        checkpoints = self._run.checkpoints
        if not checkpoints.has_complete(self.step):
            self._save()
        if not checkpoints.has_complete(self.step):
            raise UserError(
                f"The last checkpoint (step {self.step}) could not be saved in "
                f"{checkpoints.folder}: {checkpoints.failure}. Free disk space and run the same "
                "command again to resume from the previous checkpoint."
            )
