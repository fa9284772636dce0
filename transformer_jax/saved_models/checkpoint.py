"""Checkpoint format, integrity checks, and model loading.

Layout of a work directory, local or in an object store (written by ``training/saver.py``)::

    config.json, tokenizer.model
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
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer, abstract_model
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import from_json, load_config_file, to_json
from transformer_jax.storage.files import (
    MANIFEST,
    AnyPath,
    files_in,
    local_path,
    remove_folder,
    write_atomically,
)
from transformer_jax.tokenization.tokenizer import Tokenizer

log = logging.getLogger(__name__)

P = TypeVar("P", bound=AnyPath)


def load_model(path: str | Path) -> tuple[Config, Transformer, Tokenizer]:
    """Load the trained model from a work directory or one of its checkpoints.

    For a work directory, averages the checkpoints chosen at the end of training (``averaged_steps``
    in summary.json) or, before that, loads the last checkpoint. Raises ``UserError`` if a
    checkpoint is missing or corrupt.
    """
    chosen = choose_checkpoints(local_path(path))
    workdir = chosen[0].parents[1]
    decoding = load_config_file(workdir / "config.json").decoding
    config = dataclasses.replace(config_of(chosen[0]), decoding=decoding)
    graph = abstract_model(config.model).graph
    log.info("%s: %s.", path, described(chosen))
    parameters = jax.tree.map(jnp.asarray, load_parameters(chosen))
    return config, nnx.merge(graph, parameters), load_tokenizer(workdir, chosen[0])


def save_model(
    workdir: str | Path, config: Config, model: Transformer, tokenizer: Tokenizer
) -> None:
    """Save a model that was not trained here as a new work directory.

    Programs accept the folder as a work directory, but training cannot resume in it. To fine-tune
    the model, pass the folder as ``training.start_from`` and train in another one.

    Args:
      workdir: the new folder; it must not contain checkpoints.
      config: settings to save. ``model.config`` replaces their ``model`` field.

    Raises:
      FileExistsError: the folder already has checkpoints.
    """
    workdir, config = local_path(workdir), dataclasses.replace(config, model=model.config)
    path = workdir / "checkpoints" / checkpoint_name(0)
    path.parent.mkdir(parents=True)
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    ocp.save_checkpointables(path / "state", {"parameters": parameters})
    write_manifest(path, config, tokenizer)
    tokenizer.save(workdir)
    # Written last: a folder without config.json is not a work directory.
    (workdir / "config.json").write_text(to_json(config))


def choose_checkpoints(path: Path) -> list[Path]:
    """Return the folders of the checkpoints that ``load_model`` averages, newest first.

    Raises the same errors as ``load_model``. All returned checkpoints are intact.
    """
    is_checkpoint = path.parent.name == "checkpoints" and path.name.isdigit()
    workdir = path.parents[1] if is_checkpoint else path
    steps = complete_steps(workdir / "checkpoints")
    folders = [workdir / "checkpoints" / checkpoint_name(step) for step in reversed(steps)]
    if not folders or (is_checkpoint and path not in folders):
        raise UserError(
            f"{str(path)!r} has no checkpoint; expected a work directory written by train.py "
            "--workdir, or one of the folders in its checkpoints/."
        )
    chosen = [path] if is_checkpoint else _chosen_at_the_end(workdir, folders)
    for checkpoint in chosen:
        if reason := corruption(checkpoint):
            raise UserError(
                f"Checkpoint {checkpoint} is corrupt: {reason}. Pass the folder of another "
                "checkpoint."
            )
    return chosen


def _chosen_at_the_end(workdir: Path, folders: list[Path]) -> list[Path]:
    """Return the checkpoints listed in summary.json, or the last one if training has not ended."""
    with suppress(OSError, ValueError, KeyError):
        summary = json.loads((workdir / "summary.json").read_text())
        if summary["steps"] == int(folders[0].name) and "averaged_steps" in summary:
            return [workdir / "checkpoints" / checkpoint_name(s) for s in summary["averaged_steps"]]
    if int(folders[0].name):  # not an imported model
        log.info("Training in %s has not finished; using its last checkpoint.", workdir)
    return folders[:1]


def up_to(chosen: P, folders: Sequence[P], most: int, every: int) -> list[P]:
    """Return up to ``most`` checkpoints, newest first: ``chosen`` and scheduled ones before it.

    Checkpoints at multiples of ``every`` steps are scheduled. Checkpoints saved for an interruption
    or an evaluation are excluded, so interruptions do not change a run's result.
    """
    older = folders[folders.index(chosen) + 1 :]
    return [chosen, *[path for path in older if int(path.name) % every == 0][: most - 1]]


def described(checkpoints: Sequence[AnyPath]) -> str:
    """Describe averaged checkpoints (newest first) for a message."""
    first, last = (int(checkpoints[i].name) for i in (-1, 0))
    if len(checkpoints) == 1:
        return f"checkpoint {last}"
    return f"average of {len(checkpoints)} checkpoints, {first} to {last}"


def load_parameters(checkpoints: Sequence[AnyPath]) -> Any:
    """Average the parameters of checkpoints, or their EMA if ``optimizer.ema_decay`` is set.

    Returns a nested dict of NumPy arrays.
    """
    return deque(load_averages(checkpoints), maxlen=1).pop()


def load_averages(checkpoints: Sequence[AnyPath]) -> Iterator[Any]:
    """Yield the average of the first n checkpoints, for n = 1, 2, and so on.

    Each checkpoint is read once. See ``load_parameters`` for what is averaged.
    """
    abstract = abstract_model(config_of(checkpoints[0]).model).parameters
    wanted = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), abstract)
    total: Any = None
    for count, folder in enumerate(checkpoints, start=1):
        which = "ema" if config_of(folder).optimizer.ema_decay > 0 else "parameters"
        loaded = ocp.load_checkpointables(str(folder / "state"), {which: wanted})[which]
        total = loaded if total is None else jax.tree.map(np.add, total, loaded)
        yield jax.tree.map(lambda x, count=count: x / np.float32(count), total)


def checkpoint_name(step: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"{step:08d}"


def complete_steps(checkpoints: AnyPath) -> list[int]:
    """Return the steps of complete checkpoints in a ``checkpoints/`` folder, oldest first.

    An imported model is step 0.
    """
    names = (name.partition("/") for name in files_in(checkpoints))
    return [int(step) for step, _, file in names if file == MANIFEST and step.isdigit()]


def config_of(checkpoint: AnyPath) -> Config:
    """Return the config that a checkpoint was trained with."""
    return from_json(json.dumps(_manifest(checkpoint).get("config")))


def progress_of(checkpoint: AnyPath) -> dict[str, Any]:
    """Return the saved training progress, empty for a corrupt checkpoint or an imported model."""
    return _manifest(checkpoint).get("progress", {})  # type: ignore[no-any-return]


def load_tokenizer(folder: Path, checkpoint: AnyPath) -> Tokenizer:
    """Load a work directory's tokenizer.

    Raises ``UserError`` if the checkpoint was trained with another tokenizer.
    """
    tokenizer = Tokenizer.load(folder)
    if tokenizer.fingerprint != _manifest(checkpoint).get("tokenizer"):
        raise UserError(
            f"The tokenizer in {str(folder)!r} does not match checkpoint {str(checkpoint)!r}; "
            "expected the tokenizer*.model files that the run wrote. Restore them from a backup."
        )
    return tokenizer


def write_manifest(
    checkpoint: AnyPath,
    config: Config,
    tokenizer: Tokenizer,
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Write the manifest, which marks the checkpoint as complete."""
    content: dict[str, Any] = {
        "config": dataclasses.asdict(config),
        "tokenizer": tokenizer.fingerprint,
        "progress": progress or {},
        "files": {name: _checksum(checkpoint / name) for name in files_in(checkpoint)},
    }
    content = {"checksum": zlib.crc32(json.dumps(content).encode()), **content}
    path = checkpoint / MANIFEST
    text = json.dumps(content, indent=1)
    write_atomically(path, text) if isinstance(path, Path) else path.write_text(text)


