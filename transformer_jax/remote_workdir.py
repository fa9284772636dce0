"""A work directory in an object store: a folder on this machine that is kept in step with it.

fsspec reads and writes the store, so any URL will do that it knows: s3://, gs://, az:// and others.
Training and decoding work in the folder. A checkpoint is copied when it is complete, its manifest
last, so that in the store, too, a folder without one is no checkpoint. Tokenised corpora stay on
the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from transformer_jax.checkpoint_files import (
    MANIFEST,
    DamagedError,
    checkpoint_name,
    complete_steps,
    steps_of,
    verify,
)
from transformer_jax.errors import UserError
from transformer_jax.storage import is_stored, is_url, store_of

log = logging.getLogger(__name__)

_STAY_HERE = ("checkpoints", "corpus")  # the first has rules of its own


def require_folder(name: str, flag: str = "workdir") -> Path:
    """The path of a folder, given by ``flag``, that cannot be a URL."""
    if is_url(name):
        raise UserError(
            f"{flag} is {name!r}; expected a folder: only train.py, and what reads a finished run, take URLs."
        )
    return Path(name)


def local_workdir(workdir: str | Path) -> Path:
    """A work directory, or one checkpoint of it, to read from: the path itself, or a copy of what a
    URL holds now.
    """
    if not is_url(str(workdir)):
        return Path(workdir).absolute()
    remote = RemoteWorkdir(str(workdir), purpose="read")
    remote.folder.mkdir(parents=True, exist_ok=True)
    with remote.folder.with_suffix(".lock").open("wb") as file:
        with suppress(OSError):  # a file system without locks
            # waits for others on this machine who read the same URL
            fcntl.flock(file, fcntl.LOCK_EX)
        found = remote.pull(may_be_ahead=False)
    if not found:
        raise UserError(
            f"{str(workdir)!r} holds no config.json; expected a work directory written by train.py --workdir."
        )
    return remote.folder


class RemoteWorkdir:
    """A URL and its folder.

    Attributes:
      folder: where the work directory is on this machine, under $XDG_CACHE_HOME (~/.cache); the
        same for the same URL.
    """

    def __init__(self, url: str, *, purpose: str = "train"):
        """``purpose`` keeps apart who must not disturb each other: a run, and those who read what
        it saved.
        """
        self.url = url.rstrip("/")
        self._store, self._root = store_of(self.url)
        if self.url.startswith(("file:", "local:")):
            raise UserError(
                f"workdir is {url!r}, which is on this machine; expected its path, {self._root!r}."
            )
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = f"{purpose}-{hashlib.sha256(self.url.encode()).hexdigest()[:16]}"
        self.folder = cache / "transformer_jax" / "workdirs" / name
        # size and time of small files as they are in the store
        self._sent: dict[str, tuple[int, int]] = {}

    def pull(self, *, may_be_ahead: bool = True) -> bool:
        """Make the folder what the URL holds, corpora aside; False if that is nothing.

        A folder that ``may_be_ahead``, because its last checkpoint could not be copied, then stays
        as it is. ``UserError`` if it holds another run, which nothing may overwrite, nor be
        overwritten by.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._store.invalidate_cache()  # others may have written since fsspec looked
        if not is_stored(self._store, f"{self._root}/config.json"):
            for entry in self.folder.iterdir():
                if entry.name != "corpus" and not entry.name.startswith("."):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            return False
        checkpoints = self.folder / "checkpoints"
        there, here = self._steps_there(), self._steps_here()
        if may_be_ahead and here and here[-1] > max(there, default=-1):
            if there and not any(step in there and self._same_manifest(step) for step in here):
                raise UserError(
                    f"{self.folder} and {self.url} have no checkpoint in common: the folder's last is of step {here[-1]}, the "
                    f"URL's of step {there[-1]}. Delete the folder to go on from what the URL holds, or the URL's checkpoints "
                    "to go on from the folder."
                )
            log.warning(
                "%s is ahead of %s, at step %d: going on from there.",
                self.folder,
                self.url,
                here[-1],
            )
            return True
        for step in here:
            if step not in there or not self._same_manifest(step) or not self._is_whole(step):
                gone = checkpoints / checkpoint_name(step)
                (gone / MANIFEST).unlink()  # from now on no checkpoint, however far deleting gets
                shutil.rmtree(gone, ignore_errors=True)
        for step in set(there) - set(self._steps_here()):
            try:
                self._get_checkpoint(step)
            except FileNotFoundError:  # the run has deleted it meanwhile
                shutil.rmtree(checkpoints / checkpoint_name(step), ignore_errors=True)
        prefix = f"{self._root}/"
        names = [path.removeprefix(prefix) for path in self._store.find(self._root)]
        for name in set(self._small_files()).difference(names):
            (self.folder / name).unlink()
        for name in names:
            if name.split("/")[0] not in _STAY_HERE:
                self._get(name)
        return True

    def push(self) -> None:
        """Bring the store up to the folder: new checkpoints, changed files; checkpoints that are
        gone here go there.
        """
        self._store.invalidate_cache()
        there, here = self._steps_there(), self._steps_here()
        for step in here:
            if step in there and self._same_manifest(step):
                continue
            folder = f"checkpoints/{checkpoint_name(step)}"
            # another one, or what a copy that was cut short left
            if self._store.exists(f"{self._root}/{folder}"):
                self._store.rm(f"{self._root}/{folder}", recursive=True)
            names = [
                str(path.relative_to(self.folder))
                for path in (self.folder / folder).rglob("*")
                if path.is_file()
            ]
            for name in sorted(names, key=lambda name: (Path(name).name == MANIFEST, name)):
                self._put(name)
        for name in self._small_files():
            stat = (self.folder / name).stat()
            state = stat.st_size, stat.st_mtime_ns
            if self._sent.get(name) != state:
                self._put(name)
                self._sent[name] = state
        # of a first attempt, perhaps with another number
        for path in self._store.glob(f"{self._root}/tokenizer*.model"):
            if not (self.folder / path.rpartition("/")[2]).exists():
                self._store.rm(path)
        for step in set(there) - set(here):
            self._store.rm(f"{self._root}/checkpoints/{checkpoint_name(step)}/{MANIFEST}")
            self._store.rm(f"{self._root}/checkpoints/{checkpoint_name(step)}", recursive=True)

    def _small_files(self) -> list[str]:
        """What is here beside checkpoints and corpora, hidden files aside."""
        files = (
            path
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and not path.name.startswith(".")
        )
        names = (str(path.relative_to(self.folder)) for path in files)
        return [name for name in names if name.split("/")[0] not in _STAY_HERE]

    def _steps_there(self) -> list[int]:
        return steps_of(self._store.glob(f"{self._root}/checkpoints/*/{MANIFEST}"))

    def _steps_here(self) -> list[int]:
        return complete_steps(self.folder / "checkpoints")

    def _same_manifest(self, step: int) -> bool:
        name = f"checkpoints/{checkpoint_name(step)}/{MANIFEST}"
        return self._store.cat_file(f"{self._root}/{name}") == (self.folder / name).read_bytes()

    def _is_whole(self, step: int) -> bool:
        try:
            verify(self.folder / "checkpoints" / checkpoint_name(step))
        except DamagedError:
            return False
        return True

    def _get_checkpoint(self, step: int) -> None:
        prefix = f"{self._root}/"
        names = [
            path.removeprefix(prefix)
            for path in self._store.find(f"{self._root}/checkpoints/{checkpoint_name(step)}")
        ]
        for name in sorted(names, key=lambda name: (name.endswith(f"/{MANIFEST}"), name)):
            self._get(name)

    def _get(self, name: str) -> None:
        """Another process may be reading the file that this replaces."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._store.get_file(f"{self._root}/{name}", str(temporary))
        temporary.replace(path)

    def _put(self, name: str) -> None:
        self._store.put_file(str(self.folder / name), f"{self._root}/{name}")
