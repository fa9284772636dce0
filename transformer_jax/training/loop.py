"""Training loop: step, read the previous step's metrics, save, evaluate, stop, summarize."""

from __future__ import annotations

import faulthandler
import json
import logging
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax

from transformer_jax.data.loader import load_batches
from transformer_jax.devices.distributed import is_first, lost_contact
from transformer_jax.devices.sharding import batch_sharding
from transformer_jax.errors import UserError, one_line
from transformer_jax.runs.averaging import described
from transformer_jax.settings.config import Config
from transformer_jax.storage.files import write_atomically
from transformer_jax.training.compiling import LESS_MEMORY, CompileAhead
from transformer_jax.training.evaluator import Evaluator
from transformer_jax.training.flops import training_flops
from transformer_jax.training.prepare import Prepared, prepare
from transformer_jax.training.profiler import Profiler
from transformer_jax.training.reporting import Meter, Reporter
from transformer_jax.training.signals import Signals
from transformer_jax.training.step import StepMetrics
from transformer_jax.training.summary import environment, peak_memory_bytes

log = logging.getLogger(__name__)

_STUCK_SECONDS = 1800.0  # evaluations can take minutes


class TrainingError(RuntimeError):
    """Error that ends training. The run can resume from its last checkpoint.

    Causes: a loss that stays non-finite, running out of memory, or losing contact with the other
    processes.
    """


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
      allow_changes: resume even if ``Changeable`` settings differ; by default, a
        run must keep its config.

    Raises:
      UserError: settings or input are invalid, or there is not enough disk space for the first or
        last checkpoint.
      TrainingError: the loss stays non-finite, memory runs out, or contact with other processes is
        lost.
    """
    with (
        _Watch() as watch,
        prepare(config, workdir, devices=devices, allow_changes=allow_changes) as run,
        closing(
            Reporter(
                run.workdir.folder,
                steps=run.config.training.steps,
                start_step=int(run.state.step),
            )
        ) as reporter,
    ):
        loop = _Loop(run, reporter, watch)
        with closing(CompileAhead(run)) as compiled:
            loop.train(compiled)
            return loop.write_summary()


class _Watch:
    """Watchdog for a run.

    Adds the current activity to errors from JAX's runtime. If ``poll`` is not called for half an
    hour, writes the tracebacks of all threads to stderr.
    """

    doing = "before the first step"

    def __enter__(self) -> _Watch:
        self.poll()
        return self

    def poll(self, doing: str = "") -> None:
        """Reset the watchdog's timer."""
        self.doing = doing or self.doing
        faulthandler.dump_traceback_later(_STUCK_SECONDS, repeat=True, file=2)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        if not isinstance(error, jax.errors.JaxRuntimeError):
            return
        if "RESOURCE_EXHAUSTED" in str(error):
            raise TrainingError(
                f"Out of memory: {self.doing}. {LESS_MEMORY} ({one_line(error)})"
            ) from error
        if lost_contact(error):
            raise TrainingError(
                f"Process {jax.process_index()} of {jax.process_count()} lost contact with the "
                "other processes, perhaps because one of them exited. Restart all processes "
                "with the same command: they resume from the last checkpoint. "
                f"({one_line(error)})"
            ) from error


