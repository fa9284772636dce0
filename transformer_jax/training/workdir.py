"""The work directory of a run: where it is, whose it is, and which config may resume in it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax

from transformer_jax.checkpoint import (
    checkpoint_name,
    complete_steps,
    config_of,
    delete_checkpoint,
    newest_intact,
)
from transformer_jax.config import Config
from transformer_jax.config_io import to_json
from transformer_jax.distributed import from_first, together
from transformer_jax.errors import UserError, one_line
from transformer_jax.remote_workdir import cached_folder, mirror_checkpoints, mirror_small_files
from transformer_jax.storage import (
    AnyPath,
    files_in,
    is_url,
    local_path,
    locked,
    remote_path,
    write_atomically,
)
from transformer_jax.training.resuming import (
    Difference,
    differences_on_resume,
    fields_that_differ,
)

log = logging.getLogger(__name__)

_TOKEN = ".token"
_TOKEN_SECONDS = 60.0  # a network file system may show a new file late


class Workdir:
    """The files of a run.

    Attributes:
      store: the folder or URL that ``--workdir`` names.
      folder: the same folder; of a URL the folder of this machine that mirrors it.
      checkpoints: where Orbax writes them: in ``store`` if it can, else in ``folder``, from where
        they are copied.
    """

    def __init__(self, name: str | Path):
        url = str(name).rstrip("/") if is_url(str(name)) else ""
        self.store: AnyPath
        if url:
            self.folder, self.store = cached_folder(url, "train"), remote_path(url)
        else:  # resolved, as a link may be repointed during the run
            self.folder = self.store = local_path(name).resolve()
            _check_name(self.folder)
        self._copies_checkpoints = bool(url) and not url.startswith("gs://")
        if self._copies_checkpoints and jax.process_count() > 1:
            raise UserError(
                f"workdir is {url!r} and there are {jax.process_count()} processes; expected a "
                "gs:// URL, or a folder that all of them share."
            )
        root: AnyPath = self.folder if self._copies_checkpoints else self.store
        self.checkpoints, self._token = root / "checkpoints", ""

    def share_token(self) -> None:
        """Write a token that all processes must find, as they must see the same place. Another run
        that starts there replaces it.
        """

        def write() -> str:
            token = secrets.token_hex()
            try:
                for place in (self.store, self.folder):
                    (place / _TOKEN).write_text(token)
            except Exception as error:  # each store has errors of its own
                raise UserError(f"{self.store} cannot be written: {one_line(error)}") from error
            return token

        self._token = from_first(write)
        with together():
            end = time.monotonic() + _TOKEN_SECONDS
            while _token(self.store) != self._token:
                if time.monotonic() > end:
                    raise UserError(
                        f"{self.store} is another place than in process 0, whose file {_TOKEN} did "
                        f"not appear there within {_TOKEN_SECONDS:.0f} s; expected a folder that "
                        "all processes share, or a gs:// URL."
                    )
                time.sleep(0.2)

    def check_token(self) -> None:
        """Raise ``UserError`` if another run has started in the same place."""
        if _token(self.store) != self._token:
            raise UserError(
                f"Another run has started in {self.store}; this one stops and leaves it to that."
            )

    def pull(self) -> None:
        """Make the folder of this machine what the URL holds, unless this machine was the last to
        write there: it may have files that could not be copied.
        """
        if self.folder is self.store or _token(self.store) == (_token(self.folder) or None):
            return
        mirror_small_files(self.store, self.folder)
        if self._copies_checkpoints:
            mirror_checkpoints(self.store / "checkpoints", self.checkpoints)

    def push_files(self) -> None:
        """Make the URL what the folder of this machine holds, checkpoints aside."""
        if self.folder is not self.store:
            self._push(mirror_small_files, self.folder, self.store)

    def push_checkpoints(self) -> None:
        """Make the checkpoints at the URL those of this machine, unless Orbax writes them there.

        ``push_files`` comes first: a resumed run drops log entries after its checkpoint.
        """
        if self._copies_checkpoints:
            self._push(mirror_checkpoints, self.checkpoints, self.store / "checkpoints")

    def _push(
        self, mirror: Callable[[AnyPath, AnyPath], None], source: AnyPath, target: AnyPath
    ) -> None:
        try:
            self.check_token()
            mirror(source, target)
        except Exception as error:
            raise UserError(
                f"{source} could not be copied to {target}: {one_line(error)}. Nothing is "
                "lost: the same command on this machine continues from there."
            ) from error


def _check_name(folder: Path) -> None:
    """``UserError`` for a name that Orbax cannot be given."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"workdir is {str(folder)!r}, which has letters that this locale's encoding lacks; "
            "expected PYTHONUTF8=1 in the environment, or a name in ASCII."
        ) from None


