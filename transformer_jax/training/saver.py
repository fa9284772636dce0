"""Saves checkpoints in the background through Orbax, deletes old ones, and restores the newest.

``checkpoint.py`` describes the format.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
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
    damage,
    delete_checkpoint,
    is_imported,
    is_regular,
    progress_of,
    write_manifest,
)
from transformer_jax.config import Config
from transformer_jax.config_io import to_json
from transformer_jax.data.loader import place
from transformer_jax.distributed import from_first, is_first
from transformer_jax.errors import UserError
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training.progress import Progress
from transformer_jax.training.step import Parameters, TrainState

log = logging.getLogger(__name__)

_SAVING = ".saving"  # suffix of a checkpoint's folder until it is complete
_REPLACED = ".replaced"  # suffix of an earlier checkpoint of the same step, until it is deleted


class Checkpoints:
    """The checkpoints of one work directory."""

    def __init__(
        self,
        workdir: Path,
        config: Config,
        tokenizer: Tokenizer,
        *,
        when_saved: Callable[[], None] = lambda: None,
    ):
        """Removes what an interrupted save left. ``when_saved`` is called after each save, in the
        background.
        """
        self.folder = workdir.absolute() / "checkpoints"  # Orbax wants absolute paths
        self._config, self._tokenizer, self._when_saved = config, tokenizer, when_saved
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._attempts = 0
        self._best_step: int | None = None
        self.last_saved = -1
        self.failure = ""  # of the last save
        from_first(self._clean)

    def save(self, state: TrainState, progress: Progress) -> None:
        """Start saving; returns once the state is copied.

        A failure is logged and older checkpoints stay; ``check`` raises where there are none. One
        that is not regular stays until the next is saved, or as long as it is the best on the dev
        set. With ``training.patience`` those that are averaged with the best stay with it.
        """
        self.wait()
        from_first(self.check)
        self.failure, self.last_saved = "", int(state.step)
        # Each attempt has a folder of its own: a failed one may still be written to.
        self._attempts += 1
        path = self.folder / f"{checkpoint_name(self.last_saved)}.{self._attempts}{_SAVING}"
        try:
            # The next step donates the state while Orbax still writes, so Orbax gets a copy.
            parts = jax.tree.map(jnp.copy, _parts(state))
            from_first(lambda: self._begin(path, progress))
            response = ocp.save_checkpointables_async(path / "state", parts)
        except Exception as error:
            self._discard(path, error)
        else:
            self._pending = self._worker.submit(self._finish, path, response, progress.best_step)

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
        """Steps with a complete checkpoint that training saved, oldest first."""
        return [
            step
            for step in complete_steps(self.folder)
            if not is_imported(self.folder / checkpoint_name(step))
        ]

    def restore_latest(self, abstract_state: TrainState) -> tuple[TrainState, Progress] | None:
        """The newest intact checkpoint, placed on devices as ``abstract_state`` says; None if
        training has saved none.

        Damaged newer ones get another name.

        Raises:
          UserError: all are damaged, or another version of the program wrote this one.
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

    def imported_parameters(self, abstract_parameters: Parameters) -> Parameters | None:
        """The parameters that ``save_model`` left to start from, placed as
        ``abstract_parameters`` says; None if it left none.
        """
        path = self.folder / checkpoint_name(0)
        if not is_imported(path):
            return None
        if reason := from_first(lambda: damage(path)):
            raise UserError(
                f"The imported parameters in {path} are damaged ({reason}); import the model again."
            )
        wanted = {"parameters": abstract_parameters}
        return ocp.load_checkpointables(path / "state", wanted)["parameters"]

    def _clean(self) -> None:
        """Finish or remove what an interrupted save left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.iterdir()):
            complete = (path / MANIFEST).exists()
            if path.suffix == _SAVING and complete:  # it only lacked its name
                _publish(path)
            elif path.suffix in (_SAVING, _REPLACED) or (path.name.isdigit() and not complete):
                shutil.rmtree(path, ignore_errors=True)

    def _begin(self, path: Path, progress: Progress) -> None:
        """Write all of a checkpoint but its arrays."""
        for failed in self.folder.glob(f"*{_SAVING}"):
            shutil.rmtree(failed, ignore_errors=True)
        path.mkdir()
        (path / "config.json").write_text(to_json(self._config))
        (path / "progress.json").write_text(json.dumps(dataclasses.asdict(progress), indent=2))
        self._tokenizer.save(path)

    def _newest_intact(self) -> int | None:
        paths = [self.folder / checkpoint_name(step) for step in reversed(self.steps())]
        if not paths:
            return None
        for path in paths:
            if reason := damage(path):
                log.warning("Checkpoint %s is damaged (%s); using the one before it.", path, reason)
                continue
            # Only now: with all of them renamed the next start would find none and begin anew.
            for later in paths[: paths.index(path)]:
                shutil.rmtree(later.with_suffix(".damaged"), ignore_errors=True)  # an earlier one
                later.rename(later.with_suffix(".damaged"))
            return int(path.name)
        raise UserError(
            f"All {len(paths)} checkpoints in {self.folder} are damaged; expected at least one "
            "that is intact. Restore them from a backup, or start in another --workdir."
        )

    def _finish(self, path: Path, response: Any, best_step: int | None) -> None:
        try:
            response.result()
            if not is_first():  # which does the rest for all
                return
            write_manifest(path)
        except Exception as error:
            self._discard(path, error)
            return
        try:
            _publish(path)
            self._delete_old(best_step)
        except OSError as error:  # the next save, or the next start, makes up for it
            log.warning(
                "Checkpoint %s is saved, but %s could not be tidied: %s.",
                *(path, self.folder, _reason(error)),
            )
        self._when_saved()

    def _delete_old(self, best_step: int | None) -> None:
        """Keep the newest, the best, and what may be averaged with them."""
        steps, training = self.steps(), self._config.training
        if best_step in steps:  # if its own save failed, the best before it stays
            self._best_step = best_step
        regular = [step for step in steps if is_regular(self.folder / checkpoint_name(step))]
        kept = {*regular[-training.keep_checkpoints :], steps[-1], self._best_step}
        if training.patience and self._best_step is not None and training.most_averaged > 1:
            before_best = [step for step in regular if step < self._best_step]
            kept |= set(before_best[1 - training.most_averaged :])
        for step in steps:
            if step not in kept:
                delete_checkpoint(self.folder / checkpoint_name(step))

    def _discard(self, path: Path, error: Exception) -> None:
        if is_first():
            shutil.rmtree(path, ignore_errors=True)
        step, steps = self.last_saved, self.steps()
        self.failure, self.last_saved = _reason(error), -1
        there = f"The newest is of step {steps[-1]}" if steps else "There is no checkpoint"
        log.error("Checkpoint %d could not be saved: %s. %s.", step, self.failure, there)


def _publish(path: Path) -> None:
    """Give a complete checkpoint its name, in place of an earlier one of the same step."""
    final = path.with_name(path.name.partition(".")[0])
    replaced = final.with_suffix(_REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    path.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


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


def _restore_state(path: Path, abstract: TrainState) -> TrainState:
    wanted = _parts(abstract)
    if config_of(path).optimizer.ema_decay == 0:
        wanted.pop("ema", None)
    parts = ocp.load_checkpointables(path / "state", wanted)
    parameters, ema = parts["parameters"], parts.get("ema")
    if abstract.ema is not None and ema is None:  # the average starts now
        ema = jax.tree.map(jnp.copy, parameters)
    seed = place(np.array(config_of(path).seed, np.uint32), abstract.seed.sharding)
    return TrainState(parameters=parameters, ema=ema, seed=seed, **parts["rest"])


def _reason(error: Exception) -> str:
    """The message on one line, shortened if it is very long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
