"""Checkpoints: saved in the background by Orbax, kept as configured, restored exactly; format:
``checkpoint_files.py``.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from transformer_jax.checkpoint_files import (
    MANIFEST,
    DamagedError,
    checkpoint_name,
    complete_steps,
    is_imported,
    is_regular,
    verify,
    write_manifest,
)
from transformer_jax.config import Config
from transformer_jax.config_io import load_config_file, to_json
from transformer_jax.distributed import from_first, is_first
from transformer_jax.errors import UserError
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training.step import Parameters, TrainState

log = logging.getLogger(__name__)

# what the loop must remember besides the state: best dev value, seconds trained, ...
Progress = dict[str, Any]

_SAVING = ".saving"  # ending of a checkpoint's folder until it is whole
_REPLACED = ".replaced"  # of one whose step was saved again, while the new one gets its name


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
        """Removes what an interrupted save left behind. ``when_saved`` is called, beside training,
        after each save.
        """
        self.folder = workdir.absolute() / "checkpoints"  # Orbax wants absolute paths
        self._config, self._tokenizer, self._when_saved = config, tokenizer, when_saved
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self.last_saved = -1
        self._best_step: int | None = None
        from_first(self._clean)

    def save(self, state: TrainState, progress: Progress, *, regular: bool = True) -> None:
        """Start saving; returns once the state is copied. A failure is logged and leaves older
        checkpoints as they are.

        One that is not ``regular`` stays until the next is saved, or as long as it is the best on
        dev. With ``training.patience`` those that are averaged with the best stay with it.
        """
        self.wait()
        step = int(state.step)
        path = self.folder / (checkpoint_name(step) + _SAVING)
        self.last_saved = step
        parts = {"parameters": state.parameters, "rest": _rest(state)}
        if state.ema is not None:
            parts["ema"] = state.ema
        try:
            # The next step overwrites the donated state while Orbax writes: it gets a copy.
            parts = jax.tree.map(jnp.copy, parts)
            from_first(lambda: self._begin(path, progress | {"regular": regular}))
            response = ocp.save_checkpointables_async(path / "state", parts)
        except Exception as error:
            self._discard(path, error)
        else:
            self._pending = self._worker.submit(
                self._finish, path, response, progress.get("best_step")
            )

    def wait(self) -> None:
        """Until the save under way, if any, is on disk."""
        if self._pending is not None:
            try:
                self._pending.result()
            finally:
                if self._pending.done():  # not if Ctrl-C cut the waiting short
                    self._pending = None

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint that training saved, oldest first."""
        return [
            step
            for step in complete_steps(self.folder)
            if not is_imported(self.folder / checkpoint_name(step))
        ]

    def restore_latest(self, abstract_state: TrainState) -> tuple[TrainState, Progress] | None:
        """The newest checkpoint that is whole, placed on devices as ``abstract_state`` says; None
        if training saved none.

        Damaged newer ones are set aside under another name. ``UserError`` if all are damaged.
        """
        step = from_first(self._newest_whole)
        if step is None:
            return None
        path = self.folder / checkpoint_name(step)
        progress = json.loads((path / "progress.json").read_text())
        progress.pop("regular", None)  # of the checkpoint, not of the loop
        self.last_saved, self._best_step = step, progress.get("best_step")
        try:
            return _restore_state(path, abstract_state), progress
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"Checkpoint {path} has another structure than this version of the program writes ({_reason(error)}). Expected "
                "one of this version; its model can begin another run: --training.start-from, with another --workdir."
            ) from error

    def imported_parameters(self, abstract_parameters: Parameters) -> Parameters | None:
        """The parameters that ``save_imported`` left to begin with, placed as
        ``abstract_parameters`` says, if it did.
        """
        path = self.folder / checkpoint_name(0)
        if not (path / MANIFEST).exists() or not is_imported(path):
            return None
        try:
            from_first(lambda: verify(path))
        except DamagedError as error:
            raise UserError(
                f"The imported parameters in {path} are damaged ({error}); import the model again."
            ) from None
        return ocp.load_checkpointables(path / "state", {"parameters": abstract_parameters})[
            "parameters"
        ]

    def _clean(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in list(self.folder.iterdir()):
            whole = (path / MANIFEST).exists()
            if path.suffix == _SAVING and whole:  # stopped just before it had its name
                _publish(path)
            elif path.suffix == _REPLACED or (
                not whole and (path.suffix == _SAVING or path.name.isdigit())
            ):
                # it may have gone when another one was given its name
                shutil.rmtree(path, ignore_errors=True)

    def _begin(self, path: Path, progress: Progress) -> None:
        """All of a checkpoint but its arrays."""
        if path.exists():  # left by a save that failed
            shutil.rmtree(path)
        path.mkdir()
        (path / "config.json").write_text(to_json(self._config))
        (path / "progress.json").write_text(json.dumps(progress, indent=2))
        self._tokenizer.save(path)

    def _newest_whole(self) -> int | None:
        steps = self.steps()
        for step in reversed(steps):
            path = self.folder / checkpoint_name(step)
            try:
                verify(path)
            except DamagedError as error:
                log.warning("Checkpoint %s is damaged (%s); trying the one before it.", path, error)
                continue
            # Only now: with all of them renamed, the next start would find none and begin anew.
            for damaged in (
                self.folder / checkpoint_name(later) for later in steps if later > step
            ):
                aside = damaged.with_suffix(".damaged")
                shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
                damaged.rename(aside)
            return step
        if steps:
            raise UserError(
                f"All {len(steps)} checkpoints in {self.folder} are damaged; expected at least one that is whole. Restore "
                "them from a backup, or start anew in another --workdir."
            )
        return None

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
            self._tidy(best_step)
        # of the file system; the next start, or the next save, makes up for it
        except OSError as error:
            log.warning(
                "Checkpoint %s is saved, but %s could not be put in order: %s.",
                path,
                self.folder,
                _reason(error),
            )
        self._when_saved()

    def _tidy(self, best_step: int | None) -> None:
        """Delete what is not to be kept."""
        steps, training = self.steps(), self._config.training
        if best_step in steps:  # not if its own save failed: then the best before it stays
            self._best_step = best_step
        regular = [step for step in steps if is_regular(self.folder / checkpoint_name(step))]
        kept = {*regular[-training.keep_checkpoints :], steps[-1], self._best_step}
        # the run may end with the mean up to the best
        if training.patience and self._best_step is not None:
            before = [step for step in regular if step < self._best_step]
            kept |= set(before[max(0, len(before) - training.average + 1) :])
        for step in steps:
            if step not in kept:
                _delete(self.folder / checkpoint_name(step))

    def _discard(self, path: Path, error: Exception) -> None:
        if is_first():
            shutil.rmtree(path, ignore_errors=True)
        self.last_saved = -1
        final = path.with_suffix("")
        log.error(
            "Checkpoint %s could not be saved: %s. Older checkpoints are untouched.",
            final,
            _reason(error),
        )


def save_imported(
    workdir: Path, config: Config, tokenizer: Tokenizer, parameters: Parameters
) -> None:
    """Make a work directory whose training begins with ``parameters`` (nested dict of arrays)
    instead of random ones.
    """
    path = workdir.absolute() / "checkpoints" / checkpoint_name(0)
    path.mkdir(parents=True)
    (path / "progress.json").write_text(json.dumps({"imported": True}, indent=2))
    ocp.save_checkpointables(path / "state", {"parameters": jax.tree.map(jnp.asarray, parameters)})
    for folder in (path, workdir):
        tokenizer.save(folder)
        # the work directory's last: without it, it is none
        (folder / "config.json").write_text(to_json(config))
        if folder == path:
            write_manifest(path)


def _publish(path: Path) -> None:
    """Give a checkpoint that is whole its name, in place of an earlier one of the same step."""
    final, replaced = path.with_suffix(""), path.with_suffix(_REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    path.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _delete(path: Path) -> None:
    # from now on no checkpoint, however far deleting gets
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _rest(state: TrainState) -> dict[str, Any]:
    return {
        "optimizer": state.optimizer,
        "step": state.step,
        "bad_steps": state.bad_steps,
        "bad_in_a_row": state.bad_in_a_row,
    }


def _restore_state(path: Path, abstract: TrainState) -> TrainState:
    wanted = {"parameters": abstract.parameters, "rest": _rest(abstract)}
    had_average = load_config_file(path / "config.json").optimizer.ema_decay > 0
    if abstract.ema is not None and had_average:
        wanted["ema"] = abstract.ema
    parts = ocp.load_checkpointables(path / "state", wanted)
    parameters, ema = parts["parameters"], parts.get("ema")
    if abstract.ema is not None and not had_average:  # it begins now
        ema = jax.tree.map(jnp.copy, parameters)
    return TrainState(parameters=parameters, ema=ema, **parts["rest"])


def _reason(error: Exception) -> str:
    """The message on one line, not all of it where it is very long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
