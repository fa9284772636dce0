"""The output of decode.py: a file that can be resumed and shared in shards, or a stream.

While the file F is being written, F.progress.json beside it holds a state and the settings that
decide F's content:

    starting   F is not ours yet (it may be an older file, still to be emptied): start over
    writing    keep F's complete sentences and continue
    complete   stays beside shards, as proof that nothing is missing, and beside resumed files, so
               that they are not taken for the output of other settings

How far the run got is not in it: F's complete sentences say so. A run may be killed at any moment.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import jax
import numpy as np

from transformer_jax.errors import UserError, shown
from transformer_jax.storage import locked, replacing, write_atomically

logger = logging.getLogger(__name__)


class OutputStream:
    """Stdout, a named pipe or a device: what is written cannot be read back.

    Attributes:
      kept: how many sentences are there already: 0.
    """

    kept = 0

    def __init__(self, path: str | Path | None = None):
        """None: stdout."""
        self._name = "stdout" if path is None else str(path)
        self._file: BinaryIO = sys.stdout.buffer if path is None else open(path, "wb")  # noqa: SIM115

    def write(self, lines: Sequence[str]) -> None:
        """Write one sentence's lines; they have left this process when this returns."""
        with _write_errors(self._name):
            self._file.write("".join(line + "\n" for line in lines).encode())
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Leave the stream open."""


class OutputFile(OutputStream):
    """A file of sentences, of one or (n-best) several lines each.

    Attributes:
      kept: how many complete sentences the file had when it was resumed; skip as many inputs.
    """

    def __init__(
        self,
        path: str | Path,
        settings: dict[str, Any],
        *,
        shard: tuple[int, int] | None = None,
        lines_per_sentence: int = 1,
        resume: bool = False,
    ):
        """Start the file or, with ``resume``, continue it.

        Args:
          settings: values for JSON; must be those of the run that is resumed.
          shard: i of n; writes ``shard_path(path, shard)``.
          lines_per_sentence: above 1 a sentence is a group of up to this many lines that begin with
            the same number (``number ||| ...``).

        Raises:
            UserError: other settings than the interrupted run's, a file with lines of unknown
                origin, or one that another process is writing.
        """
        self.path = Path(path) if shard is None else shard_path(path, shard)
        self._name, self._keep_progress = str(self.path), resume or shard is not None
        settings = settings | {"shards": 1 if shard is None else shard[1]}
        self._settings = json.loads(json.dumps(settings))
        with _write_errors(self._name), ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path))
            except BlockingIOError:
                raise UserError(
                    f"{self.path} is being written by another process; wait for it, or choose "
                    "another output."
                ) from None
            self._file = stack.enter_context(open(self.path, "ab"))
            self.kept = self._resume(lines_per_sentence) if resume else 0
            if not self.kept:
                self._write_progress("starting")
                self._file.truncate(0)
                os.fsync(self._file.fileno())
            self._write_progress("writing")
            self._closing = stack.pop_all()

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the file; it is complete unless an exception ended the run."""
        if kind is not None:
            with suppress(OSError), self._closing:  # the same full disk, say
                os.fsync(self._file.fileno())
            logger.info(
                "%s keeps what is translated; the same command with --resume continues it.",
                self.path,
            )
            return
        with _write_errors(self._name), self._closing:
            os.fsync(self._file.fileno())
            if self._keep_progress:
                self._write_progress("complete")
            else:
                progress_path(self.path).unlink()

    def _write_progress(self, state: Literal["starting", "writing", "complete"]) -> None:
        progress = json.dumps({"state": state, "settings": self._settings}, indent=1)
        write_atomically(progress_path(self.path), progress + "\n")

    def _resume(self, lines_per_sentence: int) -> int:
        progress, has_lines = _read_progress(self.path), self.path.stat().st_size > 0
        if progress is None and has_lines:
            raise UserError(
                f"{self.path} has lines, but {progress_path(self.path).name} is not beside it: "
                "another program wrote it, or a run without --resume was completed. Remove it, or "
                "drop --resume to write it anew."
            )
        if progress is None or progress["state"] == "starting" or not has_lines:
            return 0
        if differences := _differences(progress["settings"], self._settings):
            raise UserError(
                f"{self.path} was begun with other settings: {differences}. Resume with the same "
                "ones, or drop --resume to write it anew."
            )
        kept, size = _complete_sentences(self.path, lines_per_sentence)
        os.truncate(self.path, size)
        return kept


