"""Copies work directories between object stores and this machine.

Object stores are accessed through fsspec, so any URL that it supports works: s3://, gs://, az://
and others. A checkpoint's manifest is copied last, because a folder without a manifest is not a
checkpoint. Tokenized corpora are not copied.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from transformer_jax.errors import UserError
from transformer_jax.saved_models.checkpoint import (
    checkpoint_name,
    complete_steps,
    corruption,
    delete_checkpoint,
)
from transformer_jax.storage.files import (
    MANIFEST,
    AnyPath,
    cache_folder,
    copy_file,
    copy_folder,
    existing_folder,
    files_in,
    is_url,
    kind_of,
    locked,
    remote_path,
)
from transformer_jax.tokenization.tokenizer import TOKENIZER_FILES

_GRACE_SECONDS = 3600.0  # another reader can still be loading a checkpoint that the run has deleted


def local_workdir(workdir: str | Path) -> Path:
    """Return a local folder for reading a work directory or checkpoint. A URL is copied first."""
    if not is_url(str(workdir)):
        return existing_folder(workdir)
    url, _, step = str(workdir).rstrip("/").partition("/checkpoints/")
    folder, store = cached_folder(url, "read"), remote_path(url)
    # Readers of the same URL on this machine share the folder and take turns.
    with locked(folder.with_suffix(".lock")):
        if kind_of(store / "config.json") != "file":
            raise UserError(
                f"{str(workdir)!r} has no config.json; expected a work directory written by "
                "train.py --workdir."
            )
        mirror_small_files(store, folder)
        mirror_checkpoints(store / "checkpoints", folder / "checkpoints", grace=_GRACE_SECONDS)
    return folder / "checkpoints" / step if step else folder


def cached_folder(url: str, purpose: str) -> Path:
    """Return the local folder that mirrors a URL, creating it if necessary.

    Training and programs that read its results use separate folders.
    """
    name = f"{purpose}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    folder = cache_folder() / "workdirs" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def mirror_small_files(source: AnyPath, target: AnyPath) -> None:
    """Copy all files except checkpoints, corpora and hidden files."""
    names = _small_files(source)
    for name in names:
        copy_file(source / name, target / name)
    for name in set(_small_files(target)).difference(names):
        if isinstance(target, Path) or name in TOKENIZER_FILES:  # other files may not be ours
            (target / name).unlink()


def mirror_checkpoints(
    source: AnyPath,
    target: AnyPath,
    *,
    grace: float = 0,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Copy complete checkpoints that are missing or different in ``target``, manifests last.

    Deletes checkpoints from ``target`` that ``source`` does not have, once they are ``grace``
    seconds old. Calls ``check`` before it copies a manifest or deletes a checkpoint.
    """
    there, here = complete_steps(source), complete_steps(target)
    for name in map(checkpoint_name, there):
        if int(name) in here and _same(source / name, target / name):
            continue
        check()
        delete_checkpoint(target / name)
        try:
            copy_folder(source / name, target / name, check=check)
        except FileNotFoundError:  # the run has deleted it in the meantime
            delete_checkpoint(target / name)
    for name in map(checkpoint_name, set(here).difference(there)):
        if not grace or time.time() - (target / name / MANIFEST).stat().st_mtime > grace:
            check()
            delete_checkpoint(target / name)


def _same(source: AnyPath, target: AnyPath) -> bool:
    """Return True if two checkpoints are identical. A local ``target`` must also be intact."""
    same: bool = (source / MANIFEST).read_bytes() == (target / MANIFEST).read_bytes()
    return same and not (isinstance(target, Path) and corruption(target))


def _small_files(folder: AnyPath) -> list[str]:
    return [
        name
        for name in files_in(folder)
        if not name.startswith(("checkpoints/", "corpus/")) and "/." not in f"/{name}"
    ]
