"""Manifest of a checkpoint or model: its config, and checksums of all its files.

The manifest is written last, so a folder without one is incomplete. Orbax and safetensors load
flipped bits without an error; the checksums find them.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError, short_repr
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import config_from_dict
from transformer_jax.storage.files import (
    MANIFEST,
    AnyPath,
    checksums,
    files_in,
    is_checkpoint,
    kind_of,
    parse_object,
    remove_file,
    remove_folder,
    write_atomically,
)
from transformer_jax.tokenization.tokenizer import Tokenizer

PARAMETERS = "model.safetensors"
"""Name of a model folder's parameters."""

_FORMAT = 1  # of checkpoints and model folders


class Manifest:
    """The manifest of a checkpoint or model ``folder``, read once.

    Raises ``UserError`` if another version of the package wrote it.

    Attributes:
      folder: the checkpoint or model.
      is_checkpoint: True for a checkpoint, False for a model.
      content: the JSON object, empty if it is missing or not a JSON object.
    """

    def __init__(self, folder: AnyPath):
        self.folder = folder
        self.is_checkpoint = is_checkpoint(folder)
        self.content: dict[str, Any] = {}
        if not isinstance(folder, Path):
            folder.fs.invalidate_cache()  # another process can have written it
        try:
            self.content = parse_object((folder / MANIFEST).read_bytes(), MANIFEST)
        except (FileNotFoundError, UserError):
            return
        version = self.content.get("format", 0 if "progress.json" in self.content else _FORMAT)
        if version != _FORMAT:
            raise UserError(
                f"{str(folder)!r} has format {version!r}; this version of transformer_jax reads "
                f"format {_FORMAT}. Use the later or earlier version that wrote it (format 0: "
                "load_model from commit ef0d56b)."
            )

    @cached_property
    def config(self) -> Config:
        """The config that the checkpoint or model was trained with."""
        try:
            return config_from_dict(self.content.get("config"))
        except UserError as error:
            raise UserError(f"{self.folder / MANIFEST} is corrupt: {error}") from None

    @property
    def is_model(self) -> bool:
        """True for a model folder, even if it is incomplete."""
        return "steps" in self.content or kind_of(self.folder / PARAMETERS) == "file"

    @property
    def steps(self) -> list[int]:
        """The step of the checkpoint, or the averaged steps of the model; none: it is imported."""
        if self.is_checkpoint:
            return [int(self.folder.name)]
        steps = self.content.get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, int) for step in steps):
            raise UserError(
                f"{self.folder / MANIFEST} is corrupt: steps is {short_repr(steps)}; expected a "
                "list of numbers. Copy the model again, or run train.py or the import again."
            )
        return steps

    @property
    def parameters_part(self) -> str:
        """The part of a checkpoint's state that is its model: the parameters, or their EMA."""
        return "ema" if self.config.optimizer.ema_decay > 0 else "parameters"

    @property
    def resume_only_files(self) -> tuple[str, ...]:
        """Name prefixes of a checkpoint's files that only resuming reads."""
        parts = {"rest", "parameters", "ema"} - {self.parameters_part}
        return tuple(f"state/{part}/" for part in parts)

    def corruption(self, *, resuming: bool = True) -> str:
        """Return the reason the checkpoint or model is corrupt, or "" if it is intact.

        Files of a checkpoint that are only for resuming are checked only if ``resuming`` is set.
        """
        content = dict(self.content)
        if content.pop("checksum", None) != _checksum(content):
            return f"{MANIFEST} is missing or has changed since it was saved"
        files = content.get("files")
        if not isinstance(files, dict) or not files:
            return f"{MANIFEST} lists no files"
        unread = () if resuming else self.resume_only_files
        for name, checksum in files.items():
            if name.startswith(unread):
                continue
            try:
                if checksums(self.folder, [name]) != {name: checksum}:
                    return f"{name} has changed since it was saved"
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
                return f"{name[:200]} is missing"
        return ""

    def verify(self) -> None:
        """Raise ``UserError`` if the checkpoint or model is corrupt."""
        if reason := self.corruption(resuming=False):
            raise self.error(reason)

    def error(self, reason: str) -> UserError:
        """Return the error for a checkpoint or model that is corrupt."""
        if self.is_checkpoint:
            return UserError(
                f"Checkpoint {self.folder} is corrupt: {reason}. Pass the folder of another "
                "checkpoint."
            )
        remedy = "Copy its folder again, or run train.py or the import again."
        if not self.content:
            remedy += (
                " If it is from Hugging Face transformers, import the model: python -m "
                "transformer_jax.pretrained import."
            )
        return UserError(f"Model {self.folder} is corrupt: {reason}. {remedy}")


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


def delete_complete(folder: AnyPath) -> None:
    """Delete a checkpoint or model, manifest first: a half-deleted one does not look complete."""
    if not (isinstance(folder, Path) and folder.is_symlink()):
        remove_file(folder / MANIFEST)
    remove_folder(folder)


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())
