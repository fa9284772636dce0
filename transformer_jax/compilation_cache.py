"""JAX's persistent compilation cache. Only the command-line programs enable it."""

from __future__ import annotations

import logging
import tempfile
import warnings

import jax

from transformer_jax.storage import cache_folder

log = logging.getLogger(__name__)

_PROBE_BYTES = 2**20


def keep_compiled() -> None:
    """Enable the persistent compilation cache. Call this before anything is compiled.

    The cache is the ``compiled`` folder in ``storage.cache_folder()``, or
    $JAX_COMPILATION_CACHE_DIR if that is set. Several processes can share it. A process that finds
    an incomplete or corrupt entry warns and recompiles. The cache grows until the user deletes it:
    JAX's size limit needs a lock for every entry, and under that limit, jax 0.10 does not write to
    a folder that contains older entries.
    """
    if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
    except OSError as error:
        log.warning(
            "Compiled functions cannot be cached in %s (%s); they will be recompiled next "
            "time. Set JAX_COMPILATION_CACHE_DIR to another folder.",
            *(folder, error.strerror or error),
        )
        warnings.filterwarnings("ignore", "Error writing persistent compilation cache")
    if folder.is_dir():  # a read-only cache still helps
        jax.config.update("jax_compilation_cache_dir", str(folder))
