"""Where programs keep compiled functions between runs: JAX's own cache, in a folder that does not
grow without end.

Only programs call this; who imports the library decides for himself.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import jax

from transformer_jax.storage import cache_folder, local_path

log = logging.getLogger(__name__)

_MOST_BYTES = 2 * 10**9
_PROBE_BYTES = 2**20


def keep_compiled(where: str) -> None:
    """Keep what is compiled from now on, and find what was; must come before anything is compiled.

    JAX reads and writes entries without a lock: a process that meets another's unfinished entry, or
    a damaged one, warns and compiles. JAX's own limit of size is not used: it brings a lock for
    every entry, does not count the results of tuning kernels, and jax 0.10 writes nothing any more
    in a folder with entries from before there was a limit.

    Args:
      where: ``auto`` (JAX_COMPILATION_CACHE_DIR, or ``compiled`` in ``storage.cache_folder``),
        ``off``, or a folder.
    """
    if where == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if where == "auto" and jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return  # JAX_COMPILATION_CACHE_DIR: its owner looks after it
    folder = cache_folder() / "compiled" if where == "auto" else local_path(where)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_oldest(folder, _MOST_BYTES)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
    except OSError as error:
        log.warning(
            "What is compiled cannot be kept in %s (%s); the next start compiles it again. "
            "--compilation-cache takes another folder, or off.",
            *(folder, error.strerror or error),
        )
        warnings.filterwarnings("ignore", "Error writing persistent compilation cache")
    if folder.is_dir():  # what can only be read still serves
        jax.config.update("jax_compilation_cache_dir", str(folder))


def remove_oldest(folder: Path, most_bytes: int) -> None:
    """Delete the entries of a cache that were not used for longest, until the others take no more
    than ``most_bytes``. Several processes may do so at once; other files are left alone.
    """
    entries = []
    for path in [*folder.glob("*-cache"), *folder.glob("xla_gpu_per_fusion_autotune_cache_dir/*")]:
        with suppress(OSError):  # another process was faster
            status = path.stat()
            used = max(status.st_atime, status.st_mtime)
            entries.append((used, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= most_bytes:
            return
        with suppress(OSError):
            path.unlink()
        total -= size
