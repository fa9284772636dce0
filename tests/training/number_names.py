"""Number names of ``examples/number_names.py``, as pairs and as text files."""

import atexit
import functools
import runpy
import tempfile
from pathlib import Path

from transformer_jax.settings.config import PairsConfig

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "number_names.py"
_FOLDER = tempfile.TemporaryDirectory(prefix="number-names-")
atexit.register(_FOLDER.cleanup)

number_names = runpy.run_path(str(_EXAMPLE))["number_names"]
"""``number_names(split, limit)`` yields pairs; splits are train, dev and test."""


@functools.cache
def number_files(limit: int, split: str = "train") -> PairsConfig:
    """Write the first pairs of a split to two text files."""
    paths = [Path(_FOLDER.name, f"{split}-{limit}.{language}") for language in ("en", "de")]
    for path, lines in zip(paths, zip(*number_names(split, limit)), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    source, target = map(str, paths)
    return PairsConfig("text", (source,), (target,))
