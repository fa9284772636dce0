"""The folders of checkpoints: how they are named, which of them are complete and whole, and what
made them.

A checkpoint is a folder that is usable alone (``training/checkpoint.py`` writes it,
``saved_model.py`` loads it):

    config.json  tokenizer.model  progress.json state/         Orbax: parameters, ema (if
    configured), rest (optimizer state and counters) manifest.json  size and CRC-32 of every file;
    written last, so a folder without it is not a checkpoint
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError

MANIFEST = "manifest.json"


class DamagedError(UserError):
    """A checkpoint whose files are not those that were saved."""


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint, in ``checkpoints``."""
    return f"{step:08d}"


def steps_of(manifests: Iterable[str]) -> list[int]:
    """The steps of complete checkpoints, oldest first, by the names of their manifests."""
    names = (path.rsplit("/", 2)[-2] for path in manifests)
    return sorted(int(name) for name in names if name.isdigit())


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a ``checkpoints`` folder, oldest first."""
    return steps_of(map(str, folder.glob(f"*/{MANIFEST}")))


def is_imported(path: Path) -> bool:
    """Whether a complete checkpoint holds parameters from elsewhere, which training can begin with,
    and nothing else.
    """
    return bool(progress_of(path).get("imported"))


def is_regular(path: Path) -> bool:
    """Whether a complete checkpoint was due: not one of an interruption, or of a best value on dev
    between two due ones.

    Regular ones are kept and averaged, so that these do not change what a run gives.
    """
    progress = progress_of(path)
    return bool(progress.get("regular", True)) and not progress.get("imported")


def progress_of(path: Path) -> dict[str, Any]:
    """What training had to remember besides the state; nothing where that is damaged."""
    try:
        return json.loads((path / "progress.json").read_text())
    except (OSError, ValueError):  # damaged, which ``verify`` tells
        return {}


def write_manifest(path: Path) -> None:
    """Declare the checkpoint in ``path`` complete."""
    entries = {
        str(p.relative_to(path)): [p.stat().st_size, _checksum(p)]
        for p in sorted(path.rglob("*"))
        if p.is_file()
    }
    temporary = path / "manifest.tmp"
    temporary.write_text(json.dumps(entries, indent=1))
    temporary.rename(path / MANIFEST)


def verify(path: Path) -> None:
    """``DamagedError`` unless every file of the checkpoint is as it was saved."""
    try:
        for name, (size, checksum) in json.loads((path / MANIFEST).read_text()).items():
            file = path / name
            if not file.is_file():
                raise DamagedError(f"{name} is missing")
            if file.stat().st_size != size or _checksum(file) != checksum:
                raise DamagedError(f"{name} does not have the content that was saved")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamagedError(str(error)) from None


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum
