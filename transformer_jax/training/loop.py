"""The training loop: step, look at the figures, evaluate, save, stop, sum up."""

from __future__ import annotations

import faulthandler
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from transformer_jax.config import Config
from transformer_jax.data.loader import load_batches
from transformer_jax.distributed import from_first, is_first, wait_for_others
from transformer_jax.errors import UserError
from transformer_jax.sharding import batch_sharding
from transformer_jax.storage import write_atomically
from transformer_jax.training.compiling import LESS_MEMORY, CompileAhead, step_name, training_jobs
from transformer_jax.training.evaluator import EvaluationStopped, Evaluator
from transformer_jax.training.flops import training_flops
from transformer_jax.training.prepare import Prepared, prepare
from transformer_jax.training.reporting import Meter, Reporter
from transformer_jax.training.saver import Checkpoints
from transformer_jax.training.signals import Signals
from transformer_jax.training.step import StepMetrics
from transformer_jax.training.summary import environment, peak_memory_bytes, totals

log = logging.getLogger(__name__)

_STUCK_SECONDS = 600.0


class TrainingError(RuntimeError):
    """Training cannot continue: the loss stays non-finite, memory is exhausted, or other processes
    are gone. The last checkpoint is there to resume from.
    """


class Due(NamedTuple):
    """What there is to do after a step, before the next."""

    evaluate: bool
    save: bool
    regular: bool  # the checkpoint is on schedule: it is kept and averaged
    stop: bool


def train(
    config: Config,
    workdir: str | Path,
    *,
    devices: Sequence[jax.Device] | None = None,
    allow_changes: bool = False,
) -> dict[str, Any]:
    """Train in ``workdir``, resuming from its newest checkpoint; returns what summary.json holds.

    ``stopped_by`` in the summary names the signal if SIGTERM or Ctrl-C ended the run early.

    Args:
      workdir: a folder, or a URL, which is mirrored in a folder of this machine (single process
        only; ``remote_workdir.py``).
      devices: default: all.
      allow_changes: resume although settings differ that are ``changeable`` (``resuming.py``);
        otherwise a run keeps its config.

    Raises:
      UserError: wrong settings or input, no disk space for the first or the last checkpoint.
      TrainingError: the loss stays non-finite, memory is exhausted, other processes are gone.
    """
    with (
        closing(_Phase()) as phase,
        _runtime_errors_explained(phase),
        prepare(config, workdir, devices=devices, allow_changes=allow_changes) as run,
        closing(
            Reporter(
                run.workdir,
                steps=run.config.training.steps,
                start_step=int(run.state.step),
                evaluation_due=run.progress.evaluation_due,
            )
        ) as reporter,
        Signals() as signals,
    ):
        loop = _Loop(run, reporter, signals, phase)
        with closing(loop.compile_ahead):
            return loop.train()


class _Phase:
    """The current phase of a run. A phase that takes 10 minutes without a sign of life writes the
    tracebacks of all threads to stderr.
    """

    name = "before the first step"

    def enter(self, name: str) -> None:
        """Begin a phase, which error messages call ``name``."""
        self.name = name
        self.show_life()

    def show_life(self) -> None:
        """Put the tracebacks off."""
        faulthandler.dump_traceback_later(_STUCK_SECONDS, repeat=True, file=2)

    def close(self) -> None:
        """Write no more tracebacks."""
        faulthandler.cancel_dump_traceback_later()


