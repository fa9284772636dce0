"""Saves checkpoints in the background through Orbax, deletes old ones, and restores the newest.

``checkpoint.py`` describes the format.
"""

from __future__ import annotations

import dataclasses
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from transformer_jax.checkpoint import (
    MANIFEST,
    checkpoint_name,
    complete_steps,
    config_of,
    corruption,
    delete_checkpoint,
    is_regular,
    progress_of,
    write_manifest,
)
from transformer_jax.config import Config
from transformer_jax.data.loader import place
from transformer_jax.distributed import from_first, is_first
from transformer_jax.errors import UserError
from transformer_jax.storage import AnyPath, files_in, remove_folder
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training.progress import Progress
from transformer_jax.training.step import TrainState
from transformer_jax.training.workdir import Workdir

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 600  # until the other processes have written their part of a checkpoint


class Checkpoints:
    """The checkpoints of one work directory."""

    def __init__(self, workdir: Workdir, config: Config, tokenizer: Tokenizer):
        """Removes what an interrupted save left."""
        self.folder = workdir.checkpoints
        self._workdir, self._config, self._tokenizer = workdir, config, tokenizer
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._best_step: int | None = None
        self.last_saved = -1
        self.failure = ""  # of the last save
        from_first(self._clean)

    def save(self, state: TrainState, progress: Progress) -> None:
        """Start saving; returns once the state is copied. A complete step is not saved again.

        A failure is logged and older checkpoints stay; ``check`` raises where there are none. The
        newest checkpoint stays, and of those before the newest ``keep_checkpoints`` regular ones
        and the best on the dev set; with ``training.patience`` also those that are averaged with
        the best.
        """
        self.wait()
        path = self.folder / checkpoint_name(int(state.step))
        is_new = from_first(lambda: self._make_room(path))
        self.failure, self.last_saved = "", int(state.step)
        if not is_new:
            return
        try:
            # The next step donates the state while Orbax still writes, so Orbax gets a copy.
            parts = jax.tree.map(jnp.copy, _parts(state))
            context = ocp.Context()
            context.async_options.timeout_secs = _TIMEOUT_SECONDS
            with context:
                response = ocp.save_checkpointables_async(str(path / "state"), parts)
        except Exception as error:
            self._discard(path, error)
        else:
            noted = dataclasses.replace(progress)
            self._pending = self._worker.submit(self._finish, path, response, noted)

    def wait(self) -> None:
        """Wait until the save in progress, if any, is on disk."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def check(self) -> None:
        """Raise ``UserError`` if the last save failed and there is no checkpoint to resume from."""
        if self.failure and not self.steps():
            raise UserError(
                f"The first checkpoint could not be saved in {self.folder}: {self.failure}. "
                "Training stops, as there is nothing to resume from. Free some disk space and run "
                "the same command again: it starts at the beginning."
            )

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return complete_steps(self.folder)

    def restore_latest(self, abstract_state: TrainState) -> tuple[TrainState, Progress] | None:
        """The newest intact checkpoint, placed on devices as ``abstract_state`` says; None if
        training has saved none.

        Corrupt newer ones are deleted.

        Raises:
          UserError: all are corrupt, or another version of the program wrote this one.
        """
        step = from_first(self._newest_intact)
        if step is None:
            return None
        path = self.folder / checkpoint_name(step)
        progress = Progress.from_json(progress_of(path))
        self.last_saved, self._best_step = step, progress.best_step
        try:
            return _restore_state(path, abstract_state), progress
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"Checkpoint {path} does not have the structure that this version of the program "
                f"writes ({_reason(error)}). Expected a checkpoint of this version; to train its "
                "model further use --training.start-from with another --workdir."
            ) from error

    def _clean(self) -> None:
        """Remove what an interrupted save left."""
        names = {name.partition("/")[0] for name in files_in(self.folder)}
        for name in names.difference(map(checkpoint_name, complete_steps(self.folder))):
            remove_folder(self.folder / name)

    def _make_room(self, path: AnyPath) -> bool:
        """Prepare saving to ``path``; False if a complete checkpoint is there."""
        self.check()
        self._workdir.check_token()
        if (path / MANIFEST).exists():
            return False
        remove_folder(path)  # a failed save's
        return True

    def _newest_intact(self) -> int | None:
        steps = self.steps()[::-1]
        for number, step in enumerate(steps):
            path = self.folder / checkpoint_name(step)
            if reason := corruption(path):
                log.warning("Checkpoint %s is corrupt (%s); using the one before it.", path, reason)
                continue
            for later in steps[:number]:  # only now: if all are corrupt, none is deleted
                delete_checkpoint(self.folder / checkpoint_name(later))
            return step
        if steps:
            raise UserError(
                f"All {len(steps)} checkpoints in {self.folder} are corrupt; expected at least one "
                "that is intact. Restore them from a backup, or start in another --workdir."
            )
        return None

    def _finish(self, path: AnyPath, response: Any, progress: Progress) -> None:
        try:
            response.result()
            if not is_first():  # which does the rest for all
                return
            if self.folder.parent == self._workdir.store:
                self._push()  # logs before the manifest
            noted = dataclasses.asdict(progress)
            write_manifest(path, self._config, self._tokenizer, noted)
        except Exception as error:
            self._discard(path, error)
            return
        try:
            self._delete_old(progress.best_step)
        except OSError as error:  # the next save makes up for it
            log.warning("Checkpoint %s is saved, but: %s", path, _reason(error))
        if self.folder.parent != self._workdir.store:
            self._push()

    def _push(self) -> None:
        """Copy what the URL lacks; training outlasts a store that fails."""
        try:
            self._workdir.push()
        except UserError as error:
            log.warning("%s Training continues; the next checkpoint tries again.", error)

    def _delete_old(self, best_step: int | None) -> None:
        """Keep the newest, the best, and what may be averaged with them."""
        steps, training = self.steps(), self._config.training
        if best_step in steps:  # if its own save failed, the best before it stays
            self._best_step = best_step
        regular = [s for s in steps if is_regular(self.folder / checkpoint_name(s))]
        kept = {*regular[-training.keep_checkpoints :], steps[-1], self._best_step}
        if training.patience and self._best_step is not None and training.most_averaged > 1:
            before_best = [step for step in regular if step < self._best_step]
            kept |= set(before_best[1 - training.most_averaged :])
        for step in set(steps) - kept:
            delete_checkpoint(self.folder / checkpoint_name(step))

    def _discard(self, path: AnyPath, error: Exception) -> None:
        if is_first():
            remove_folder(path)
        step, steps = self.last_saved, self.steps()
        self.failure, self.last_saved = _reason(error), -1
        there = f"The newest is of step {steps[-1]}" if steps else "There is no checkpoint"
        text = "Checkpoint %d could not be saved: %s (in %s). %s."
        log.error(text, step, self.failure, path, there)


def _parts(state: TrainState) -> dict[str, Any]:
    """What Orbax saves."""
    rest = {
        "optimizer": state.optimizer,
        "step": state.step,
        "bad_steps": state.bad_steps,
        "bad_in_a_row": state.bad_in_a_row,
    }
    parts = {"parameters": state.parameters, "rest": rest}
    return parts if state.ema is None else parts | {"ema": state.ema}


def _restore_state(path: AnyPath, abstract: TrainState) -> TrainState:
    wanted = _parts(abstract)
    if config_of(path).optimizer.ema_decay == 0:
        wanted.pop("ema", None)
    parts = ocp.load_checkpointables(str(path / "state"), wanted)
    parameters, ema = parts["parameters"], parts.get("ema")
    if abstract.ema is not None and ema is None:  # the average starts now
        ema = jax.tree.map(jnp.copy, parameters)
    seed = place(np.array(config_of(path).seed, np.uint32), abstract.seed.sharding)
    return TrainState(parameters=parameters, ema=ema, seed=seed, **parts["rest"])


def _reason(error: Exception) -> str:
    """The message on one line, shortened if it is very long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
