"""JAX's persistent compilation cache. Only the command-line programs enable it."""

from __future__ import annotations

import os

from transformer_jax.storage.files import cache_folder


def enable_compilation_cache() -> None:
    """Enable the persistent compilation cache. Call this before anything is compiled.

    The cache is the ``compiled`` folder in ``storage.cache_folder()``, or
    $JAX_COMPILATION_CACHE_DIR if that is set. Several processes can share it. If an entry is
    corrupt or the folder cannot be written, JAX warns and compiles. The cache grows until the user
    deletes it: JAX's size limit needs a lock for every entry, and under that limit, jax 0.10 does
    not write to a folder that contains older entries.
    """
    import jax

    # By default, JAX does not keep functions that took less than a second, which are most of those
    # that a start compiles.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
