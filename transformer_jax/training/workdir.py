"""Work directory of a run: location, ownership, and checks before resuming."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax

from transformer_jax.data.corpus import TEMPORARY
from transformer_jax.devices.distributed import broadcast_from_first, raise_on_any_process
from transformer_jax.errors import UserError, one_line
from transformer_jax.saved_models.checkpoint import (
    PARAMETERS,
    checkpoint_name,
    complete_steps,
    config_of,
    delete_checkpoint,
    newest_intact,
)
from transformer_jax.saved_models.remote_workdir import (
    cached_folder,
    mirror_checkpoints,
    mirror_files,
)
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import load_config_file, to_json
from transformer_jax.storage.files import (
    AnyPath,
    files_in,
    is_url,
    kind_of,
    local_path,
    locked,
    remote_path,
    remove_folder,
    write_atomically,
)
from transformer_jax.training.resuming import (
    Difference,
    differences_on_resume,
    fields_that_differ,
)

log = logging.getLogger(__name__)

_TOKEN = ".token"
_TOKEN_SECONDS = 60.0  # on a network file system, new files can appear late


class Workdir:
    """Work directory of a run.

    Attributes:
      store: the folder or URL that ``--workdir`` names.
      folder: the local folder; for a URL, a local mirror.
      checkpoints: folder that Orbax writes to: in ``store`` if possible, otherwise in ``folder``,
        from which checkpoints are copied to ``store``.
    """

    def __init__(self, name: str | Path):
        url = str(name).rstrip("/") if is_url(str(name)) else ""
        self.store: AnyPath
        if url:
            self.folder, self.store = cached_folder(url, "train"), remote_path(url)
        else:  # resolved, because a link can be changed during the run
            self.folder = self.store = Path(os.path.realpath(local_path(name)))
            _check_name(self.folder)
        self._copies_checkpoints = bool(url) and not url.startswith("gs://")
        if self._copies_checkpoints and jax.process_count() > 1:
            raise UserError(
                f"--workdir is {url!r}, which does not work with {jax.process_count()} processes; "
                "use a gs:// URL or a folder that all processes share."
            )
        root: AnyPath = self.folder if self._copies_checkpoints else self.store
        self.checkpoints, self._token = root / "checkpoints", ""

    def check_shared_folder(self) -> None:
        """Write a token to check that all processes share the work directory.

        Another run that starts there replaces the token.
        """

        def write() -> str:
            token = secrets.token_hex()
            try:
                for place in (self.store, self.folder):
                    (place / _TOKEN).write_text(token)
            except Exception as error:  # each store raises different errors
                raise UserError(f"{self.store} cannot be written: {one_line(error)}") from error
            return token

        self._token = broadcast_from_first(write)
        with raise_on_any_process():
            end = time.monotonic() + _TOKEN_SECONDS
            while _token(self.store) != self._token:
                if time.monotonic() > end:
                    raise UserError(
                        f"{self.store} is not shared by all processes: process 0's file "
                        f"{_TOKEN} did not appear within {_TOKEN_SECONDS:.0f} s; choose a "
                        "shared folder or a gs:// URL."
                    )
                time.sleep(0.2)

    def check_token(self) -> None:
        """Raise ``UserError`` if another run has started in the same work directory."""
        if _token(self.store) != self._token:
            raise UserError(
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
        if self._copies_checkpoints:
            mirror_checkpoints(self.store / "checkpoints", self.checkpoints)

    def push_files(self) -> None:
        """Mirror the local folder to the URL, except for checkpoints."""
        if self.folder is not self.store:
            self._push(mirror_files, self.folder, self.store)

    def push_checkpoints(self) -> None:
        """Mirror the local checkpoints to the URL, unless Orbax writes them there directly.

        Call ``push_files`` first: a resumed run drops log entries after its checkpoint.
        """
        if self._copies_checkpoints:
            self._push(mirror_checkpoints, self.checkpoints, self.store / "checkpoints")

    def _push(
        self, mirror: Callable[[AnyPath, AnyPath], None], source: AnyPath, target: AnyPath
    ) -> None:
        self.check_token()
        try:
            mirror(source, target)
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
      UserError: the folder is in use by another run, holds a run with another config, is a model
        folder or is not a work directory. Its contents are unchanged.
    """
    folder = workdir.folder
    folder.mkdir(parents=True, exist_ok=True)
    others = [e for e in folder.iterdir() if not e.name.startswith(".") and e.name != "corpus"]
    if others and folder is workdir.store and not (folder / "config.json").exists():
        raise UserError(
            f"{str(folder)!r} is not empty but has no config.json; expected a new folder or a "
            "work directory."
        )
    if kind_of(workdir.store / PARAMETERS) or 0 in complete_steps(workdir.checkpoints):
        raise UserError(
            f"{str(workdir.store)!r} is a finished or imported model, which training does not "
            f"modify. To fine-tune it, pass --training.start-from {workdir.store} and another "
            "--workdir."
        )
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / ".lock"))
        except BlockingIOError:
            raise UserError(
                f"Another run is using {str(workdir.store)!r}; wait for it to finish or choose "
                "another --workdir."
            ) from None
        for left in (folder / "corpus").glob(f"{TEMPORARY}*"):  # by a killed process
            remove_folder(left)
        workdir.pull()
        steps = complete_steps(workdir.checkpoints)
        newest = newest_intact(workdir.checkpoints)
        if newest is None:
            if (path := folder / "config.json").exists():
                load_config_file(path)  # raises an error if another program wrote it
            write_atomically(path, to_json(config))
        else:
            # the checkpoint's own config, because config.json can have been edited
            theirs = config_of(workdir.checkpoints / checkpoint_name(newest))
            differences = differences_on_resume(theirs, config)
            _check_changes(workdir.store, differences, allow_changes=allow_changes)
        _delete_other_checkpoints(workdir.checkpoints, [s for s in steps if s <= (newest or 0)])
        yield newest


def _delete_other_checkpoints(folder: AnyPath, kept: list[int]) -> None:
    names = {name.partition("/")[0] for name in files_in(folder)}
    for name in names.difference(map(checkpoint_name, kept)):
        if name.isdigit():  # other names are not checkpoints
            if int(name) > max(kept, default=0):
                log.warning("Deleting %s, which is incomplete or corrupt.", folder / name)
            delete_checkpoint(folder / name)


def _check_changes(workdir: AnyPath, differences: list[Difference], *, allow_changes: bool) -> None:
    """Raise ``UserError`` unless the run can resume with these changed settings."""
    if not differences:
        return
    fields = fields_that_differ(differences)
    changeable = all(each.changeable for each in differences)
    if not (changeable and allow_changes):
        flag = ", or --allow-changes" if changeable else ""
        raise UserError(
            f"{str(workdir)!r} contains a run with a different config. Use another --workdir or "
            f"the same settings{flag}. {fields}"
        )
    log.warning("Resuming the run with different settings. %s", fields)
