"""A work directory in an object store, mirrored in a folder on this machine.

fsspec reads and writes the store, so any URL works that it knows: s3://, gs://, az:// and others.
Training and decoding use the folder. A checkpoint is copied once it is complete, its manifest last,
so that in the store, too, a folder without a manifest is no checkpoint. Tokenised corpora are not
copied.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from transformer_jax.checkpoint import (
    MANIFEST,
    checkpoint_name,
    complete_steps,
    damage,
    delete_checkpoint,
)
from transformer_jax.errors import UserError
from transformer_jax.storage import cache_folder, is_url, kind_of, local_path, locked, remote_path

log = logging.getLogger(__name__)


def local_workdir(workdir: str | Path) -> Path:
    """A work directory, or one checkpoint of it, to read from; a URL is copied to this machine."""
    if not is_url(str(workdir)):
        return local_path(workdir)
    remote = RemoteWorkdir(str(workdir), purpose="read")
    # Readers of the same URL on this machine share the folder and take turns.
    with locked(remote.folder.with_suffix(".lock"), wait=True):
        if not remote.pull(may_be_ahead=False):
            raise UserError(
                f"{str(workdir)!r} holds no config.json; expected a work directory written by "
                "train.py --workdir."
            )
    return remote.folder


class RemoteWorkdir:
    """A URL and the folder that mirrors it.

    Attributes:
      folder: the work directory on this machine, under $XDG_CACHE_HOME (~/.cache); the same for the
        same URL and purpose. It is made if it does not exist.
    """

    def __init__(self, url: str, *, purpose: str = "train"):
        """``purpose`` gives a training run and the readers of its results separate folders."""
        self.url = url.rstrip("/")
        self._remote = remote_path(self.url)
        self._store, self._root = self._remote.fs, self._remote.path
        if self.url.startswith(("file:", "local:")):
            raise UserError(
                f"workdir is {url!r}, which is on this machine; expected its path, {self._root!r}."
            )
        name = f"{purpose}-{hashlib.sha256(self.url.encode()).hexdigest()[:16]}"
        self.folder = cache_folder() / "workdirs" / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of small files, as pushed

    def pull(self, *, may_be_ahead: bool = True) -> bool:
        """Make the folder what the URL holds, except corpora; False if the URL holds no run.

        If it ``may_be_ahead``, a folder whose last checkpoint could not be pushed stays as it is.

        Raises:
          UserError: the folder is ahead, but of another run; nothing is overwritten on either side.
        """
        self._store.invalidate_cache()  # others may have written since fsspec looked
        if kind_of(self._remote / "config.json") != "file":
            for entry in self.folder.iterdir():
                if entry.name != "corpus" and not entry.name.startswith("."):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            return False
        there, here, same = self._steps()
        if may_be_ahead and here and here[-1] > max(there, default=-1):
            if there and not same:
                raise UserError(
                    f"{self.folder} and {self.url} have no checkpoint in common: the folder's last "
                    f"is of step {here[-1]}, the URL's of step {there[-1]}. Delete the folder to "
                    "continue the URL's run, or the URL's checkpoints to continue the folder's."
                )
            log.warning(
                "%s is ahead of %s; continuing from its step %d.", self.folder, self.url, here[-1]
            )
            return True
        for step in here:
            if step not in same or damage(self.folder / _checkpoint(step)):
                delete_checkpoint(self.folder / _checkpoint(step))
        for step in set(there).difference(self._steps_here()):
            try:
                self._get(self._files_there(_checkpoint(step)))
            except FileNotFoundError:  # the run has deleted it meanwhile
                shutil.rmtree(self.folder / _checkpoint(step), ignore_errors=True)
        names = _small_files(self._files_there())
        for name in set(_small_files(self._files_here())).difference(names):
            (self.folder / name).unlink()
        self._get(names)
        return True

    def push(self) -> None:
        """Copy new checkpoints and changed files to the URL, and delete there the checkpoints that
        were deleted here.

        Raises:
          UserError: the store cannot be written; the folder still has everything.
        """
        try:
            self._store.invalidate_cache()
            there, here, same = self._steps()
            for step in sorted(set(here).difference(same)):
                # a checkpoint of another run, or what an interrupted push left
                self._remove(_checkpoint(step))
                for name in _manifest_last(self._files_here(_checkpoint(step))):
                    self._put(name)
            for name in _small_files(self._files_here()):
                stat = (self.folder / name).stat()
                state = stat.st_size, stat.st_mtime_ns
                if self._sent.get(name) != state:
                    self._put(name)
                    self._sent[name] = state
            for path in self._remote.glob("tokenizer*.model"):  # of an earlier attempt
                if not (self.folder / path.name).exists():
                    self._remove(path.name)
            for step in set(there).difference(here):
                self._remove(f"{_checkpoint(step)}/{MANIFEST}")
                self._remove(_checkpoint(step))
        except Exception as error:
            raise UserError(
                f"{self.folder} could not be copied to {self.url}: {' '.join(str(error).split())}. "
                "Nothing is lost: the same command on this machine continues from there."
            ) from error

    def _files_here(self, under: str = "") -> list[str]:
        files = sorted(path for path in (self.folder / under).rglob("*") if path.is_file())
        return [path.relative_to(self.folder).as_posix() for path in files]

    def _files_there(self, under: str = "") -> list[str]:
        prefix = f"{self._root}/"
        return [path.removeprefix(prefix) for path in self._store.find(f"{prefix}{under}")]

    def _steps_here(self) -> list[int]:
        return complete_steps(self.folder / "checkpoints")

    def _steps(self) -> tuple[list[int], list[int], list[int]]:
        """The complete checkpoints there, those here, and those that are the same."""
        there, here = complete_steps(self._remote / "checkpoints"), self._steps_here()
        return there, here, [step for step in here if step in there and self._is_same(step)]

    def _is_same(self, step: int) -> bool:
        """Whether a checkpoint is the same here and there."""
        name = f"{_checkpoint(step)}/{MANIFEST}"
        return self._store.cat_file(f"{self._root}/{name}") == (self.folder / name).read_bytes()

    def _get(self, names: Iterable[str]) -> None:
        for name in _manifest_last(names):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another process may be reading the file that this replaces.
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            self._store.get_file(f"{self._root}/{name}", str(temporary))
            temporary.replace(path)

    def _put(self, name: str) -> None:
        self._store.put_file(str(self.folder / name), f"{self._root}/{name}")

    def _remove(self, name: str) -> None:
        if self._store.exists(f"{self._root}/{name}"):
            self._store.rm(f"{self._root}/{name}", recursive=True)


def _checkpoint(step: int) -> str:
    return f"checkpoints/{checkpoint_name(step)}"


def _manifest_last(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (name.endswith(f"/{MANIFEST}"), name))


def _small_files(names: Iterable[str]) -> list[str]:
    """All files but checkpoints, corpora and hidden files."""
    return [
        name
        for name in names
        if not name.startswith(("checkpoints/", "corpus/")) and "/." not in f"/{name}"
    ]
