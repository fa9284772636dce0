"""Background checkpoint saving with Orbax, retention, and restoring.

``runs/checkpoint.py`` describes the format.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from transformer_jax.devices.distributed import broadcast_from_first, is_first
from transformer_jax.errors import UserError, one_line
from transformer_jax.model.matmul import compute_dtype
from transformer_jax.runs.averaging import kept
from transformer_jax.runs.checkpoint import (
    checkpoint_name,
    complete_steps,
    delete_checkpoint,
    read_manifest,
    write_manifest,
)
from transformer_jax.runs.model_folder import is_model, write_model
from transformer_jax.settings.config import Config
from transformer_jax.storage.files import MANIFEST, MODEL, AnyPath, remove_folder, retry
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.progress import Progress
from transformer_jax.training.step import TrainState
from transformer_jax.training.workdir import Workdir, WorkdirTaken

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 600  # for other processes to write their shards of a checkpoint


class Checkpoints:
    """Checkpoints of a work directory."""

    def __init__(self, workdir: Workdir, config: Config, tokenizer: Tokenizer):
        self.folder, self._model = workdir.checkpoints, workdir.folder / MODEL
        self._workdir, self._config, self._tokenizer = workdir, config, tokenizer
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self.failure = ""  # error of the last save

    def save(self, state: TrainState, progress: Progress) -> None:
        """Start saving a checkpoint, and return once the state is copied.

        A step that is already complete is not saved again. If saving fails, the error is logged and
        older checkpoints are kept; if no checkpoint exists, the next save raises ``UserError``.
        After a save, older checkpoints are deleted (see ``kept``).
        """
        self.wait()
        path, store = self.folder / checkpoint_name(int(state.step)), self._workdir.store
        if not broadcast_from_first(lambda: retry(store, lambda: self._make_room(path))):
            return
        self.failure = ""
        try:
            # The next step donates the state while Orbax is still writing, so Orbax gets a copy.
            parts = jax.tree.map(jnp.copy, _parts(state))
            context = ocp.Context()
            context.async_options.timeout_secs = _TIMEOUT_SECONDS
            with context:
                response = ocp.save_checkpointables_async(str(path / "state"), parts)
        except Exception as error:
            self._discard(path, error)
        else:
            noted = dataclasses.asdict(progress)
            self._pending = self._worker.submit(self._finish, path, response, noted)

    def wait(self) -> None:
        """Wait for the save in progress, if any."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def holds(self, step: int) -> bool:
        """Wait for the save in progress. Returns True if this step has a complete checkpoint."""
        self.wait()

        def held() -> bool:
            retry(self._workdir.store, self._workdir.check_token)
            return step in self.steps()

        return broadcast_from_first(held)

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, oldest first."""
        return retry(self.folder, lambda: complete_steps(self.folder))

    def restore(self, step: int, abstract_state: TrainState) -> tuple[TrainState, Progress]:
        """Restore a step's checkpoint with the same shardings as ``abstract_state``."""
        path = self.folder / checkpoint_name(step)
        parts = ocp.load_checkpointables(str(path / "state"), _parts(abstract_state))
        state = TrainState(parameters=parts["parameters"], ema=parts.get("ema"), **parts["rest"])
        return state, Progress.parse(read_manifest(path)["progress"], str(path / MANIFEST))

    def write_model(self, parameters: Any, steps: Sequence[int]) -> None:
        """Write the finished model, the average of these steps' checkpoints."""
        config, auto = self._config, dataclasses.replace(self._config.model, dtype="auto")
        if config.model.dtype == compute_dtype(auto):  # other machines choose their own
            config = dataclasses.replace(config, model=auto)
        broadcast_from_first(
            lambda: write_model(self._model, config, parameters, self._tokenizer, steps)
        )

    def _make_room(self, path: AnyPath) -> bool:
        """Prepare for saving to ``path``. Returns False if it is already a complete checkpoint."""
        steps = self.steps()
        if self.failure and not steps:
            raise UserError(
                f"The first checkpoint could not be saved in {self.folder}: {self.failure}. "
                "Stopping because there is no checkpoint to resume from. Free disk space "
                "and run the same command again to start from scratch."
            )
        self._workdir.check_token()
        if int(path.name) in steps:
            return False
        remove_folder(path)  # left by a failed save, or a link
        return True

    def _finish(self, path: AnyPath, response: Any, progress: dict[str, Any]) -> None:
        """Write the manifest and delete old checkpoints, unless another run has started here."""
        workdir = self._workdir
        try:
            response.result()
            if not is_first():  # which does the rest
                return
            _try(workdir.push_files)
            retry(workdir.store, workdir.check_token)
            content = self._config, self._tokenizer, {"progress": progress}
            retry(path, lambda: write_manifest(path, *content))
            _try(lambda: self._delete_old(progress["best_step"]))
            _try(workdir.push_checkpoints)
        except WorkdirTaken:
            pass  # the next save raises it in all processes
        except Exception as error:
            self._discard(path, error)

    def _delete_old(self, best_step: int | None) -> None:
        self._workdir.check_token()
        steps = self.steps()[::-1]
        for old in {*steps} - kept(self.folder, steps, best_step, self._config.training):
            delete_checkpoint(self.folder / checkpoint_name(old))
        if is_model(self._model):  # the run had finished, and continues
            delete_checkpoint(self._model)

    def _discard(self, path: AnyPath, error: Exception) -> None:
        for pause in (0.0, 0.2, 2.0) if is_first() else ():
            time.sleep(pause)  # other threads of Orbax can still write
            retry(path, lambda: remove_folder(path))
        self.failure = one_line(error)
        log.error(
            "Checkpoint %d could not be saved: %s (in %s).", int(path.name), self.failure, path
        )


def _try(work: Callable[[], None]) -> None:
    """Delete old checkpoints or copy to the store. If that fails, log a warning and continue."""
    try:
        work()
    except WorkdirTaken:
        raise
    except Exception as error:  # each store raises different errors
        log.warning("%s Training continues and will retry at the next checkpoint.", error)


def _parts(state: TrainState) -> dict[str, Any]:
    """Return the parts of the state that Orbax saves."""
    rest = dict(vars(state))
    parts = {"parameters": rest.pop("parameters"), "ema": rest.pop("ema"), "rest": rest}
    return {name: part for name, part in parts.items() if part is not None}
