"""Work directory of a run: location, ownership, and checks before resuming."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax

from transformer_jax.data.corpus import TEMPORARY
from transformer_jax.errors import UserError, one_line
from transformer_jax.runs.checkpoint import (
    PARAMETERS,
    checkpoint_name,
    complete_steps,
    config_of,
    delete_checkpoint,
    newest_intact,
)
from transformer_jax.runs.model_folder import is_model
from transformer_jax.runs.remote_workdir import (
    cached_folder,
    mirror_checkpoints,
    mirror_files,
    mirror_folder,
)
from transformer_jax.settings.changes import (
    Difference,
    differences_on_resume,
    fields_that_differ,
)
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import from_json, to_json
from transformer_jax.storage.files import (
    MODEL,
    AnyPath,
    check_processes,
    files_in,
    is_copied,
    is_url,
    kind_of,
    local_path,
    locked,
    remote_path,
    remove_folder,
    retry,
    write_atomically,
)

log = logging.getLogger(__name__)

_TOKEN = ".token"
_TOKEN_SECONDS = 60.0  # on a network file system, new files can appear late


class WorkdirTaken(UserError):
    """Another run has started in the work directory. This run must not change it any more."""


class Workdir:
    """Work directory of a run.

    Attributes:
      store: the folder or URL that ``--workdir`` names.
      folder: the local folder; for a URL, a local mirror.
      checkpoints: folder that Orbax writes to: in ``store`` if possible, otherwise in ``folder``,
        from which checkpoints are copied to ``store``.
      token: random string that process 0 writes there. Another run that starts there replaces it.
    """

    def __init__(self, name: str | Path):
        url = str(name).rstrip("/") if is_url(str(name)) else ""
        check_processes(url, several=jax.process_count() > 1)
        self.store: AnyPath
        if url:
            self.folder, self.store = cached_folder(url, "train"), remote_path(url)
        else:  # resolved, because a link can be changed during the run
            self.folder = self.store = Path(os.path.realpath(local_path(name)))
            _check_name(self.folder)
        root: AnyPath = self.folder if is_copied(url) else self.store
        self.checkpoints, self.token = root / "checkpoints", ""

    def claim(self) -> None:
        """Write a new token, so runs elsewhere that use the work directory stop."""
        self.token = secrets.token_hex()
        try:
            for place in (self.store, self.folder):
                (place / _TOKEN).write_text(self.token)
        except Exception as error:  # each store raises different errors
            raise UserError(f"{self.store} cannot be written: {one_line(error)}") from error

    def wait_for_token(self) -> None:
        """Wait for process 0's token. Raises ``UserError`` if it does not appear."""
        end = time.monotonic() + _TOKEN_SECONDS
        while _token(self.store) != self.token:
            if time.monotonic() > end:
                raise UserError(
                    f"{self.store} is not shared by all processes: process 0's file "
                    f"{_TOKEN} did not appear within {_TOKEN_SECONDS:.0f} s; choose a "
                    "shared folder or a gs:// URL."
                )
            time.sleep(0.2)

    def check_token(self) -> None:
        """Raise ``WorkdirTaken`` if another run has started in the same work directory."""
        if _token(self.store) != self.token:
            raise WorkdirTaken(
                f"Stopping because another run has started in {self.store}. Restart this run with "
                "a different --workdir."
            )

    def pull(self) -> None:
        """Mirror the URL to the local folder, unless this machine was the last to write to the URL.

        In that case, the local folder can hold files that could not be copied.
        """
        if self.folder is self.store or _token(self.store) == (_token(self.folder) or None):
            return
        mirror_files(self.store, self.folder)
        if isinstance(self.checkpoints, Path):
            mirror_checkpoints(self.store / "checkpoints", self.checkpoints)

    def push_files(self) -> None:
        """Mirror the local folder to the URL, except for checkpoints."""
        self._push(mirror_files, self.folder, self.store)

    def push_checkpoints(self) -> None:
        """Mirror the local checkpoints to the URL, unless Orbax writes them there directly.

        Call ``push_files`` first: a resumed run drops log entries after its checkpoint.
        """
        self._push(mirror_checkpoints, self.checkpoints, self.store / "checkpoints")

    def push_corpus(self, fingerprint: str) -> None:
        """Copy a corpus to the URL if several processes need it and it is not there yet."""
        source, target = (place / "corpus" / fingerprint for place in (self.folder, self.store))
        if jax.process_count() > 1:
            self._push(mirror_folder, source, target)

    def _push(self, mirror: Callable[..., None], source: AnyPath, target: AnyPath) -> None:
        if source == target:
            return
        self.check_token()
        try:
            mirror(source, target, check=partial(retry, self.store, self.check_token))
        except WorkdirTaken:
            raise
        except Exception as error:
            raise UserError(
                f"{source} could not be copied to {target}: {one_line(error)}. Nothing is lost: "
                "run the same command on this machine to continue."
            ) from error


