"""One input shared by several processes: line k belongs to part k mod n, and joining takes a
sentence from each in turn.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformer_jax.decoding.resuming import (
    describe_differences,
    progress_path,
    read_progress,
    sentence_groups,
)
from transformer_jax.errors import UserError


def parse_part(part: str) -> tuple[int, int]:
    """``0/4`` as (0, 4): the first of four parts."""
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if not match or not int(match[1]) < int(match[2]):
        raise UserError(
            f"part is {part!r}; expected i/n with i from 0 to n - 1, such as 0/4, 1/4, 2/4, 3/4."
        )
    return int(match[1]), int(match[2])


def part_path(output: str | Path, part: tuple[int, int]) -> Path:
    """``F.part-0-of-4``: where part 0 of 4 of the output F is written."""
    return Path(f"{output}.part-{part[0]}-of-{part[1]}")


def join_parts(output: str | Path) -> int:
    """Write ``output`` from its parts, as one process would have written it; returns the number of
    sentences.

    The file appears when it is whole. The parts stay.

    Raises:
        UserError: parts that are missing, incomplete, or not of one run.
    """
    output = Path(output)
    paths = _parts_of(output)
    settings = {path: _settings(path) for path in paths}
    for path in paths[1:]:
        if differences := describe_differences(settings[paths[0]], settings[path]):
            raise UserError(
                f"{paths[0].name} and {path.name} were written with other settings: {'; '.join(differences)}."
            )
    numbered = settings[paths[0]]["format"] == "text" and settings[paths[0]]["nbest"] > 1
    with tempfile.NamedTemporaryFile(
        dir=output.parent, prefix=f".{output.name}.", delete=False
    ) as joined:
        try:
            count = 0
            for sentence in _in_turn(paths, numbered=numbered):
                joined.writelines(sentence)
                count += 1
            joined.flush()
            os.fsync(joined.fileno())
            shutil.copymode(paths[0], joined.name)
            os.replace(joined.name, output)
        except BaseException:
            os.unlink(joined.name)
            raise
    return count


def _parts_of(output: Path) -> list[Path]:
    names = [path.name for path in output.parent.iterdir()]
    found = [re.fullmatch(rf"{re.escape(output.name)}\.part-\d+-of-(\d+)", name) for name in names]
    counts = {int(match[1]) for match in found if match}
    if len(counts) != 1:
        what = f"those of {', '.join(map(str, sorted(counts)))}" if counts else "none"
        raise UserError(
            f"The parts of {output} cannot be joined: there are {what}. Expected {output.name}.part-i-of-n for one n, written "
            "by --part i/n."
        )
    [count] = counts
    paths = [part_path(output, (i, count)) for i in range(count)]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise UserError(
            f"The parts of {output} cannot be joined: {', '.join(missing)} missing; run decode.py --part for them."
        )
    return paths


def _settings(path: Path) -> dict[str, Any]:
    progress = read_progress(path)
    if progress is None or progress["state"] != "complete":
        raise UserError(
            f"{path.name} is not complete ({progress_path(path).name} does not say so); run its --part again with --resume."
        )
    return progress["settings"]


def _in_turn(paths: list[Path], *, numbered: bool) -> Iterator[list[bytes]]:
    """A sentence from each part, and again. Parts whose numbers of sentences do not fit together
    are an error.
    """
    with ExitStack() as stack:
        groups = [
            sentence_groups(stack.enter_context(open(path, "rb")), numbered=numbered)
            for path in paths
        ]
        ended = None
        for row in zip_longest(*groups):
            for path, sentence in zip(paths, row, strict=True):
                if sentence is None:
                    ended = ended or path
                elif ended is not None:
                    raise UserError(
                        f"{ended.name} ends before {path.name}; expected parts of one input, none cut short."
                    )
                else:
                    yield sentence
