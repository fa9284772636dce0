"""A folder that a program writes whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformer_jax.errors import UserError

_UNFINISHED = ".unfinished"


@contextmanager
def new_folder(path: Path, flag: str) -> Iterator[Path]:
    """A folder to write into, whose content is that of ``path`` when the context ends; after an
    error nothing is left of it.

    ``UserError``, naming ``flag``, unless ``path`` is new or an empty folder. What an earlier try
    that was killed left does not count.
    """
    final = path.absolute()
    there = final.exists()
    if there and (
        not final.is_dir() or any(entry.name != _UNFINISHED for entry in final.iterdir())
    ):
        raise UserError(
            f"{flag} is {str(path)!r}, which is there already; expected a new or empty folder."
        )
    # A folder that is there may be a mount point, which no other folder can replace.
    unfinished = final / _UNFINISHED if there else final.with_name(f".{final.name}{_UNFINISHED}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if there:
            for entry in sorted(
                unfinished.iterdir(), key=lambda entry: (entry.name == "config.json", entry.name)
            ):
                entry.rename(final / entry.name)  # what declares the folder whole comes last
        else:
            unfinished.rename(final)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
