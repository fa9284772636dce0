"""Model folders, and reading a model from one, from a work directory or from a checkpoint.

Layout of a model folder, such as ``model/`` in a work directory::

    config.json          settings
    tokenizer.model      or the tokenizer's other files
    model.safetensors    float32 parameters
    manifest.json        config, the tokenizer's fingerprint, the averaged steps (none for an
                         imported model), CRC-32 of every file; written last
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from transformer_jax.devices.sharding import parameters_by_name
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.runs.averaging import describe_steps
from transformer_jax.runs.checkpoint_folder import (
    checkpoint_name,
    complete_steps,
    load_tokenizer,
    read_parameters,
)
from transformer_jax.runs.manifest import PARAMETERS, Manifest, delete_complete, write_manifest
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import load_config_file, to_json
from transformer_jax.storage.files import (
    MODEL,
    is_checkpoint,
    local_path,
    remove_folder,
    write_atomically,
)
from transformer_jax.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class SavedModel(NamedTuple):
    """What was read from a model folder or a checkpoint."""

    config: Config
    """Settings; in a work directory, its config.json determines the ``decoding`` settings."""
    parameters: Any
    """Nested dict of NumPy arrays."""
    tokenizer: Tokenizer
    manifest: Manifest


def read_model(folder: Path, name: str | Path) -> SavedModel:
    """Read the trained model of a work directory, a model folder or a checkpoint on this machine.

    In a work directory, this is the model in ``model/`` or, until training finishes, the newest
    checkpoint. Messages call the folder ``name``. Raises ``UserError`` if the model or checkpoint
    is missing or corrupt.
    """
    workdir = folder
    note = ""
    if is_checkpoint(folder):
        workdir = folder.parents[1]
    elif os.path.lexists(folder / MODEL):  # a dangling link too: it is not a missing model
        folder /= MODEL
        check_link(folder)
    elif steps := complete_steps(folder / "checkpoints"):
        folder = folder / "checkpoints" / checkpoint_name(steps[-1])
        note = "no model/ (training has not finished, or an earlier version ended it), so "
    manifest = Manifest(folder)
    if not (manifest.is_checkpoint or manifest.is_model):
        raise UserError(
            f"{str(name)!r} has no checkpoint; expected a work directory written by train.py "
            "--workdir, one of the folders in its checkpoints/, or a model folder."
        )
    manifest.verify()
    parameters = read_parameters(manifest)
    tokenizer = load_tokenizer(workdir if manifest.is_checkpoint else folder, manifest)
    logger.info("%s: %s%s.", name, note, describe_steps(manifest.steps))
    decoding = load_config_file(workdir / "config.json").decoding
    config = dataclasses.replace(manifest.config, decoding=decoding)
    return SavedModel(config, parameters, tokenizer, manifest)


def save_model(
    folder: str | Path, config: Config, model: Transformer, tokenizer: Tokenizer
) -> None:
    """Save a model that was not trained here as a model folder.

    Programs accept it in place of a work directory, except for training. To fine-tune the model,
    pass the folder as ``training.start_from`` and train in another one.

    Args:
      folder: a new or empty folder.
      config: settings to save. ``model.config`` replaces their ``model`` field.

    Raises:
      FileExistsError: the folder is not empty.
    """
    folder = local_path(folder)
    config = dataclasses.replace(config, model=model.config)
    if Manifest(folder).is_model:
        raise FileExistsError(f"{str(folder)!r} is already a model; expected a new folder.")
    parameters = parameters_by_name(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    write_model(folder, config, parameters, tokenizer, [])


def check_link(path: Path) -> None:
    """Raise ``UserError`` for a link to nothing, which would be taken for a missing file."""
    if path.is_symlink() and not path.exists():
        raise UserError(
            f"{str(path)!r} is a link to {str(path.readlink())!r}, which does not exist. Restore "
            "it, or delete the link."
        )


def write_model(
    folder: Path,
    config: Config,
    parameters: Mapping[str, Any],
    tokenizer: Tokenizer,
    steps: Sequence[int],
) -> None:
    """Write a model folder, replacing an earlier model. The folder gets its name once complete.

    Args:
      parameters: arrays by name, each read only when it is written.
      steps: the averaged checkpoints; none: an imported model.
    """
    if any(folder.glob("*")) and not Manifest(folder).is_model:
        raise FileExistsError(f"{str(folder)!r} is not empty; expected a new or empty folder.")
    temporary = folder.with_name(f".{folder.name}~")
    remove_folder(temporary)  # left by a killed process
    try:
        tokenizer.save(temporary)
        _write_tensors(temporary / PARAMETERS, parameters)
        write_atomically(temporary / "config.json", to_json(config))
        write_manifest(temporary, config, tokenizer, {"steps": steps})
        delete_complete(folder)
        temporary.rename(folder)
    finally:
        remove_folder(temporary)


def _write_tensors(file: Path, tensors: Mapping[str, Any]) -> None:
    """Write a safetensors file of float32 arrays, one at a time; lazy arrays then need no memory.

    The file has the name, shape and place of each array in JSON, after the length of this text.
    """
    header = {}
    start = 0
    for name, x in tensors.items():
        end = start + 4 * math.prod(x.shape)
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the arrays
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            stream.write(np.ascontiguousarray(x, np.float32).data)
