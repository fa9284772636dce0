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
from typing import Any

import jax
import numpy as np
from flax import nnx

from transformer_jax.devices.sharding import parameter_name
from transformer_jax.errors import UserError, short_repr
from transformer_jax.model.transformer import Transformer
from transformer_jax.runs.averaging import describe_steps
from transformer_jax.runs.checkpoint_folder import (
    PARAMETERS,
    checkpoint_name,
    complete_steps,
    load_tokenizer,
    read_parameters,
)
from transformer_jax.runs.manifest import (
    config_of,
    delete_complete,
    read_manifest,
    write_manifest,
)
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import load_config_file, to_json
from transformer_jax.storage.files import (
    MANIFEST,
    MODEL,
    AnyPath,
    is_checkpoint,
    kind_of,
    local_path,
    remove_folder,
    write_atomically,
)
from transformer_jax.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def read_model(saved: Path, name: str | Path) -> tuple[Config, Any, Tokenizer]:
    """Read the trained model of a work directory, a model folder or a checkpoint on this machine,
    with its parameters as a nested dict of NumPy arrays.

    In a work directory, this is the model in ``model/`` or, until training finishes, the newest
    checkpoint, and its config.json determines the ``decoding`` settings. Messages call the folder
    ``name``. Raises ``UserError`` if the model or checkpoint is missing or corrupt.
    """
    workdir = saved
    note = ""
    if is_checkpoint(saved):
        workdir = saved.parents[1]
    elif os.path.lexists(saved / MODEL):  # a dangling link too: it is not a missing model
        saved /= MODEL
        _check_link(saved)
    elif steps := complete_steps(saved / "checkpoints"):
        saved = saved / "checkpoints" / checkpoint_name(steps[-1])
        note = "no model/ (training has not finished, or an earlier version ended it), so "
    resumable = is_checkpoint(saved)
    if not (resumable or is_model(saved)):
        raise UserError(
            f"{str(name)!r} has no checkpoint; expected a work directory written by train.py "
            "--workdir, one of the folders in its checkpoints/, or a model folder."
        )
    if not (resumable or read_manifest(saved)):
        load_config_file(saved / "config.json")  # an error that names the format of transformers
    parameters = read_parameters(saved)
    config = config_of(saved)
    tokenizer = load_tokenizer(workdir if resumable else saved, saved)
    steps = [int(saved.name)] if resumable else averaged_steps(saved)
    logger.info("%s: %s%s.", name, note, describe_steps(steps))
    decoding = load_config_file(workdir / "config.json").decoding
    return dataclasses.replace(config, decoding=decoding), parameters, tokenizer


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
    if is_model(folder):
        raise FileExistsError(f"{str(folder)!r} is already a model; expected a new folder.")
    write_model(folder, config, nnx.to_pure_dict(nnx.state(model, nnx.Param)), tokenizer, [])


def is_model(folder: AnyPath) -> bool:
    """Return True for a model folder, even if it is incomplete."""
    return kind_of(folder / PARAMETERS) == "file" or "steps" in read_manifest(folder)


def averaged_steps(model: AnyPath) -> list[int]:
    """Return the steps whose checkpoints a model is the average of; none: an imported model."""
    steps = read_manifest(model).get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, int) for step in steps):
        raise UserError(
            f"{model / MANIFEST} is corrupt: steps is {short_repr(steps)}; expected a list of "
            "numbers. Copy the model again, or run train.py or the import again."
        )
    return steps


def _check_link(model: Path) -> None:
    if not model.exists():
        raise UserError(
            f"{str(model)!r} is a link to {str(model.readlink())!r}, which does not exist. Restore "
            "the model, or delete the link to load the newest checkpoint."
        )


def write_model(
    folder: Path, config: Config, parameters: Any, tokenizer: Tokenizer, steps: Sequence[int]
) -> None:
    """Write a model folder, replacing an earlier model. ``steps`` are the averaged checkpoints.

    The folder gets its name once it is complete.
    """
    if any(folder.glob("*")) and not is_model(folder):
        raise FileExistsError(f"{str(folder)!r} is not empty; expected a new or empty folder.")
    tensors = {parameter_name(path): x for path, x in jax.tree.leaves_with_path(parameters)}
    temporary = folder.with_name(f".{folder.name}~")
    remove_folder(temporary)  # left by a killed process
    try:
        tokenizer.save(temporary)
        _write_tensors(temporary / PARAMETERS, tensors)
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
