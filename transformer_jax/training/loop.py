"""A whole training run: prepare the work directory, train, evaluate, save, resume, sum up."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from transformer_jax.checkpoint import load_parameters, patience_is_over
from transformer_jax.config import Config
from transformer_jax.config_io import flatten
from transformer_jax.data.batching import Batch, BatchPlan
from transformer_jax.data.corpus import Corpus, prepare_corpus
from transformer_jax.data.loader import load_batches, place
from transformer_jax.distributed import (
    all_or_none,
    check_agreement,
    first_then_others,
    from_first,
    is_first,
    rank,
    size,
    wait_for_others,
)
from transformer_jax.errors import UserError
from transformer_jax.remote_workdir import RemoteWorkdir, local_workdir
from transformer_jax.sharding import batch_sharding, check_rows, make_mesh
from transformer_jax.storage import is_url
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training.evaluator import Evaluator
from transformer_jax.training.prepare import (
    check_inputs,
    claimed,
    fetch,
    prepare_tokenizer,
    start_checkpoints,
    with_vocabulary,
    write_config,
)
from transformer_jax.training.reporting import Meter, Reporter, environment, peak_memory_bytes
from transformer_jax.training.resuming import FREE_BETWEEN_PROCESSES
from transformer_jax.training.saver import Checkpoints
from transformer_jax.training.step import (
    Parameters,
    StepFunctions,
    StepMetrics,
    TrainState,
    make_step_functions,
)
from transformer_jax.training.watchdog import Watchdog

log = logging.getLogger(__name__)


class TrainingError(RuntimeError):
    """Training cannot go on (loss not finite several steps in a row, other processes gone). The
    last checkpoint is older.
    """


class _StoppedEvaluation(BaseException):
    """A signal came while dev was looked at, which who sent it may not wait for."""


def train(
    config: Config,
    workdir: str | Path,
    *,
    devices: Sequence[jax.Device] | None = None,
    allow_changes: bool = False,
) -> dict[str, Any]:
    """Train as ``config`` says in ``workdir``, going on from its newest checkpoint; on all devices,
    or those given.

    A URL is trained in a folder of this machine that is kept in step with it (``remote.py``); one
    process only.

    A run that goes on must have the config it had; ``allow_changes`` frees those that are
    ``changeable`` (``config_files.Difference``).

    Returns the contents of summary.json; its ``stopped_by`` names the signal, if SIGTERM or Ctrl-C
    ended the run early. Raises ``UserError`` for bad input and ``TrainingError`` when the loss
    stays non-finite or the other processes cannot be reached any more.
    """
    remote = RemoteWorkdir(str(workdir)) if is_url(str(workdir)) else None
    if remote is not None and size() > 1:
        raise UserError(
            f"workdir is {str(workdir)!r} and there are {size()} processes; expected a folder that all of them share."
        )
    folder = Path(workdir).absolute() if remote is None else remote.folder
    check_agreement(
        {
            name: value
            for name, value in flatten(config).items()
            if not name.startswith(FREE_BETWEEN_PROCESSES)
        }
    )
    all_or_none(lambda: check_inputs(config))
    if remote is not None:
        fetch(remote)
    # One process holds the folder for all.
    with ExitStack() as held:
        from_first(lambda: held.enter_context(claimed(folder, config, allow_changes=allow_changes)))
        run: Run | None = None
        try:
            run = Run(config, folder, devices, remote)
            return run.train()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                phase = "before the first step" if run is None else run.watchdog.phase
                raise TrainingError(
                    f"Out of memory: {phase}. Set optimizer.accumulate_steps (the same batch in parts) or "
                    "model.remat, lower batch.tokens, or split the parameters over devices (mesh.fsdp); a run that has begun "
                    f"takes the first three with --allow-changes. ({' '.join(str(error).split())[:400]})"
                ) from error
            if size() == 1:
                raise
            raise TrainingError(
                f"Process {rank()} of {size()} cannot work with the others any more, perhaps as one of them has ended. Start "
                "all of them again with the same command: they go on from the last checkpoint. "
                f"({' '.join(str(error).split())[:400]})"
            ) from error
        finally:
            if run is not None:
                run.close()


class Run:
    """The tokens of one training run, put together."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        devices: Sequence[jax.Device] | None = None,
        remote: RemoteWorkdir | None = None,
    ):
        """Prepare everything in a work directory that was claimed for this config; nothing is
        trained yet.
        """
        if config.training.compilation_cache:
            jax.config.update(
                "jax_compilation_cache_dir", os.path.expanduser(config.training.compilation_cache)
            )
        self.mesh = make_mesh(config.mesh, devices)
        check_rows(self.mesh, config.batch.row_multiple, config.optimizer.accumulate_steps)
        self.workdir = workdir
        self.tokenizer = first_then_others(
            lambda: prepare_tokenizer(workdir, config) if is_first() else Tokenizer.load(workdir)
        )
        self.config = config = with_vocabulary(config, self.tokenizer)
        self.train_corpus = first_then_others(
            lambda: prepare_corpus(workdir, config, self.tokenizer, "train")
        )
        self.plan = BatchPlan(self.train_corpus, config.batch, seed=config.seed)
        self.dev_corpus: Corpus | None = None
        if config.data.dev.is_given:
            self.dev_corpus = first_then_others(
                lambda: prepare_corpus(workdir, config, self.tokenizer, "dev")
            )
        self.step_functions: StepFunctions = make_step_functions(config, self.mesh)
        self.evaluator = all_or_none(
            lambda: Evaluator(
                config, self.tokenizer, self.step_functions, self.mesh, self.dev_corpus
            )
        )
        self._check_agreement()
        self._remote = remote
        self.checkpoints = Checkpoints(
            workdir, config, self.tokenizer, when_saved=self._copy_to_store
        )
        self.stop_signal: int | None = None
        self._evaluating = False
        self._shapes_seen: set[tuple[int, ...]] = set()
        self.reporter: Reporter | None = None
        self.watchdog = Watchdog(who=f"Process {rank()} of {size()}")

    def train(self) -> dict[str, Any]:
        """Run the loop to its end or to a signal; write summary.json."""
        training = self.config.training
        state, progress = self._start()
        if is_first():  # only now: what is refused leaves the config as it is
            write_config(self.workdir, self.config)
        # a store that cannot be written is known before the first step
        self._copy_to_store(must=True)
        start = int(state.step)
        self.evaluator.start(state.parameters)
        evaluation_due = progress.pop("evaluation_due", False) and self.dev_corpus is not None
        self.reporter = Reporter(
            self.workdir, steps=training.steps, start_step=start, evaluation_due=evaluation_due
        )
        self._announce(start)
        meter = Meter(progress, self.plan, start)
        if evaluation_due:
            self._evaluate_or_save(start, state, progress, meter)
            self.checkpoints.save(state, progress, regular=self._is_due(start))
        step, pending, stopped_early = start, None, patience_is_over(progress, self.config)
        loader = load_batches(
            self.plan, sharding=batch_sharding(self.mesh), start=start, stop=training.steps
        )
        with self._signals(), loader as batches:
            self.watchdog.enter("waiting for data")
            for batch in [] if stopped_early else batches:
                self._enter_step(step, batch)
                state, metrics = self.step_functions.train_step(state, batch)
                # The host looks at a step's figures only when the next step is already under way.
                if pending is not None:
                    self._look_at(*pending, meter, batches)
                step += 1
                pending = (step, metrics)
                self.reporter.advance(step)
                stop_now = self._told_to_stop(step)
                evaluate_now = step % training.eval_every == 0 or step == training.steps
                save_now = self._is_due(step)
                if evaluate_now or save_now or stop_now:
                    self._look_at(*pending, meter, batches)
                    pending = None
                is_best = False
                if evaluate_now and stop_now:  # who sent the signal may not wait so long
                    progress["evaluation_due"] = True
                elif evaluate_now and self.dev_corpus is not None:
                    is_best = self._evaluate_or_save(step, state, progress, meter)
                    stopped_early = patience_is_over(progress, self.config)
                    stop_now = size() == 1 and self.stop_signal is not None
                if save_now or is_best or stop_now or stopped_early:
                    self.watchdog.enter("saving", f"saving step {step}")
                    meter.book()
                    begin = time.perf_counter()
                    self.checkpoints.save(state, progress, regular=save_now or stopped_early)
                    self.reporter.write("save", step, {"held_seconds": time.perf_counter() - begin})
                if stop_now or stopped_early:
                    break
                self.watchdog.enter("waiting for data")
            if pending is not None:
                self._look_at(*pending, meter, batches)
            self.watchdog.enter("last save", f"saving step {step}")
            self.checkpoints.wait()  # here, where a second SIGTERM does not cut it short
        return self._finish(step, state, progress)

    def close(self) -> None:
        """Let a save under way end, and the terminal go."""
        self.checkpoints.wait()
        self.watchdog.close()
        if self.reporter is not None:
            self.reporter.close()

    def _start(self) -> tuple[TrainState, dict[str, Any]]:
        restored = self.checkpoints.restore_latest(self.step_functions.abstract_state)
        if restored is not None:
            if restored[1]["corpus"] != self.train_corpus.fingerprint:
                raise UserError(
                    f"The training text is not the one that {str(self.workdir)!r} was trained on up to step "
                    f"{int(restored[0].step)}; expected the same files (data.train, data.root). To train its model on "
                    "with this text, begin a run in another --workdir with --training.start-from."
                )
            self._forget_best_of_another_dev(restored[1])
            return restored
        fresh = {
            "corpus": self.train_corpus.fingerprint,
            "train_seconds": 0.0,
            "target_tokens": 0,
            "source_tokens": 0,
            "evaluations": 0,
            "since_best": 0,
            "selected": self._selection(),
        }
        state = self.step_functions.init()
        parameters = self._parameters_from_elsewhere()
        if parameters is not None:
            ema = None if state.ema is None else jax.tree.map(lambda p: p.copy(), parameters)
            state = state.replace(parameters=parameters, ema=ema)  # type: ignore[attr-defined]
        return state, fresh

    def _selection(self) -> list[Any]:
        """What the best on dev is the best of."""
        training = self.config.training
        dev = None if self.dev_corpus is None else self.dev_corpus.fingerprint
        selection: list[Any] = [dev, training.select_by]
        if training.select_by == "loss":
            selection.append(training.label_smoothing)
        else:
            # which change nothing here
            search = dataclasses.replace(self.config.decoding, batch_size=1, shortlist="")
            selection += [
                training.bleu_sentences,
                training.bleu_tokenize,
                json.loads(json.dumps(dataclasses.asdict(search))),
            ]
        return selection

    def _forget_best_of_another_dev(self, progress: dict[str, Any]) -> None:
        if progress["selected"] != self._selection():
            log.info(
                "Dev, or what is looked at there, is not what it was: the best so far is forgotten."
            )
            for name in [name for name in progress if name.startswith("best_")]:
                del progress[name]
            progress |= {"since_best": 0, "selected": self._selection()}

    def _parameters_from_elsewhere(self) -> Parameters | None:
        """Those to begin with instead of random ones, if there are any: of ``training.start_from``,
        or imported.
        """
        places = self.step_functions.abstract_state.parameters
        if self.config.training.start_from:
            folder = local_workdir(self.config.training.start_from)
            names = from_first(
                lambda: [str(path.relative_to(folder)) for path in start_checkpoints(self.config)]
            )
            parameters = jax.tree.map(
                _grown, load_parameters([folder / name for name in names]), places
            )
            log.info("Beginning with the parameters of %s.", self.config.training.start_from)
            return place(parameters, jax.tree.map(lambda place: place.sharding, places))
        imported = self.checkpoints.imported_parameters(places)
        if imported is not None:
            log.info("Beginning with the imported parameters in %s.", self.workdir)
        return imported

    def _announce(self, start: int) -> None:
        assert self.reporter is not None
        config, say = self.config, self.reporter.say
        count = sum(
            int(np.prod(leaf.shape))
            for leaf in jax.tree.leaves(self.step_functions.abstract_state.parameters)
        )
        source_fill, target_fill = self.plan.fill
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        say(
            f"{self.train_corpus.num_pairs:,} training pairs; vocabulary {config.model.vocab_size:,}; {count:,} parameters"
        )
        say(f"devices: {axes}; {self.plan.steps_per_epoch:.1f} steps an epoch")
        say(
            f"batches of {config.batch.tokens:,} tokens a side, {len(self.plan.shapes)} shapes; "
            f"real tokens: {source_fill:.1%} source, {target_fill:.1%} target"
        )
        if start:
            say(f"resuming at step {start} of {config.training.steps}")
        self.reporter.write(
            "start",
            start,
            {"source_fill": source_fill, "target_fill": target_fill, "parameters": count},
        )

    def _enter_step(self, step: int, batch: Batch) -> None:
        shape = (*batch.source_BS.shape, batch.target_BT.shape[1])
        said = "{} rows of {} + {} tokens".format(*shape)
        if shape in self._shapes_seen:
            self.watchdog.enter("training step", f"training step {step}, {said}")
        else:
            self._shapes_seen.add(shape)
            self.watchdog.enter("compilation", f"compilation of training step {step}, {said}")
            log.info("Compiling the training step for %s.", said)

    def _told_to_stop(self, step: int) -> bool:
        """By a signal to this process, or to any of several: then all of them learn it at the same
        step.
        """
        if size() == 1:
            return self.stop_signal is not None
        if multihost_utils.reached_preemption_sync_point(step):
            self.stop_signal = signal.SIGTERM
        return self.stop_signal is not None

    def _check_agreement(self) -> None:
        """Several processes must have read the same text and made the same of it."""
        corpora = {"train": self.train_corpus, "dev": self.dev_corpus}
        texts = {"dev": self.evaluator.dev_pairs, "test": self.evaluator.test_pairs}
        check_agreement(
            {"tokenizer": self.tokenizer.fingerprint}
            | {
                f"corpus of data.{name}": corpus.fingerprint
                for name, corpus in corpora.items()
                if corpus is not None
            }
            | {
                f"text of data.{name}": hashlib.sha256(repr(text).encode()).hexdigest()
                for name, text in texts.items()
            }
        )

    def _look_at(self, step: int, metrics: StepMetrics, meter: Meter, batches: Any) -> None:
        """Take in one step's figures; log them now and then; stop if the loss stays non-finite."""
        assert self.reporter is not None
        metrics = jax.device_get(metrics)
        meter.add(metrics)
        if metrics.bad_in_a_row:
            self.reporter.write(
                "bad_step", step, {"gradient_norm": repr(float(metrics.gradient_norm))}
            )
            log.warning("Step %d had a non-finite loss or gradient; it changed nothing.", step)
        if metrics.bad_in_a_row >= self.config.training.max_bad_steps:
            raise TrainingError(
                f"The loss or gradient was not finite for {int(metrics.bad_in_a_row)} steps in a row, up to step {step}. "
                "Lower optimizer.peak_learning_rate, raise optimizer.warmup_steps, or set optimizer.clip_norm, and start the "
                "command again with --allow-changes: it goes on from the last checkpoint."
            )
        if step % self.config.training.log_every == 0:
            values = meter.entry(batches.waited)
            values |= {
                "learning_rate": float(metrics.learning_rate),
                "gradient_norm": float(metrics.gradient_norm),
                "bad_steps": int(metrics.bad_steps),
                "epoch": self.plan.epoch(step),
            }
            self.reporter.training(step, values)

    def _is_due(self, step: int) -> bool:
        """Whether there is a regular checkpoint at this step."""
        return (
            step % self.config.training.checkpoint_every == 0 or step == self.config.training.steps
        )

    def _evaluate_or_save(
        self, step: int, state: TrainState, progress: dict[str, Any], meter: Meter
    ) -> bool:
        """As ``_evaluate``; if that fails, for want of memory say, what was trained is saved, and
        resuming evaluates it.

        So it does where a signal cuts it short; then ``progress`` says so, and saving is the
        caller's.
        """
        before = dict(progress)
        kind = (
            "evaluation with BLEU"
            if self.evaluator.translates(progress["evaluations"] + 1)
            else "evaluation"
        )
        self.watchdog.enter(kind, f"{kind} after step {step}")
        try:
            with meter.paused():
                self._evaluating = size() == 1  # several stop together, at a step
                try:
                    return self._evaluate(step, state, progress)
                finally:
                    self._evaluating = False
        except (Exception, _StoppedEvaluation) as error:
            if size() > 1:  # the others would have to save, too
                raise
            meter.book()
            seconds = progress["train_seconds"]
            progress.clear()
            progress.update(before, train_seconds=seconds, evaluation_due=True)
            if isinstance(error, _StoppedEvaluation):
                return False
            self.checkpoints.save(state, progress, regular=self._is_due(step))
            raise

    def _evaluate(self, step: int, state: TrainState, progress: dict[str, Any]) -> bool:
        """Dev loss and BLEU; returns whether this is the best so far."""
        assert self.reporter is not None
        parameters = state.parameters if state.ema is None else state.ema
        progress["evaluations"] += 1
        values, text = self.evaluator.dev(parameters, number=progress["evaluations"])
        self.reporter.write("dev", step, values)
        self.reporter.say(f"step {step}: {text}")
        better = {
            "dev_loss": values["dev_loss"] < progress.get("best_dev_loss", math.inf),
            "dev_bleu": values.get("dev_bleu", -math.inf)
            > progress.get("best_dev_bleu", -math.inf),
        }
        progress |= {
            f"best_{name}": values[name] for name, is_better in better.items() if is_better
        }
        selected = f"dev_{self.config.training.select_by}"
        if selected not in values:  # BLEU was not due
            return False
        if better[selected]:
            progress["best_step"] = step
        progress["since_best"] = 0 if better[selected] else progress["since_best"] + 1
        return better[selected]

    def _finish(self, step: int, state: TrainState, progress: dict[str, Any]) -> dict[str, Any]:
        assert self.reporter is not None
        if self._saved_step() != step:
            self.checkpoints.save(
                state,
                progress,
                regular=self._is_due(step) or patience_is_over(progress, self.config),
            )
            if self._saved_step() != step:
                raise UserError(
                    f"The last checkpoint (step {step}) could not be saved in {self.checkpoints.folder}; "
                    "free some disk space and run the same command again: it goes on from the checkpoint before."
                )
        finished = self.stop_signal is None
        seconds = progress["train_seconds"]
        tokens = progress["source_tokens"] + progress["target_tokens"]
        summary: dict[str, Any] = {
            "stopped_by": None
            if self.stop_signal is None
            else signal.Signals(self.stop_signal).name,
            "steps": step,
            "epochs": self.plan.epoch(step),
            "bad_steps": int(state.bad_steps),
            **{name: value for name, value in progress.items() if name.startswith("best_")},
            "train_seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "target_tokens_per_second": progress["target_tokens"] / seconds if seconds else 0.0,
            "peak_memory_bytes": peak_memory_bytes(),
            **environment(),
        }
        self._write_summary(summary)
        if finished and self.evaluator.test_pairs:
            self.watchdog.enter("test")
            summary["test"], text = self.evaluator.test(self.workdir)
            self.reporter.say(text)
            self._write_summary(summary)
        self._copy_to_store(must=True)
        if not finished:
            self.reporter.say(
                f"{summary['stopped_by']}: saved at step {step}. Run the same command again to go on from there."
            )
        else:
            folder = self.workdir if self._remote is None else self._remote.url
            self.reporter.say(f"done at step {step}; figures in {folder}/summary.json")
        return summary

    def _copy_to_store(self, *, must: bool = False) -> None:
        """Where the work directory is a URL: what is new in its folder; a failure is an error only
        if it ``must``.
        """
        if self._remote is None:
            return
        try:
            self._remote.push()
        except Exception as error:
            failed = f"{self._remote.folder} could not be copied to {self._remote.url}: {' '.join(str(error).split())}"
            if must:
                raise UserError(
                    f"{failed}. Nothing is lost: the same command on this machine goes on from there."
                ) from error
            log.error("%s. Training goes on; the next checkpoint tries again.", failed)

    def _saved_step(self) -> int:
        """Of the last checkpoint that is on disk."""
        self.checkpoints.wait()
        wait_for_others()
        return from_first(lambda: self.checkpoints.last_saved)

    def _write_summary(self, summary: dict[str, Any]) -> None:
        if is_first():
            (self.workdir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and the first Ctrl-C end the run after the step under way; a second Ctrl-C ends
        it at once.
        """

        def handle(number: int, frame: Any) -> None:
            if self.stop_signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            if size() > 1:
                # JAX's runtime has its own handler of SIGTERM, which tells all processes.
                signal.raise_signal(signal.SIGTERM)
                return
            self.stop_signal = number
            print(
                f"stopping{'' if self._evaluating else ' after this step'}; saving ...",
                file=sys.stderr,
            )
            if self._evaluating:
                raise _StoppedEvaluation

        # Python gives signals to the main thread only
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGTERM, signal.SIGINT) if size() == 1 else (signal.SIGINT,)
        old = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def _grown(values_VD: np.ndarray, place: jax.ShapeDtypeStruct) -> np.ndarray:
    """A parameter, with rows for tokens that the vocabulary has got since: the mean of those that
    were there.
    """
    new = np.broadcast_to(
        values_VD.mean(axis=0), (place.shape[0] - len(values_VD), *place.shape[1:])
    )
    return np.concatenate([values_VD, new])
