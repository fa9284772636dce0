"""Copying work directories and models between object stores and this machine.

Object stores are accessed through fsspec, so any URL that it supports works: s3://, gs://, az://
and others. The manifest of a checkpoint or model is copied last, because a folder without a
manifest is incomplete. Tokenized corpora are not copied.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from transformer_jax.runs.checkpoint_folder import checkpoint_name, complete_steps
from transformer_jax.runs.manifest import Manifest, delete_complete
from transformer_jax.storage.files import (
    MANIFEST,
    MODEL,
    AnyPath,
    cache_folder,
    copy_file,
    copy_folder,
    files_in,
    remove_file,
)
from transformer_jax.tokenization.tokenizer import TOKENIZER_FILES

_GRACE_SECONDS = 3600.0  # another reader can still be loading a checkpoint that the run has deleted


def cached_folder(url: str, purpose: str) -> Path:
    """Return the local folder that mirrors a URL, creating it if necessary.

    Training and programs that read its results use separate folders.
    """
    name = f"{purpose}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    folder = cache_folder() / "workdirs" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def mirror_files(
    source: AnyPath,
    target: AnyPath,
    *,
    model: bool = True,
    check_claim: Callable[[], None] = lambda: None,
) -> None:
    """Copy all files except checkpoints, corpora and hidden files; optionally without the model.

    Calls ``check_claim`` before it copies or deletes a model.
    """
    if model:
        mirror_folder(source / MODEL, target / MODEL, check_claim=check_claim)
    names = _files_to_mirror(source)
    for name in names:
        copy_file(source / name, target / name)
    for name in set(_files_to_mirror(target)).difference(names):
        if isinstance(target, Path) or name in TOKENIZER_FILES:  # other files may not be ours
            remove_file(target / name)


def mirror_checkpoints(
    source: AnyPath,
    target: AnyPath,
    steps: Iterable[int] | None = None,
    *,
    check_claim: Callable[[], None] = lambda: None,
) -> None:
    """Copy complete checkpoints that are missing or different in ``target``, manifests last.

    Deletes checkpoints from ``target`` that ``source`` does not have. With ``steps``, copies only
    these, without the files that are only for resuming, and deletes only checkpoints that are old.
    Calls ``check_claim`` before it copies a manifest or deletes a checkpoint.
    """
    source_steps = complete_steps(source)
    steps_to_copy = source_steps if steps is None else set(steps).intersection(source_steps)
    for name in map(checkpoint_name, steps_to_copy):
        mirror_folder(source / name, target / name, resuming=steps is None, check_claim=check_claim)
    for name in map(checkpoint_name, set(complete_steps(target)).difference(source_steps)):
        manifest = target / name / MANIFEST
        if steps is None or time.time() - manifest.stat().st_mtime > _GRACE_SECONDS:
            check_claim()
            delete_complete(target / name)


def mirror_folder(
    source: AnyPath,
    target: AnyPath,
    *,
    resuming: bool = True,
    check_claim: Callable[[], None] = lambda: None,
) -> None:
    """Copy a checkpoint, model or corpus if it is missing or different in ``target``.

    Its manifest is copied last. Calls ``check_claim`` before it deletes or completes ``target``.
    """
    original = Manifest(source)
    copy = Manifest(target)
    is_current = copy.content == original.content
    if is_current and not (isinstance(target, Path) and copy.corruption(resuming=resuming)):
        return
    check_claim()
    delete_complete(target)
    try:
        copy_folder(source, target, (MANIFEST, *(() if resuming else original.resume_only_files)))
        check_claim()
        copy_file(source / MANIFEST, target / MANIFEST)
    except FileNotFoundError:  # the run has deleted it in the meantime
        delete_complete(target)


def _files_to_mirror(folder: AnyPath) -> list[str]:
    return [
        name
        for name in files_in(folder)
        if not name.startswith(("checkpoints/", f"{MODEL}/", "corpus/")) and "/." not in f"/{name}"
    ]