class _Loop:
    def __init__(self, run: Prepared, reporter: Reporter, watch: _Watch):
        self._run, self._training, self._progress = run, run.config.training, run.progress
        self._reporter, self._signals, self._watch = reporter, Signals(), watch
        self._state, self._step = run.state, int(run.state.step)  # number of completed steps
        self._evaluator = Evaluator(run)
        self._meter = Meter(run.progress, list(run.mesh.devices.flat))
        # metrics and model FLOPs of the last step
        self._unread: tuple[StepMetrics, float] | None = None

    def train(self, compiled: CompileAhead) -> None:
        """Train until the last step, early stopping or a signal, and save the final state."""
        self._announce()
        run, stop_at = self._run, self._training.steps
        rows = batch_sharding(run.mesh)
        loader = load_batches(run.plan, sharding=rows, start=self._step, stop=stop_at)
        # Evaluate the last saved step, even if the previous run evaluated it.
        compiled.before_collectives(self._now)
        stop = self._progress.early_stopping_triggered(self._training.patience)
        stop = stop or (self._evaluation_due() and self._evaluate()) or self._step >= stop_at
        if not stop:
            compiled.wait(run.plan.shape(self._step), self._now)
        # Until now, there was nothing to save, so signals ended the program.
        profiler = Profiler(run)
        with closing(loader) as batches, closing(profiler), self._signals:
            for batch in [] if stop else batches:
                shape = (*batch.source_BS.shape, batch.target_BT.shape[1])
                train_step = compiled.wait(shape, self._now)
                self._watch.poll("step {}, {} rows of {} + {} tokens".format(self._step, *shape))
                self._state, metrics = profiler.run(train_step, self._step, self._state, batch)
                self._read_figures()  # of the previous step, while this one runs
                self._step += 1
                self._unread = metrics, training_flops(run.config, *shape)
                stop, evaluate = self._signals.stop_after(self._step), self._evaluation_due()
                if stop or evaluate or self._step % self._training.checkpoint_every == 0:
                    self._save()
                if evaluate and not stop:
                    stop = self._evaluate()
                if stop:
                    break
            self._ensure_saved()

    def _evaluation_due(self) -> bool:
        training, step = self._training, self._step
        due = step > 0 and (step % training.eval_every == 0 or step >= training.steps)
        return due and "dev" in self._run.corpora

    def _evaluate(self) -> bool:
        """Evaluate on the dev set. Returns True if early stopping triggers."""
        training = self._training
        self._now(f"evaluating step {self._step}")
        parameters = self._state.parameters if self._state.ema is None else self._state.ema
        figures, example = self._evaluator.dev(parameters)
        self._reporter.dev(self._step, figures, example)
        self._progress.note_evaluation(figures, training.select_by, step=self._step)
        self._meter.restart()
        return self._progress.early_stopping_triggered(training.patience)

    def _save(self) -> None:
        self._read_figures()  # the checkpoint contains the totals of all steps so far
        self._watch.poll(f"saving step {self._step}")
        self._run.checkpoints.save(self._state, self._progress)

    def _ensure_saved(self) -> None:
        """Wait for the last checkpoint. If saving failed, retry once."""
        self._watch.poll(f"saving step {self._step}")
        checkpoints = self._run.checkpoints
        if not checkpoints.holds(self._step):
            self._save()
        if not checkpoints.holds(self._step):
            raise UserError(
                f"The last checkpoint (step {self._step}) could not be saved in "
                f"{checkpoints.folder}: {checkpoints.failure}. Free disk space and run the same "
                "command again to resume from the previous checkpoint."
            )

    def write_summary(self) -> dict[str, Any]:
        """Evaluate on the test set if training is finished, and write summary.json."""
        run, progress, stopped_by = self._run, self._progress, self._signals.received
        summary: dict[str, Any] = {
            "stopped_by": stopped_by,
            "stopped_early": self._step < self._training.steps and not stopped_by,
            "steps": self._step,
            "epochs": self._step / run.plan.steps_per_epoch,
            "bad_steps": int(self._state.bad_steps),
            **({"best_step": progress.best_step} if progress.best else {}),
            **{f"best_{name}": value for name, value in progress.best.items()},
            "train_seconds": progress.train_seconds,
            "tokens_per_second": progress.tokens / (progress.train_seconds or math.inf),
            "peak_memory_bytes": peak_memory_bytes(),
            "dtype": run.config.model.dtype,
            **environment(),
        }
        if stopped_by:
            end = f"{stopped_by}: saved at step {self._step}. Run the same command again to resume."
        else:
            self._now("choosing the checkpoints to average")
            steps, parameters = self._evaluator.choose()
            summary["averaged_steps"], model = steps, described(steps)
            self._now("writing the model")
            run.checkpoints.write_model(parameters, steps)
            if "test" in run.pairs:
                self._now("evaluating on the test set")
                summary["test"], scores = self._evaluator.test(parameters)
                self._reporter.say(f"test, {model}: {scores}")
            end = f"done at step {self._step}"
            if summary["stopped_early"]:
                end = (
                    f"stopped early at step {self._step} of {self._training.steps}, after "
                    f"{progress.since_best} evaluations without improvement"
                )
            end = f"{end}: {model}; metrics in {run.workdir.store}/summary.json"
        if is_first():
            text = json.dumps(summary, indent=2) + "\n"
            write_atomically(run.workdir.folder / "summary.json", text)
        self._reporter.say(end)
        return summary

    def _now(self, doing: str) -> None:
        """Reset the watchdog and show the current activity."""
        self._watch.poll(doing)
        self._reporter.show(status=doing)

    def _read_figures(self) -> None:
        """Read the last step's metrics, unless already read, and log them if due."""
        if self._unread is None:
            return
        step, (metrics, flops), self._unread = self._step, jax.device_get(self._unread), None
        self._meter.add(metrics, flops)
        self._reporter.show(completed=step)
        if metrics.bad_in_a_row:
            log.warning("Step %d had a non-finite loss or gradient; its update was skipped.", step)
        if metrics.bad_in_a_row >= self._training.max_bad_steps:
            raise TrainingError(
                f"The loss or gradient was not finite for {int(metrics.bad_in_a_row)} steps in a "
                f"row, up to step {step}. Lower optimizer.peak_learning_rate, raise "
                "optimizer.warmup_steps, or set optimizer.clip_norm, and run the command again "
                "with --allow-changes to resume from the last checkpoint."
            )
        if step % self._training.log_every == 0:
            values = {
                "learning_rate": float(metrics.learning_rate),
                "gradient_norm": float(metrics.gradient_norm),
                "bad_steps": int(metrics.bad_steps),
                "epoch": step / self._run.plan.steps_per_epoch,
                "peak_memory_bytes": peak_memory_bytes(),
            }
            self._reporter.training(step, self._meter.entry() | values)

    def _announce(self) -> None:
        run, say = self._run, self._reporter.say
        count = sum(leaf.size for leaf in jax.tree.leaves(self._state.parameters))
        source_fill, target_fill = run.plan.fill
        axes = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
        say(
            f"{run.corpora['train'].num_pairs:,} training pairs; vocabulary "
            f"{run.config.model.vocab_size:,}; {count:,} parameters\n"
            f"devices: {axes}; {run.plan.steps_per_epoch:,} steps per epoch\n"
            f"batches of {run.config.batch.tokens:,} tokens per side; "
            f"real tokens: {source_fill:.1%} source, {target_fill:.1%} target; "
            f"shapes to compile: {len(run.plan.shapes)}"
        )
        if self._step:
            say(f"resuming at step {self._step} of {self._training.steps}")
        figures = {"source_fill": source_fill, "target_fill": target_fill, "parameters": count}
        self._reporter.write("start", self._step, figures | {"environment": environment()})
