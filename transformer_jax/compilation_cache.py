"""Compiled functions, kept between runs in JAX's own cache. Only programs turn it on."""

from __future__ import annotations

import logging
import tempfile
import warnings

import jax

from transformer_jax.storage import cache_folder, local_path

log = logging.getLogger(__name__)

_PROBE_BYTES = 2**20


def keep_compiled(where: str) -> None:
    """Keep what is compiled from now on, and find what was; must come before anything is compiled.

    Several processes may share a folder: one that meets an unfinished or corrupt entry warns and
    compiles. The folder grows until the user deletes it: JAX's own limit of size needs a lock for
    every entry, and under jax 0.10 nothing is written into a folder with older entries.

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
