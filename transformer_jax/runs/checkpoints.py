"""The checkpoints of a run: saving in the background with Orbax, retention, and restoring.

``checkpoint_folder.py`` describes the format.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from transformer_jax.devices.distributed import broadcast_from_first, is_first
from transformer_jax.errors import UserError, one_line
from transformer_jax.runs import averaging
from transformer_jax.runs.checkpoint_folder import checkpoint_name, complete_steps, load_state
from transformer_jax.runs.manifest import Manifest, delete_complete, write_manifest
from transformer_jax.runs.progress import Progress
from transformer_jax.settings.config import Config
from transformer_jax.storage.files import MANIFEST, MODEL, AnyPath, remove_folder, retry
from transformer_jax.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

State = TypeVar("State")
"""Training state: a dataclass of arrays with fields ``step``, ``parameters`` and ``ema``."""

_TIMEOUT_SECONDS = 600  # for other processes to write their shards of a checkpoint


class WorkdirTaken(UserError):
    """Another run has started in the work directory. This run must not change it any more."""


class Owner(Protocol):
    """The work directory that checkpoints belong to (``workdir.py``)."""

    folder: Path
    config: Config
    tokenizer: Tokenizer

    def check_claim(self) -> None:
        """Raise ``WorkdirTaken`` if another run has started in the work directory."""

    def push_files(self) -> None:
        """Copy all files but checkpoints to the object store, if there is one."""

    def push_checkpoints(self) -> None:
        """Copy the checkpoints to the object store, unless Orbax writes them there."""


class Checkpoints:
    """Checkpoints of a work directory."""

    def __init__(self, owner: Owner, folder: AnyPath):
        self.folder = folder
        self.failure = ""  # error of the last save
        self._owner = owner
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, oldest first."""
        return retry(self.folder, lambda: complete_steps(self.folder))

    def newest(self) -> Manifest | None:
        """Return the manifest of the newest intact checkpoint, or None if there are no checkpoints.

        Raises ``UserError`` if all are corrupt.
        """
        steps = complete_steps(self.folder)
        for step in reversed(steps):
            manifest = Manifest(self.path(step))
            if not (reason := manifest.corruption()):
                return manifest
            logger.warning(
                "Checkpoint %s is corrupt (%s); trying the previous checkpoint.",
                manifest.folder,
                reason,
            )
        if steps:
            raise UserError(
                f"All {len(steps)} checkpoints in {self.folder} are corrupt. Restore one from a "
                "backup, or start over in another --workdir."
            )
        return None

    def path(self, step: int) -> AnyPath:
        """Return the folder of a step's checkpoint."""
        return self.folder / checkpoint_name(step)

    def save(self, state: Any, progress: Progress) -> None:
        """Start saving a checkpoint, and return once the state is copied.

        A step that is already complete is not saved again. If saving fails, the error is logged and
        older checkpoints are kept; if no checkpoint exists, the next save raises ``UserError``.
        After a save, older checkpoints are deleted (see ``averaging.retained_steps``).
        """
        from orbax.checkpoint import v1 as ocp  # slow to import, and models do not need it

        self.wait()
        path = self.path(int(state.step))
        if not broadcast_from_first(lambda: retry(self.folder, lambda: self._prepare_folder(path))):
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
            values = dataclasses.asdict(progress)
            self._pending = self._worker.submit(self._finish, path, response, values)

    def wait(self) -> None:
        """Wait for the save in progress, if any."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def has_complete(self, step: int) -> bool:
        """Wait for the save in progress. Returns True if this step has a complete checkpoint."""
        self.wait()

        def is_complete() -> bool:
            self._owner.check_claim()
            return step in self.steps()

        return broadcast_from_first(is_complete)

    def restore(self, checkpoint: Manifest, abstract_state: State) -> tuple[State, Progress]:
        """Restore a checkpoint with the same shardings as ``abstract_state``."""
        parts = load_state(checkpoint, _parts(abstract_state))
        fields = {"parameters": parts["parameters"], "ema": parts.get("ema"), **parts["rest"]}
        state = dataclasses.replace(abstract_state, **fields)  # type: ignore[type-var]
        name = str(checkpoint.folder / MANIFEST)
        return state, Progress.parse(checkpoint.content.get("progress"), name)

    def _prepare_folder(self, path: AnyPath) -> bool:
        """Prepare for saving to ``path``. Returns False if it is already a complete checkpoint."""
        steps = self.steps()
        if self.failure and not steps:
            raise UserError(
                f"The first checkpoint could not be saved in {self.folder}: {self.failure}. "
                "Stopping because there is no checkpoint to resume from. Free disk space "
                "and run the same command again to start from scratch."
            )
        self._owner.check_claim()
        if int(path.name) in steps:
            return False
        remove_folder(path)  # left by a failed save, or a link
        return True

    def _finish(self, path: AnyPath, response: Any, progress: dict[str, Any]) -> None:
        """Write the manifest and delete old checkpoints, unless another run has started here."""
        owner = self._owner
        try:
            response.result()
            if not is_first():  # process 0 does the rest
                return
            _warn_on_failure(owner.push_files)
            owner.check_claim()
            extra_fields = {"progress": progress}
            retry(path, lambda: write_manifest(path, owner.config, owner.tokenizer, extra_fields))
            _warn_on_failure(lambda: self._delete_old(progress["best_step"]))
            _warn_on_failure(owner.push_checkpoints)
        except WorkdirTaken:
            pass  # the next save raises it in all processes
        except Exception as error:
            self._discard(path, error)

    def _delete_old(self, best_step: int | None) -> None:
        """Delete checkpoints that are not kept, and the finished model of a run that continues."""
        self._owner.check_claim()
        steps = self.steps()[::-1]
        steps_to_keep = averaging.retained_steps(
            self.folder, steps, best_step, self._owner.config.training
        )
        for step in steps:
            if step not in steps_to_keep:
                delete_complete(self.path(step))
        model = self._owner.folder / MODEL
        if Manifest(model).is_model:
            delete_complete(model)

    def _discard(self, path: AnyPath, error: Exception) -> None:
        for seconds in (0.0, 0.2, 2.0) if is_first() else ():
            time.sleep(seconds)  # other threads of Orbax can still write
            retry(path, lambda: remove_folder(path))
        self.failure = one_line(error)
        logger.error(
            "Checkpoint %d could not be saved: %s (in %s).", int(path.name), self.failure, path
        )


def _warn_on_failure(operation: Callable[[], None]) -> None:
    """Run ``operation``. If it fails, log a warning, because the next checkpoint tries again.

    Raises ``WorkdirTaken``.
    """
    try:
        operation()
    except WorkdirTaken:
        raise
    except Exception as error:  # each store raises different errors
        reason = str(error) if isinstance(error, UserError) else one_line(error)
        message = "%s. Training continues and will retry at the next checkpoint."
        logger.warning(message, reason.rstrip("."))


def _parts(state: Any) -> dict[str, Any]:
    """Return the parts of the state that Orbax saves."""
    rest = dict(vars(state))
    parts = {"parameters": rest.pop("parameters"), "rest": rest}
    ema = rest.pop("ema")
    return parts if ema is None else parts | {"ema": ema}