def join_shards(output: str | Path) -> int:
    """Write ``output`` from its shards, as one process would have; returns the number of sentences.

    The file appears once it is complete. The shards stay.

    Raises:
        UserError: shards that are missing, incomplete, or not of one run.
    """
    output = Path(output)
    paths = _shards_of(output)
    settings = {path: _complete_settings(path) for path in paths}
    for path in paths[1:]:
        if differences := _differences(settings[paths[0]], settings[path]):
            raise UserError(
                f"{paths[0].name} and {path.name} were written with other settings: {differences}."
            )
    numbered = settings[paths[0]]["format"] == "text" and settings[paths[0]]["nbest"] > 1
    count = 0
    with _write_errors(str(output)), replacing(output) as joined:
        for sentence in _in_turn(paths, numbered=numbered):
            joined.writelines(sentence)
            count += 1
    return count


def shard_path(output: str | Path, shard: tuple[int, int]) -> Path:
    """``F.shard-0-of-4``: where shard 0 of 4 of the output F is written."""
    return Path(f"{output}.shard-{shard[0]}-of-{shard[1]}")


def progress_path(path: str | Path) -> Path:
    """Where the progress of writing ``path`` is kept."""
    return Path(f"{path}.progress.json")


def fingerprint(parameters: Any) -> str:
    """SHA-256 (hex) of a tree of arrays."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(parameters):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def sentence_groups(lines: Iterable[bytes], *, numbered: bool) -> Iterator[list[bytes]]:
    """The lines of each sentence: one, or (``numbered``) all with the same ``number |||``."""
    if not numbered:
        yield from ([line] for line in lines)
        return
    for _, group in groupby(lines, key=lambda line: line.partition(b" |||")[0]):
        yield list(group)


def _complete_sentences(path: Path, lines_per_sentence: int) -> tuple[int, int]:
    """How many sentences a file holds in full, and how many bytes they take.

    A last line without its end is not complete, nor is a last group with fewer lines than a
    sentence may have: the run may have been about to write more.
    """
    with path.open("rb") as file:
        count = size = lines = added = 0
        whole_lines = (line for line in file if line.endswith(b"\n"))
        for group in sentence_groups(whole_lines, numbered=lines_per_sentence > 1):
            count, lines, added = count + 1, len(group), sum(map(len, group))
            size += added
    return (count, size) if lines == lines_per_sentence else (max(count - 1, 0), size - added)


def _read_progress(path: Path) -> dict[str, Any] | None:
    """``{"state": ..., "settings": ...}`` of the run that writes ``path``; None without one."""
    file = progress_path(path)
    if not file.is_file():
        return None
    with suppress(ValueError, KeyError, TypeError):
        progress = json.loads(file.read_text())
        states = ("starting", "writing", "complete")
        if progress["state"] in states and isinstance(progress["settings"], dict):
            return progress
    raise UserError(f"{file} is damaged or of another program; remove it, and {path} with it.")


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """``beam_size: 4 then, 5 now; ...`` for the settings that differ."""
    return "; ".join(
        f"{name}: {shown(old.get(name))} then, {shown(new.get(name))} now"
        for name in old | new
        if old.get(name) != new.get(name)
    )


def _shards_of(output: Path) -> list[Path]:
    names = [path.name for path in output.parent.iterdir()]
    pattern = re.compile(rf"{re.escape(output.name)}\.shard-\d+-of-(\d+)")
    counts = {int(match[1]) for match in map(pattern.fullmatch, names) if match}
    if len(counts) != 1:
        what = f"those of {', '.join(map(str, sorted(counts)))}" if counts else "none"
        raise UserError(
            f"The shards of {output} cannot be joined: there are {what}. Expected "
            f"{output.name}.shard-i-of-n for one n, written by --shard i/n."
        )
    [count] = counts
    paths = [shard_path(output, (i, count)) for i in range(count)]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise UserError(
            f"The shards of {output} cannot be joined: {', '.join(missing)} missing; "
            "run decode.py --shard for them."
        )
    return paths


def _complete_settings(path: Path) -> dict[str, Any]:
    progress = _read_progress(path)
    if progress is None or progress["state"] != "complete":
        raise UserError(
            f"{path.name} is not complete ({progress_path(path).name} does not say so); "
            "run its --shard again with --resume."
        )
    return progress["settings"]


def _in_turn(paths: list[Path], *, numbered: bool) -> Iterator[list[bytes]]:
    """A sentence from each shard, and again; ``UserError`` if one ends too early."""
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in paths]
        groups = [sentence_groups(file, numbered=numbered) for file in files]
        ended = None
        for row in zip_longest(*groups):
            for path, sentence in zip(paths, row, strict=True):
                if sentence is None:
                    ended = ended or path
                elif ended is not None:
                    raise UserError(
                        f"{ended.name} ends before {path.name}; expected shards of one input, "
                        "none cut short."
                    )
                else:
                    yield sentence


@contextmanager
def _write_errors(name: str) -> Iterator[None]:
    """Errors of the system, such as a full disk, name the file."""
    try:
        yield
    except BrokenPipeError:  # nobody reads the output: no error of this program
        raise
    except OSError as error:
        raise UserError(f"{name} cannot be written: {error.strerror}.") from error