def _check_name(folder: Path) -> None:
    """Raise ``UserError`` for a name that Orbax does not accept."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"--workdir is {str(folder)!r}, which contains characters outside this locale's "
            "encoding; set PYTHONUTF8=1 in the environment, or choose an ASCII name."
        ) from None


def _token(place: AnyPath) -> str:
    """Return the token of a work directory, or '' if it is missing."""
    path = place / _TOKEN
    try:
        if not isinstance(path, Path):
            path.fs.invalidate_cache()
        return path.read_text()
    except FileNotFoundError:
        return ""
    except Exception as error:
        raise UserError(f"{place} cannot be read: {one_line(error)}") from error


@contextmanager
def open_run_dir(
    workdir: Workdir, config: Config, *, allow_changes: bool = False
) -> Iterator[int | None]:
    """Claim and lock ``workdir`` for a run with this config until the context exits.

    Yields the step of the newest intact checkpoint, or None. Deletes newer and incomplete
    checkpoints. With ``allow_changes``, the run can resume with different values of ``changeable``
    settings. A folder without a checkpoint is reused, with its corpora.

    Raises:
      UserError: the folder is in use by another run, holds a run with another config or a finished
        model without checkpoints, is a model folder or is not a work directory. Its contents are
        unchanged.
    """
    workdir.folder.mkdir(parents=True, exist_ok=True)
    _check_owner(workdir)
    store = str(workdir.store)
    busy = f"Another run is using {store!r}; wait for it to finish or choose another --workdir."
    with locked(workdir.folder / ".lock", busy):
        workdir.pull()
        newest = newest_intact(workdir.checkpoints)
        if newest is not None:
            # the checkpoint's own config, because config.json can have been edited
            theirs = config_of(workdir.checkpoints / checkpoint_name(newest))
            differences = differences_on_resume(theirs, config)
            _check_changes(store, differences, allow_changes=allow_changes)
        elif is_model(workdir.folder / MODEL):
            raise UserError(
                f"{store!r} has a finished model, but no checkpoint to resume from. To continue "
                f"from the model, pass --training.start-from {store} and another --workdir; to "
                f"train from scratch, choose another --workdir or delete {store}/{MODEL}."
            )
        before = _token(workdir.folder)
        workdir.claim()  # before anything is deleted
        if newest is None:
            write_atomically(workdir.folder / "config.json", to_json(config))
        _delete_leftovers(workdir, newest, before)
        yield newest


def _check_owner(workdir: Workdir) -> None:
    """Raise ``UserError`` if another program wrote the files in the work directory."""
    store = workdir.store
    if kind_of(store / PARAMETERS) or 0 in complete_steps(workdir.checkpoints):
        raise UserError(
            f"{str(store)!r} is a finished or imported model, which training does not modify. To "
            f"fine-tune it, pass --training.start-from {store} and another --workdir."
        )
    path = store / "config.json"
    if kind_of(path):
        try:
            from_json(path.read_bytes())
        except UserError as error:
            if newest_intact(workdir.checkpoints) is None:
                raise UserError(f"{str(path)!r}: {error}") from None
        return
    names = os.listdir(store) if isinstance(store, Path) else files_in(store)
    if any(name[0] != "." and name.partition("/")[0] != "corpus" for name in names):
        raise UserError(
            f"{str(store)!r} is not empty but has no config.json; expected a new folder or a "
            "work directory."
        )


def _delete_leftovers(workdir: Workdir, newest: int | None, token: str) -> None:
    """Delete checkpoints that are incomplete or newer than ``newest``, and unfinished corpora.

    ``token`` is the previous run's. Work directories can share a ``corpus`` folder, so unfinished
    corpora of other runs are kept.
    """
    if token:
        for path in (workdir.folder / "corpus").glob(f"{TEMPORARY}{token}*"):
            remove_folder(path)
    checkpoints = workdir.checkpoints
    kept = [step for step in complete_steps(checkpoints) if step <= (newest or 0)]
    names = {name.partition("/")[0] for name in files_in(checkpoints)}
    for name in names.difference(map(checkpoint_name, kept)):
        if name.isdecimal() and name == checkpoint_name(int(name)):  # others are not checkpoints
            if int(name) > max(kept, default=0):
                log.warning("Deleting %s, which is incomplete or corrupt.", checkpoints / name)
            delete_checkpoint(checkpoints / name)


def _check_changes(workdir: str, differences: list[Difference], *, allow_changes: bool) -> None:
    """Raise ``UserError`` unless the run can resume with these changed settings."""
    if not differences:
        return
    fields = fields_that_differ(differences)
    changeable = all(each.changeable for each in differences)
    if not (changeable and allow_changes):
        flag = ", or --allow-changes" if changeable else ""
        raise UserError(
            f"{workdir!r} contains a run with a different config. Use another --workdir or "
            f"the same settings{flag}. {fields}"
        )
    log.warning("Resuming the run with different settings. %s", fields)
