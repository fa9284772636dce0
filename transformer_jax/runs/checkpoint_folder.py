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

from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from transformer_jax.devices.sharding import map_named
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import abstract_model
from transformer_jax.runs.manifest import PARAMETERS, Manifest
from transformer_jax.storage.files import MANIFEST, AnyPath, files_in
from transformer_jax.tokenization.tokenizer import Tokenizer


def checkpoint_name(step: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"{step:08d}"


def complete_steps(checkpoints: AnyPath) -> list[int]:
    """Return the steps of complete checkpoints in a ``checkpoints/`` folder, oldest first."""
    names = (name.partition("/") for name in files_in(checkpoints))
    return [int(step) for step, _, file in names if file == MANIFEST and step.isdigit()]


def read_parameters(manifest: Manifest) -> Any:
    """Load the parameters of a model, or of a checkpoint (with ``optimizer.ema_decay``, their EMA).

    Returns a nested dict of NumPy arrays. Raises ``UserError`` if names or shapes differ from those
    of the config.
    """
    abstract = abstract_model(manifest.config.model).parameters
    if manifest.is_checkpoint:
        part = manifest.parameters_part
        abstract_state = {part: jax.tree.map(lambda x: np.empty(x.shape, x.dtype), abstract)}
        return load_state(manifest, abstract_state)[part]
    tensors = load_file(str(manifest.folder / PARAMETERS))

    def checked_tensor(name: str, expected: jax.ShapeDtypeStruct) -> np.ndarray:
        if name not in tensors:
            raise manifest.error(f"{PARAMETERS} has no {name}")
        tensor = tensors[name]
        if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            raise manifest.error(
                f"{name} is {tensor.dtype} of shape {tensor.shape}; expected {expected.dtype} of "
                f"shape {expected.shape}"
            )
        return tensor

    return map_named(checked_tensor, abstract)


def load_state(checkpoint: Manifest, abstract_state: dict[str, Any]) -> dict[str, Any]:
    """Load parts of a checkpoint's state, with shapes, types and shardings of ``abstract_state``.

    Raises ``UserError`` if it has parameters of other names or shapes, which Orbax would cut or
    pad with zeros.
    """
    from orbax.checkpoint import v1 as ocp  # slow to import, and models do not need it

    path = str(checkpoint.folder / "state")
    saved = ocp.checkpointables_metadata(path).metadata
    for part in abstract_state.keys() & {"parameters", "ema"}:
        expected = _shapes(abstract_state[part])
        actual = _shapes(saved.get(part))
        for name in sorted(expected.keys() | actual.keys()):
            if expected.get(name) != actual.get(name):
                raise checkpoint.error(
                    f"{part}.{name} has shape {actual.get(name)}; expected {expected.get(name)}"
                )
    return ocp.load_checkpointables(path, abstract_state)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x.shape for path, x in leaves}


def load_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """Load the tokenizer in ``folder``.

    Raises ``UserError`` if the checkpoint or model was trained with another tokenizer.
    """
    tokenizer = Tokenizer.load(folder)
    if tokenizer.fingerprint != manifest.content.get("tokenizer"):
        raise UserError(
            f"The tokenizer in {str(folder)!r} does not match checkpoint {str(manifest.folder)!r}; "
            "expected the tokenizer*.model files that the run wrote. Restore them from a backup."
        )
    return tokenizer