def _token(place: AnyPath) -> str:
    """The token there; empty if there is none."""
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
def claimed(
    workdir: Workdir, config: Config, *, allow_changes: bool = False
) -> Iterator[int | None]:
    """Make ``workdir`` the work directory of this config, and keep other runs on this file system
    out of it while the context lasts. Yields the step of its newest intact checkpoint; what came
    after that one, or was not saved whole, is deleted.

    With ``allow_changes`` the run in it may resume with other values of settings that are
    ``changeable``. A folder without a checkpoint is taken over, with its corpora.

    Raises:
      UserError: another run is at work in it, or it holds a run with another config, or an imported
        model; a path that is no work directory. Nothing in it was changed.
    """
    folder = workdir.folder
    folder.mkdir(parents=True, exist_ok=True)
    others = [e for e in folder.iterdir() if not e.name.startswith(".") and e.name != "corpus"]
    if others and folder is workdir.store and not (folder / "config.json").exists():
        raise UserError(
            f"{str(folder)!r} is not empty and holds no config.json; expected a new folder or a "
            "work directory."
        )
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / ".lock"))
        except BlockingIOError:
            raise UserError(
                f"Another run is at work in {str(workdir.store)!r}; wait for it or choose another "
                "--workdir."
            ) from None
        workdir.pull()
        yield _claim(workdir, config, allow_changes=allow_changes)


def _claim(workdir: Workdir, config: Config, *, allow_changes: bool) -> int | None:
    folder, steps = workdir.checkpoints, complete_steps(workdir.checkpoints)
    if 0 in steps:
        raise UserError(
            f"{str(workdir.store)!r} holds an imported model, which training does not change; "
            f"expected --training.start-from {workdir.store} and another --workdir."
        )
    newest = newest_intact(folder)
    if newest is None:
        write_config(workdir.folder, config)
    else:
        # config.json may have been edited, which changes nothing that was trained
        differences = differences_on_resume(config_of(folder / checkpoint_name(newest)), config)
        _check_changes(workdir.store, differences, allow_changes=allow_changes)
    kept = [checkpoint_name(step) for step in steps if step <= (newest or 0)]
    for name in {name.partition("/")[0] for name in files_in(folder)}.difference(kept):
        if name.isdigit():  # others are not ours
            delete_checkpoint(folder / name)
    return newest


def _check_changes(workdir: AnyPath, differences: list[Difference], *, allow_changes: bool) -> None:
    """Raise ``UserError`` unless the run may resume with these changes of its settings."""
    if not differences:
        return
    fields = fields_that_differ(differences)
    changeable = all(each.changeable for each in differences)
    if not (changeable and allow_changes):
        flag = ", or --allow-changes" if changeable else ""
        raise UserError(
            f"{str(workdir)!r} holds a run with another config; choose another --workdir, or the "
            f"same settings{flag}. {fields}"
        )
    log.warning("The run resumes with other settings. %s", fields)


def write_config(folder: Path, config: Config) -> None:
    """Replace the work directory's config."""
    write_atomically(folder / "config.json", to_json(config))
