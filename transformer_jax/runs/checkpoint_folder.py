"""Checkpoint folders: names, contents, and the parameters in one.

Layout of a work directory, local or in an object store::

    config.json, tokenizer.model
    model/               the finished model (``model_folder.py``)
    checkpoints/00000500/
        state/           Orbax: parameters, ema (if configured), rest (optimizer state, counters,
                         seed)
        manifest.json    config, progress, the tokenizer's fingerprint, CRC-32 of every file
                         (``manifest.py``)
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file

from transformer_jax.devices.sharding import map_named
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import abstract_model
from transformer_jax.runs.manifest import config_of, corruption, read_manifest
from transformer_jax.storage.files import MANIFEST, AnyPath, files_in, is_checkpoint
from transformer_jax.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PARAMETERS = "model.safetensors"
"""Name of a model folder's parameters."""


def checkpoint_name(step: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"{step:08d}"


def complete_steps(checkpoints: AnyPath) -> list[int]:
    """Return the steps of complete checkpoints in a ``checkpoints/`` folder, oldest first."""
    names = (name.partition("/") for name in files_in(checkpoints))
    return [int(step) for step, _, file in names if file == MANIFEST and step.isdigit()]


def newest_intact_step(checkpoints: AnyPath) -> int | None:
    """Return the step of the newest intact checkpoint in a ``checkpoints/`` folder.

    Returns None if the folder has no checkpoints. Raises ``UserError`` if all are corrupt.
    """
    steps = complete_steps(checkpoints)
    for step in reversed(steps):
        path = checkpoints / checkpoint_name(step)
        if not (reason := corruption(path)):
            return step
        logger.warning(
            "Checkpoint %s is corrupt (%s); trying the previous checkpoint.", path, reason
        )
    if steps:
        raise UserError(
            f"All {len(steps)} checkpoints in {checkpoints} are corrupt. Restore one from a "
            "backup, or start over in another --workdir."
        )
    return None


def read_parameters(folder: AnyPath) -> Any:
    """Load the parameters of a model, or of a checkpoint (with ``optimizer.ema_decay``, their EMA).

    Returns a nested dict of NumPy arrays. Raises ``UserError`` if a file is corrupt.
    """
    if reason := corruption(folder, resuming=False):
        raise _corrupt(folder, reason)
    config = config_of(folder)
    abstract = abstract_model(config.model).parameters
    if is_checkpoint(folder):
        part = "ema" if config.optimizer.ema_decay > 0 else "parameters"
        abstract_state = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), abstract)
        return load_state(folder, {part: abstract_state})[part]
    tensors = load_file(str(folder / PARAMETERS))

    def checked_tensor(name: str, expected: jax.ShapeDtypeStruct) -> np.ndarray:
        if name not in tensors:
            raise _corrupt(folder, f"{PARAMETERS} has no {name}")
        tensor = tensors[name]
        if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            raise _corrupt(
                folder,
                f"{name} is {tensor.dtype} of shape {tensor.shape}; expected {expected.dtype} of "
                f"shape {expected.shape}",
            )
        return tensor

    return map_named(checked_tensor, abstract)


def load_state(checkpoint: AnyPath, abstract_state: dict[str, Any]) -> dict[str, Any]:
    """Load parts of a checkpoint's state, with shapes, types and shardings of ``abstract_state``.

    Raises ``UserError`` if it has parameters of other names or shapes, which Orbax would cut or
    pad with zeros.
    """
    saved = ocp.checkpointables_metadata(str(checkpoint / "state")).metadata
    for part in abstract_state.keys() & {"parameters", "ema"}:
        expected = _shapes(abstract_state[part])
        actual = _shapes(saved.get(part))
        for name in sorted(expected.keys() | actual.keys()):
            if expected.get(name) != actual.get(name):
                raise _corrupt(
                    checkpoint,
                    f"{part}.{name} has shape {actual.get(name)}; expected {expected.get(name)}",
                )
    return ocp.load_checkpointables(str(checkpoint / "state"), abstract_state)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x.shape for path, x in leaves}


def _corrupt(folder: AnyPath, reason: str) -> UserError:
    if is_checkpoint(folder):
        return UserError(
            f"Checkpoint {folder} is corrupt: {reason}. Pass the folder of another checkpoint."
        )
    return UserError(
        f"Model {folder} is corrupt: {reason}. Copy its folder again, or run train.py or the "
        "import again."
    )


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
