"""Manifest of a checkpoint or model: its config, and checksums of all its files.

The manifest is written last, so a folder without one is incomplete. Orbax and safetensors load
flipped bits without an error; the checksums find them.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import from_dict
from transformer_jax.storage.files import (
    MANIFEST,
    AnyPath,
    checksums,
    files_in,
    parse_object,
    remove_file,
    remove_folder,
    write_atomically,
)
from transformer_jax.tokenization.tokenizer import Tokenizer

_FORMAT = 1  # of checkpoints and model folders


def write_manifest(
    folder: AnyPath, config: Config, tokenizer: Tokenizer, extra_fields: Mapping[str, Any]
) -> None:
    """Write the manifest, which marks a checkpoint or model as complete."""
    content: dict[str, Any] = {
        "format": _FORMAT,
        "config": dataclasses.asdict(config),
        "tokenizer": tokenizer.fingerprint,
        **extra_fields,
        "files": checksums(folder, files_in(folder)),
    }
    content = {"checksum": _checksum(content), **content}
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


def config_of(folder: AnyPath) -> Config:
    """Return the config that a checkpoint or model was trained with."""
    try:
        return from_dict(read_manifest(folder).get("config"))
    except UserError as error:
        raise UserError(f"{folder / MANIFEST} is corrupt: {error}") from None


def corruption(folder: AnyPath, *, resuming: bool = True) -> str:
    """Return the reason a checkpoint or model is corrupt, or an empty string if it is intact.

    Files of a checkpoint that are only for resuming are checked only if ``resuming`` is set.
    """
    content = read_manifest(folder)
    if content.pop("checksum", None) != _checksum(content):
        return f"{MANIFEST} is missing or has changed since it was saved"
    files = content.get("files")
    if not isinstance(files, dict) or not files:
        return f"{MANIFEST} lists no files"
    resume_only = () if resuming else resume_only_files(folder)
    for name, checksum in files.items():
        if name.startswith(resume_only):
            continue
        try:
            if checksums(folder, [name]) != {name: checksum}:
                return f"{name} has changed since it was saved"
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
            return f"{name[:200]} is missing"
    return ""


def resume_only_files(checkpoint: AnyPath) -> tuple[str, ...]:
    """Return name prefixes of the files that only resuming reads."""
    average = config_of(checkpoint).optimizer.ema_decay > 0
    return "state/rest/", "state/parameters/" if average else "state/ema/"


def delete_complete(folder: AnyPath) -> None:
    """Delete a checkpoint or model, manifest first: a half-deleted one does not look complete."""
    if not (isinstance(folder, Path) and folder.is_symlink()):
        remove_file(folder / MANIFEST)
    remove_folder(folder)


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())