class _Loop:
    def __init__(self, run: Prepared, reporter: Reporter, signals: Signals, phase: _Phase):
        self._run, self._config = run, run.config
        self._state, self._progress = run.state, run.progress
        self._reporter, self._signals, self._phase = reporter, signals, phase
        self._evaluator = Evaluator(
            run, stop=self._signal_received, ready=lambda name: self.compile_ahead.wait(name)
        )
        self._step = int(run.state.step)  # steps done
        self._last: StepMetrics | None = None  # of the last step, if not looked at yet
        self._first_step_seconds: float | None = None  # from the start of prepare() on
        jobs = [*training_jobs(run), *self._evaluator.jobs(self._step)]
        devices = list(run.mesh.devices.flat)
        self.compile_ahead = CompileAhead(jobs, devices=devices, poll=self._report_compiling)
        rows, steps = batch_sharding(run.mesh), run.config.training.steps
        self._loader = load_batches(run.plan, sharding=rows, start=self._step, stop=steps)
        self._meter = Meter(run.progress, run.plan, self._step)

    def train(self) -> dict[str, Any]:
        """Run the loop to its end, or to a signal; returns what summary.json holds."""
        self._announce()
        with self._loader as batches:
            stop = self._do(self._due_at_start())
            for batch in [] if stop else batches:
                if not self._enter_step():
                    break
                self._state, metrics = self._run.functions.train_step(self._state, batch)
                # The host looks at a step's figures only once the next step is under way.
                self._look_at_last_step()
                self._step, self._last = self._step + 1, metrics
                if self._do(self._due()):
                    break
                self._phase.enter("waiting for data")
        self._ensure_saved()
        return self._sum_up()

    def _due(self) -> Due:
        training, stop = self._config.training, self._signals.stop_after(self._step)
        evaluate = self._step % training.eval_every == 0 or self._step == training.steps
        evaluate &= self._run.dev_corpus is not None
        if evaluate and stop:  # whoever sent the signal may not wait that long
            evaluate, self._progress.evaluation_due = False, True
        regular = self._is_regular()
        return Due(evaluate, regular or stop, regular, stop)

    def _due_at_start(self) -> Due:
        """What the run before did not get to."""
        evaluate = self._progress.evaluation_due
        stop = self._progress.early_stopping_triggered(self._config)
        return Due(evaluate, evaluate, evaluate and self._is_regular(), stop)

    def _is_regular(self) -> bool:
        """Whether a checkpoint of this step is on schedule."""
        training = self._config.training
        return self._step % training.checkpoint_every == 0 or self._step == training.steps

    def _do(self, due: Due) -> bool:
        """Evaluate and save if due; returns whether to stop."""
        self._reporter.advance(self._step)
        if any(due):  # the figures of all steps so far go into the checkpoint
            self._look_at_last_step()
        if due.evaluate:
            due = self._evaluate(due)
        if due.save:
            self._phase.enter(f"saving step {self._step}")
            self._save(regular=due.regular)
        elif jax.process_count() == 1:  # several processes learn of it together, at the next save
            self._run.checkpoints.check()
        return due.stop

    def _evaluate(self, due: Due) -> Due:
        """Evaluate on dev; returns what is due after that.

        If it fails, for want of memory say, the step is saved first; resuming evaluates it.
        """
        progress, number = self._progress, self._progress.evaluations + 1
        kind = "evaluation with BLEU" if self._evaluator.translates(number) else "evaluation"
        self._phase.enter(f"{kind} after step {self._step}")
        parameters = self._state.parameters if self._state.ema is None else self._state.ema
        progress.evaluation_due = True
        try:
            with self._meter.paused():
                figures, example = self._evaluator.dev(parameters, number=number)
        except EvaluationStopped:
            return due._replace(save=True, stop=True)
        except Exception:
            if jax.process_count() == 1:  # several processes would have to save together
                self._save(regular=due.regular)
            raise
        progress.evaluation_due, progress.evaluations = False, number
        self._reporter.dev(self._step, figures, example)
        is_best = progress.note_evaluation(figures, self._config, step=self._step)
        triggered = progress.early_stopping_triggered(self._config)
        stop = due.stop or triggered or self._signals.received is not None
        return Due(True, due.save or is_best or stop, due.regular or triggered, stop)

    def _save(self, *, regular: bool) -> None:
        self._meter.book()
        begin = time.perf_counter()
        self._run.checkpoints.save(self._state, self._progress, regular=regular)
        held = {"held_seconds": time.perf_counter() - begin}
        self._reporter.write("save", self._step, held)

    def _ensure_saved(self) -> None:
        """Wait for the last checkpoint; if it could not be saved, try once more."""
        self._phase.enter(f"saving step {self._step}")
        checkpoints = self._run.checkpoints
        if self._step == 0:  # stopped before the first step: there is nothing to resume
            return
        if _saved_step(checkpoints) != self._step:
            triggered = self._progress.early_stopping_triggered(self._config)
            self._save(regular=self._is_regular() or triggered)
        if _saved_step(checkpoints) != self._step:
            steps = checkpoints.steps()
            newest = f"resumes at step {steps[-1]}" if steps else "starts at the beginning"
            raise UserError(
                f"The last checkpoint (step {self._step}) could not be saved in "
                f"{checkpoints.folder}: {checkpoints.failure}. Free some disk space and run the "
                f"same command again: it {newest}."
            )

    def _sum_up(self) -> dict[str, Any]:
        """Evaluate on the test set if training is finished; write summary.json."""
        run = self._run
        self._report_compiling()
        summary: dict[str, Any] = {
            "stopped_by": self._signals.name,
            "stopped_early": self._progress.early_stopping_triggered(run.config),
            "steps": self._step,
            "epochs": self._step / run.plan.steps_per_epoch,
            "bad_steps": int(self._state.bad_steps),
            **totals(self._progress),
            "training_flops": {
                "counted": training_flops(
                    run.config,
                    run.train_corpus,
                    tokens=self._progress.source_tokens + self._progress.target_tokens,
                )
            },
            "first_step_seconds": self._first_step_seconds,
            "compiled": {"shapes": self.compile_ahead.done, "seconds": self.compile_ahead.seconds},
            "peak_memory_bytes": peak_memory_bytes(),
            **environment(),
        }
        self._write_summary(summary)
        if summary["stopped_by"] is None and run.test_pairs:
            self._phase.enter("evaluation on the test set")
            try:
                summary["test"], scores = self._evaluator.test()
                self._reporter.test(summary["test"], scores)
            except EvaluationStopped:
                summary["stopped_by"] = self._signals.name
            self._write_summary(summary)
        if summary["stopped_by"]:
            saved = f"saved at step {self._step}" if self._step else "nothing was trained yet"
            self._reporter.say(
                f"{summary['stopped_by']}: {saved}. Run the same command again to resume."
            )
        else:
            self._reporter.say(f"done at step {self._step}; figures in {run.location}/summary.json")
        return summary

    def _write_summary(self, summary: dict[str, Any]) -> None:
        if is_first():
            text = json.dumps(summary, indent=2) + "\n"
            write_atomically(self._run.workdir / "summary.json", text)

    def _enter_step(self) -> bool:
        """Wait until the next step is compiled; False if a signal came before that."""
        name = step_name(self._run.plan.shape(self._step))
        self._phase.enter(f"compilation of the {name}")
        ready = self.compile_ahead.wait(name)
        self._phase.enter(f"{name}, number {self._step}")
        return ready

    def _report_compiling(self) -> bool:
        """Report what was compiled since the last call; returns whether a signal has come."""
        ahead = self.compile_ahead
        while ahead.finished:
            self._reporter.write("compile", self._step, ahead.finished.popleft()._asdict())
        seconds = ahead.seconds if ahead.done == ahead.total else time.monotonic() - ahead.began
        self._reporter.compiling(ahead.done, ahead.total, seconds)
        return self._signal_received()

    def _signal_received(self) -> bool:
        """Whether a signal has come; called every moment of whatever takes long."""
        self._phase.show_life()
        return self._signals.received is not None

    def _look_at_last_step(self) -> None:
        """Take in the last step's figures, unless that was done; log them if due."""
        if self._last is None:
            return
        step, metrics, self._last = self._step, jax.device_get(self._last), None
        if self._first_step_seconds is None:
            self._first_step_seconds = time.monotonic() - self._run.began
        self._meter.add(metrics)
        if metrics.bad_in_a_row:
            norm = repr(float(metrics.gradient_norm))
            self._reporter.write("bad_step", step, {"gradient_norm": norm})
            log.warning("Step %d had a non-finite loss or gradient; it changed nothing.", step)
        if metrics.bad_in_a_row >= self._config.training.max_bad_steps:
            raise TrainingError(
                f"The loss or gradient was not finite for {int(metrics.bad_in_a_row)} steps in a "
                f"row, up to step {step}. Lower optimizer.peak_learning_rate, raise "
                "optimizer.warmup_steps, or set optimizer.clip_norm, and start the command again "
                "with --allow-changes: it resumes from the last checkpoint."
            )
        if step % self._config.training.log_every == 0:
            figures = {
                "learning_rate": float(metrics.learning_rate),
                "gradient_norm": float(metrics.gradient_norm),
                "bad_steps": int(metrics.bad_steps),
                "epoch": step / self._run.plan.steps_per_epoch,
                "peak_memory_bytes": peak_memory_bytes(),
            }
            self._reporter.training(step, self._meter.entry(self._loader.waited) | figures)

    def _announce(self) -> None:
        run, config, say = self._run, self._config, self._reporter.say
        count = sum(leaf.size for leaf in jax.tree.leaves(self._state.parameters))
        source_fill, target_fill = run.plan.fill
        axes = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
        say(
            f"{run.train_corpus.num_pairs:,} training pairs; vocabulary "
            f"{config.model.vocab_size:,}; {count:,} parameters\n"
            f"devices: {axes}; {run.plan.steps_per_epoch:,} steps an epoch\n"
            f"batches of {config.batch.tokens:,} tokens a side, {len(run.plan.shapes)} shapes; "
            f"real tokens: {source_fill:.1%} source, {target_fill:.1%} target"
        )
        if self._step:
            say(f"resuming at step {self._step} of {config.training.steps}")
        figures = {"source_fill": source_fill, "target_fill": target_fill, "parameters": count}
        self._reporter.write("start", self._step, figures | {"environment": environment()})


def _saved_step(checkpoints: Checkpoints) -> int:
    """The step of the last save, once it is on disk; negative if that failed."""
    checkpoints.wait()
    wait_for_others()
    return from_first(lambda: checkpoints.last_saved)


@contextmanager
def _runtime_errors_explained(phase: _Phase) -> Iterator[None]:
    """Say what to do about errors of JAX's runtime."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:400]
        if "RESOURCE_EXHAUSTED" in str(error):
            raise TrainingError(f"Out of memory: {phase.name}. {LESS_MEMORY} ({reason})") from error
        if jax.process_count() == 1:
            raise
        raise TrainingError(
            f"Process {jax.process_index()} of {jax.process_count()} cannot work with the others "
            "any more, perhaps because one of them has ended. Start all of them again with the "
            f"same command: they resume from the last checkpoint. ({reason})"
        ) from error