def _manifest(checkpoint: AnyPath) -> dict[str, Any]:
    """Return the contents of a checkpoint's manifest, empty if it is missing or not JSON."""
    try:
        content = json.loads((checkpoint / MANIFEST).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    if "progress.json" in content:
        raise UserError(
            f"{str(checkpoint)!r} was written by an earlier version of transformer_jax and is no "
            "longer supported. Load it with load_model from commit ef0d56b."
        )
    return content  # type: ignore[no-any-return]


def delete_checkpoint(checkpoint: AnyPath) -> None:
    """Delete a checkpoint, manifest first, so a half-deleted one does not look complete."""
    if not (isinstance(checkpoint, Path) and checkpoint.is_symlink()):
        (checkpoint / MANIFEST).unlink(missing_ok=True)
    remove_folder(checkpoint)


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


def corruption(checkpoint: AnyPath) -> str:
    """Return the reason a checkpoint is corrupt, or an empty string if it is intact."""
    content = _manifest(checkpoint)
    if content.pop("checksum", None) != zlib.crc32(json.dumps(content).encode()):
        return f"{MANIFEST} is missing or has changed since it was saved"
    for name, checksum in content["files"].items():
        try:
            if _checksum(checkpoint / name) != checksum:
                return f"{name} has changed since it was saved"
        except FileNotFoundError:
            return f"{name} is missing"
    return ""


def _checksum(path: AnyPath) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum
