"""Checkpoint format, manifests and integrity checks.

Layout of a work directory, local or in an object store (written by ``training/saver.py``)::

    config.json, tokenizer.model
    model/               the finished model (``model_folder.py``)
    checkpoints/00000500/
        state/           Orbax: parameters, ema (if configured), rest (optimizer state, counters,
                         seed)
        manifest.json    config, progress, the tokenizer's fingerprint, CRC-32 of every file;
                         written last; without it, the folder is not a checkpoint
"""

from __future__ import annotations

import dataclasses
import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file

from transformer_jax.devices.sharding import map_named
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import abstract_model
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import from_dict
from transformer_jax.storage.files import (
    MANIFEST,
    AnyPath,
    checksums,
    files_in,
    is_checkpoint,
    parse_object,
    remove_file,
    remove_folder,
    write_atomically,
)
from transformer_jax.tokenization.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PARAMETERS = "model.safetensors"
"""Name of a model folder's parameters."""

_FORMAT = 1  # of checkpoints and model folders


def checkpoint_name(step: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"{step:08d}"


def complete_steps(checkpoints: AnyPath) -> list[int]:
    """Return the steps of complete checkpoints in a ``checkpoints/`` folder, oldest first."""
    names = (name.partition("/") for name in files_in(checkpoints))
    return [int(step) for step, _, file in names if file == MANIFEST and step.isdigit()]


def config_of(folder: AnyPath) -> Config:
    """Return the config that a checkpoint or model was trained with."""
    try:
        return from_dict(read_manifest(folder).get("config"))
    except UserError as error:
        raise UserError(f"{folder / MANIFEST} is corrupt: {error}") from None


def unread_files(checkpoint: AnyPath) -> tuple[str, ...]:
    """Return name prefixes of the files that only resuming reads."""
    average = config_of(checkpoint).optimizer.ema_decay > 0
    return "state/rest/", "state/parameters/" if average else "state/ema/"


def saved_parameters(folder: AnyPath) -> Any:
    """Load the parameters of a model, or of a checkpoint (with ``optimizer.ema_decay``, their EMA).

    Returns a nested dict of NumPy arrays. Raises ``UserError`` if a file is corrupt.
    """
    kind, remedy = "Model", "Copy its folder again, or run train.py or the import again"
    if is_checkpoint(folder):
        kind, remedy = "Checkpoint", "Pass the folder of another checkpoint"
    if reason := corruption(folder, resuming=False):
        raise UserError(f"{kind} {folder} is corrupt: {reason}. {remedy}.")
    config = config_of(folder)
    abstract = abstract_model(config.model).parameters
    if not is_checkpoint(folder):
        tensors = load_file(str(folder / PARAMETERS))
        return map_named(lambda name, _: tensors[name], abstract)
    part = "ema" if config.optimizer.ema_decay > 0 else "parameters"
    wanted = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), abstract)
    return ocp.load_checkpointables(str(folder / "state"), {part: wanted})[part]


def load_tokenizer(folder: Path, saved: AnyPath) -> Tokenizer:
    """Load the tokenizer in ``folder``.

    Raises ``UserError`` if the checkpoint or model ``saved`` was trained with another tokenizer.
    """
    tokenizer = Tokenizer.load(folder)
    if tokenizer.fingerprint != read_manifest(saved).get("tokenizer"):
        raise UserError(
            f"The tokenizer in {str(folder)!r} does not match checkpoint {str(saved)!r}; "
            "expected the tokenizer*.model files that the run wrote. Restore them from a backup."
        )
    return tokenizer


def write_manifest(
    folder: AnyPath, config: Config, tokenizer: Tokenizer, more: Mapping[str, Any]
) -> None:
    """Write the manifest, which marks a checkpoint or model as complete."""
    content: dict[str, Any] = {
        "format": _FORMAT,
        "config": dataclasses.asdict(config),
        "tokenizer": tokenizer.fingerprint,
        **more,
        "files": checksums(folder, files_in(folder)),
    }
    content = {"checksum": zlib.crc32(json.dumps(content).encode()), **content}
    write_atomically(folder / MANIFEST, json.dumps(content, indent=1))


def read_manifest(folder: AnyPath) -> dict[str, Any]:
    """Return the contents of a manifest, empty if it is missing or not a JSON object.

    Raises ``UserError`` if another version of the package wrote it.
    """
    if not isinstance(folder, Path):
        folder.fs.invalidate_cache()  # another process can have written it
    try:
        content = parse_object((folder / MANIFEST).read_bytes(), MANIFEST)
    except (FileNotFoundError, UserError):
        return {}
    version = content.get("format", 0 if "progress.json" in content else _FORMAT)
    if version != _FORMAT:
        raise UserError(
            f"{str(folder)!r} has format {version!r}; this version of transformer_jax reads format "
            f"{_FORMAT}. Use the later or earlier version that wrote it (format 0: load_model from "
            "commit ef0d56b)."
        )
    return content


def delete_checkpoint(folder: AnyPath) -> None:
    """Delete a checkpoint or model, manifest first: a half-deleted one does not look complete."""
    if not (isinstance(folder, Path) and folder.is_symlink()):
        remove_file(folder / MANIFEST)
    remove_folder(folder)


def newest_intact(checkpoints: AnyPath) -> int | None:
    """Return the step of the newest intact checkpoint in a ``checkpoints/`` folder.

    Returns None if the folder has no checkpoints. Raises ``UserError`` if all are corrupt.
    """
    steps = complete_steps(checkpoints)
    for step in reversed(steps):
        path = checkpoints / checkpoint_name(step)
        if not (reason := corruption(path)):
            return step
        log.warning("Checkpoint %s is corrupt (%s); trying the previous checkpoint.", path, reason)
    if steps:
        raise UserError(
            f"All {len(steps)} checkpoints in {checkpoints} are corrupt. Restore one from a "
            "backup, or start over in another --workdir."
        )
    return None


def corruption(folder: AnyPath, *, resuming: bool = True) -> str:
    """Return the reason a checkpoint or model is corrupt, or an empty string if it is intact.

    Files of a checkpoint that are only for resuming are checked only if ``resuming`` is set.
    """
    content = read_manifest(folder)
    if content.pop("checksum", None) != zlib.crc32(json.dumps(content).encode()):
        return f"{MANIFEST} is missing or has changed since it was saved"
    unread = () if resuming else unread_files(folder)
    for name, checksum in content["files"].items():
        try:
            if not name.startswith(unread) and checksums(folder, [name]) != {name: checksum}:
                return f"{name} has changed since it was saved"
        except FileNotFoundError:
            return f"{name} is missing"
    return ""
