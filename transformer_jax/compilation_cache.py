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
    """Enable the persistent compilation cache, in ``compiled`` in ``storage.cache_folder`` unless
    JAX_COMPILATION_CACHE_DIR names a folder. Call this before anything is compiled.

    Several processes may share a folder. A process that finds an incomplete or corrupt entry warns
    and recompiles. The folder grows until the user deletes it: JAX's own size limit needs a lock
    for every entry, and under jax 0.10 nothing is written into a folder with older entries.
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
            "Compiled functions cannot be cached in %s (%s); the next start compiles them again. "
            "Set JAX_COMPILATION_CACHE_DIR to another folder.",
            *(folder, error.strerror or error),
        )
        warnings.filterwarnings("ignore", "Error writing persistent compilation cache")
    if folder.is_dir():  # a read-only cache still helps
        jax.config.update("jax_compilation_cache_dir", str(folder))
