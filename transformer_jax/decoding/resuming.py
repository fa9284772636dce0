"""An output file that an interrupted run leaves in a state from which the next one goes on.

Beside the file F stands ``F.progress.json`` while F is being written: a state and the settings that
decide F's content. How far the run came is not in it, for F itself says so: its complete sentences.
So a run may be killed at any moment:

    starting   F is not ours yet (it may be an older one, still to be emptied): begin anew writing
    keep F's complete sentences and go on complete   kept of parts of an output (``parts.py``), as
    proof that nothing is missing, and of what ``--resume`` wrote, so
               that it is not taken for the output of other settings
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import jax
import numpy as np

from transformer_jax.errors import UserError

logger = logging.getLogger(__name__)

State = Literal["starting", "writing", "complete"]


class ResumableFile:
    """A file of sentences, of one or (n-best) several lines each, open for appending.

    Attributes:
      kept: how many complete sentences it held when it was opened; as many inputs are to be passed
        over.
    """

    def __init__(
        self,
        path: str | Path,
        settings: dict[str, Any],
        *,
        nbest: int = 1,
        resume: bool = False,
        keep_progress: bool = False,
    ):
        """``settings`` (values that JSON has) must be those of the run that is resumed; without
        one, or without ``resume``, the file starts empty.

        With ``nbest`` > 1 a sentence is a group of up to so many lines that begin with the same
        number (``number ||| ...``). ``keep_progress`` leaves the progress file, marked complete, at
        the end.

        Raises:
            UserError: other settings than the interrupted run's, a file with lines that no run is
                known to have left, or one that another process is writing.
        """
        self.path, self._keep = Path(path), keep_progress
        self._progress = progress_path(path)
        self._settings = json.loads(json.dumps(settings))
        self._file: BinaryIO = open(self.path, "ab")  # noqa: SIM115 - closed by __exit__
        try:
            self._lock()
            self.kept = self._resume(nbest) if resume else 0
            if not self.kept:
                write_progress(self._progress, "starting", self._settings)
                self._file.truncate(0)
                os.fsync(self._file.fileno())
            write_progress(self._progress, "writing", self._settings)
        except BaseException:
            self._file.close()
            raise

    def write(self, lines: Sequence[str]) -> None:
        """Append one sentence's lines; they are out of this process when this returns."""
        self._file.write("".join(line + "\n" for line in lines).encode())
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close; the run is complete unless an exception ended it."""
        with self._file:
            os.fsync(self._file.fileno())
        if kind is not None:
            logger.info(
                "%s keeps what is translated; the same command with --resume goes on from there.",
                self.path,
            )
            return
        if self._keep:
            write_progress(self._progress, "complete", self._settings)
        else:
            self._progress.unlink()

    def _lock(self) -> None:
        """Until the file is closed, or this process ends."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.path} is being written by another process; wait for it, or choose another output."
            ) from None
        except OSError:  # a file system without locks
            logger.debug("%s cannot be locked.", self.path)

    def _resume(self, nbest: int) -> int:
        progress = read_progress(self.path)
        has_lines = self.path.is_file() and self.path.stat().st_size > 0
        if progress is None:
            if has_lines:
                raise UserError(
                    f"{self.path} has lines, but {self._progress.name} is not beside it: another program wrote it, or a run "
                    "without --resume was completed. Remove it, or drop --resume to write it anew."
                )
            return 0
        if progress["state"] == "starting" or not has_lines:
            return 0
        if differences := describe_differences(progress["settings"], self._settings):
            raise UserError(
                f"{self.path} was begun with other settings: {'; '.join(differences)}. "
                "Resume with the same ones, or drop --resume to write it anew."
            )
        kept, size = complete_sentences(self.path, nbest=nbest)
        os.truncate(self.path, size)
        return kept


class Stream:
    """A pipe, terminal or device as output: nothing of it can be read back.

    Attributes:
      kept: 0.
    """

    def __init__(self, file: BinaryIO):
        self.kept, self._file = 0, file

    def write(self, lines: Sequence[str]) -> None:
        """Write one sentence's lines; they are out of this process when this returns."""
        self._file.write("".join(line + "\n" for line in lines).encode())
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the stream open."""


def progress_path(path: str | Path) -> Path:
    """Where the progress of writing ``path`` is kept."""
    return Path(f"{path}.progress.json")


def read_progress(path: str | Path) -> dict[str, Any] | None:
    """``{"state": ..., "settings": ...}`` of the run that writes ``path``; None if there is
    none.
    """
    file = progress_path(path)
    if not file.is_file():
        return None
    try:
        progress = json.loads(file.read_text())
        if progress["state"] in ("starting", "writing", "complete") and isinstance(
            progress["settings"], dict
        ):
            return progress
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{file} is damaged or of another program; remove it, and {path} with it.")


def write_progress(file: Path, state: State, settings: dict[str, Any]) -> None:
    """Replace the progress file: at any moment, the old one or the new one is there, whole."""
    temporary = file.with_name(f"{file.name}.tmp")
    with open(temporary, "w") as out:
        json.dump({"state": state, "settings": settings}, out, indent=1)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)


def complete_sentences(path: str | Path, *, nbest: int = 1) -> tuple[int, int]:
    """How many sentences a file holds in full, and how many bytes they take.

    A last line without its end is not one. The last of several groups of n-best lines counts only
    with all ``nbest``
    lines: a shorter one may have been meant to be longer.
    """
    with open(path, "rb") as file:
        count = size = lines = 0
        for group in sentence_groups(
            (line for line in file if line.endswith(b"\n")), numbered=nbest > 1
        ):
            count, lines, added = count + 1, len(group), sum(map(len, group))
            size += added
        if count and nbest > 1 and lines < nbest:
            count, size = count - 1, size - added
    return count, size


def sentence_groups(file: Iterable[bytes], *, numbered: bool) -> Iterator[list[bytes]]:
    """The lines of each sentence: one, or (``numbered``) those that begin with the same ``number
    |||``.
    """
    if not numbered:
        yield from ([line] for line in file)
        return
    for _, group in groupby(file, key=lambda line: line.partition(b" |||")[0]):
        yield list(group)


def fingerprint(parameters: Any) -> str:
    """SHA-256 (hex) of a tree of arrays."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(parameters):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def describe_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """``beam_size: 4 then, 5 now`` for each setting that differs."""
    names = {**old, **new}
    return [
        f"{name}: {old.get(name)!r} then, {new.get(name)!r} now"
        for name in names
        if old.get(name) != new.get(name)
    ]
