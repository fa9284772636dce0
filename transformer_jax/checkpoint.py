"""Checkpoints on disk: their format, whether they are intact, and the models they hold.

A checkpoint is a folder that can be used on its own; ``training/saver.py`` writes it::

    checkpoints/00000500/
        config.json, tokenizer.model
        progress.json    what training remembers besides the state
        state/           Orbax: parameters, ema (if configured), rest (optimizer state, counters)
        manifest.json    size and CRC-32 of every file; written last: without it, no checkpoint
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import shutil
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from transformer_jax.config import Config
from transformer_jax.config_io import load_config_file, to_json
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.storage import AnyPath, is_url, write_atomically
from transformer_jax.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"


def load_model(
    workdir: str | Path,
    *,
    average: int | None = None,
    checkpoint: str | int | None = None,
) -> tuple[Config, Transformer, Tokenizer]:
    """The trained model of a work directory, or of a single checkpoint's folder.

    Args:
      average: take the mean of the parameters of this many checkpoints: the chosen one and the
        regular ones before it (section 6.1). None: with ``best`` or a step the chosen one alone;
        otherwise what the end of the run chose (``averaged_steps`` in summary.json), or, if it has
        not ended, up to ``training.average`` (``auto``: one).
      checkpoint: ``last``, ``best`` (on the dev set), or a step. None: the last, or the newest of
        those that the end of the run chose. For a single checkpoint: None, ``last``, or its own
        step.

    Raises:
      UserError: there is no such checkpoint, one is corrupt, or there are fewer than ``average``.
    """
    if is_url(str(workdir)):
        raise UserError(
            f"workdir is {str(workdir)!r}; expected a folder (decode.py and "
            "Translator.from_workdir take URLs)."
        )
    workdir = Path(workdir).absolute()
    chosen = choose_checkpoints(workdir, average=average, checkpoint=checkpoint)
    config, now = config_of(chosen[0]), _current_config(workdir, chosen[0])
    trained = vars(config.model)
    for name, value in vars(now.model).items():
        if value != trained[name] and not name.endswith("vocab_size"):
            log.warning(
                "model.%s is %r in %s/config.json; this has no effect, the model was trained with "
                "%r.",
                *(name, value, workdir, trained[name]),
            )
    config = dataclasses.replace(config, decoding=now.decoding)
    graph, _ = nnx.split(_abstract_model(config), nnx.Param)
    log.info("%s: %s.", workdir, described(chosen))
    parameters = jax.tree.map(jnp.asarray, load_parameters(chosen))
    return config, nnx.merge(graph, parameters), Tokenizer.load(chosen[0])


def save_model(
    workdir: str | Path, config: Config, model: Transformer, tokenizer: Tokenizer
) -> None:
    """Write a model that was not trained here as a new work directory.

    Programs take the folder as they take that of a run. Training in it continues from the model's
    parameters, with a new optimizer.

    Args:
      workdir: the folder; it must not have checkpoints.
      config: settings of the run. Its ``model`` is replaced by ``model.config``.

    Raises:
      FileExistsError: the folder has a checkpoint of step 0.
    """
    workdir, config = Path(workdir), dataclasses.replace(config, model=model.config)
    path = workdir.absolute() / "checkpoints" / checkpoint_name(0)
    path.mkdir(parents=True)
    (path / "progress.json").write_text(json.dumps({"imported": True}, indent=2))
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    ocp.save_checkpointables(path / "state", {"parameters": parameters})
    for folder in (path, workdir):
        tokenizer.save(folder)
        # The work directory's comes last: a folder without config.json is no work directory.
        (folder / "config.json").write_text(to_json(config))
        if folder == path:
            write_manifest(path)


def choose_checkpoints(
    workdir: Path,
    *,
    average: int | None = None,
    checkpoint: str | int | None = None,
) -> list[Path]:
    """The folders of the checkpoints whose mean ``load_model`` takes: intact, newest first.

    Takes the same arguments and raises the same errors.
    """
    if average is not None and average < 1:
        raise UserError(f"average is {average}; expected at least 1.")
    intact = functools.cache(_intact)  # no checkpoint is read twice
    latest = checkpoint in (None, "last")
    if (workdir / MANIFEST).exists():
        if not latest and str(checkpoint).zfill(8) != workdir.name:
            raise UserError(
                f"checkpoint is {checkpoint!r}, but {str(workdir)!r} is the folder of a single "
                "checkpoint; expected last, or the folder of the whole run."
            )
        folders = [workdir]
        chosen = intact(workdir)
    else:
        steps = complete_steps(workdir / "checkpoints")
        if not steps:
            raise UserError(
                f"{str(workdir)!r} holds no checkpoint; expected a work directory written by "
                "train.py --workdir, or one of the folders in its checkpoints/."
            )
        folders = [workdir / "checkpoints" / checkpoint_name(step) for step in reversed(steps)]
        ended = _chosen_at_the_end(workdir, folders)
        if average is checkpoint is None:
            if ended:
                return list(map(intact, ended))
            log.info("Training in %s has not ended: its last checkpoint counts.", workdir)
        chosen = (ended or folders)[0]
        if checkpoint is not None:
            chosen = _choose(workdir, folders, checkpoint)
        chosen = intact(chosen)
    default = _current_config(workdir, chosen).training.average if latest else 1
    found = up_to(chosen, folders, average or (1 if default == "auto" else default))
    if average is not None and len(found) < average:
        raise UserError(
            f"average is {average}; expected at most {len(found)}, the number of checkpoints up to "
            "the chosen one."
        )
    return list(map(intact, found))


def up_to(chosen: Path, folders: Sequence[Path], most: int) -> list[Path]:
    """A checkpoint and the regular ones before it, at most so many; ``folders`` newest first."""
    before = filter(is_regular, folders[folders.index(chosen) + 1 :])
    return [chosen, *islice(before, most - 1)]


def described(checkpoints: Sequence[Path]) -> str:
    """Words for the checkpoints whose mean is taken, newest first."""
    first, last = (checkpoints[i].name.lstrip("0") or "0" for i in (-1, 0))
    if len(checkpoints) == 1:
        return f"checkpoint {last}"
    return f"mean of {len(checkpoints)} checkpoints, {first} to {last}"


def _summary(workdir: Path) -> dict[str, Any]:
    """What the last start of training wrote when it ended; empty if nothing."""
    try:
        return json.loads((workdir / "summary.json").read_text())
    except (OSError, ValueError):
        return {}


def _chosen_at_the_end(workdir: Path, folders: Sequence[Path]) -> list[Path]:
    """The checkpoints that the end of training chose; empty if it has not ended."""
    summary = _summary(workdir)
    if summary.get("steps") != int(folders[0].name):  # it went on
        return []
    names = [checkpoint_name(step) for step in summary.get("averaged_steps", [])]
    return [workdir / "checkpoints" / name for name in names]


def _choose(workdir: Path, folders: Sequence[Path], checkpoint: str | int) -> Path:
    """One of a run's checkpoints, which are given newest first."""
    by_step = {int(folder.name): folder for folder in folders}
    listed = ", ".join(map(str, sorted(by_step)))
    if checkpoint == "last":
        return folders[0]
    if checkpoint != "best":
        step = int(checkpoint) if str(checkpoint).isdigit() else None
        if step not in by_step:
            raise UserError(
                f"checkpoint is {checkpoint!r}; expected last, best, or one of the steps {listed}."
            )
        return by_step[step]
    noted = progress_of(_intact(folders[0]))
    summary = _summary(workdir)
    if summary.get("steps") == int(folders[0].name):  # an evaluation follows its checkpoint
        noted |= summary
    step = noted.get("best_step")
    if step not in by_step:
        why = (
            "the run was not evaluated on a dev set"
            if step is None
            else f"that of step {step} could not be saved"
        )
        raise UserError(f"There is no best checkpoint: {why}. Expected last, or one of {listed}.")
    return by_step[step]


def load_parameters(checkpoints: Sequence[Path]) -> Any:
    """The mean of these checkpoints' parameters, a nested dict of NumPy arrays; with
    ``optimizer.ema_decay``, of their moving averages.
    """
    mean: Any = None
    for mean in load_means(checkpoints):  # holds three of them at a time  # noqa: B007
        pass
    return mean


def load_means(checkpoints: Sequence[Path]) -> Iterator[Any]:
    """The means of the first, the first two, and so on, as ``load_parameters`` gives them."""
    model = _abstract_model(config_of(checkpoints[0]))
    abstract = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    wanted = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), abstract)

    def load(folder: Path) -> Any:
        which = "ema" if config_of(folder).optimizer.ema_decay > 0 else "parameters"
        return ocp.load_checkpointables(folder / "state", {which: wanted})[which]

    total: Any = None
    for count, folder in enumerate(checkpoints, start=1):
        loaded = load(folder)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(loaded)):
            raise UserError(
                f"The parameters in {folder} are not all finite numbers: training diverged, or "
                "another program saved them. Choose an earlier checkpoint."
            )
        total = loaded if total is None else jax.tree.map(np.add, total, loaded)
        yield jax.tree.map(lambda x, count=count: x / np.float32(count), total)


def checkpoint_name(step: int) -> str:
    """The name of a step's folder in ``checkpoints/``."""
    return f"{step:08d}"


def complete_steps(checkpoints: AnyPath) -> list[int]:
    """The steps of the complete checkpoints in a ``checkpoints/`` folder, oldest first."""
    names = [path.parent.name for path in checkpoints.glob(f"*/{MANIFEST}")]
    return sorted(int(name) for name in names if name.isdigit())


def config_of(folder: Path) -> Config:
    """The config of a checkpoint or work directory."""
    return load_config_file(folder / "config.json")


def progress_of(checkpoint: Path) -> dict[str, Any]:
    """What training remembered besides the state; empty if that file is corrupt."""
    try:
        return json.loads((checkpoint / "progress.json").read_text())
    except (OSError, ValueError):  # ``damage`` reports it
        return {}


def is_imported(checkpoint: Path) -> bool:
    """Whether a checkpoint holds only parameters, imported for training to start from."""
    return bool(progress_of(checkpoint).get("imported"))


def is_regular(checkpoint: Path) -> bool:
    """Whether a checkpoint was saved on schedule, not for an interruption or an evaluation.

    Only regular ones are kept and averaged, so that interruptions do not change a run's result.
    """
    every = config_of(checkpoint).training.checkpoint_every
    return int(checkpoint.name) % every == 0 and not is_imported(checkpoint)


def write_manifest(checkpoint: Path) -> None:
    """Declare the checkpoint complete."""
    entries = {
        path.relative_to(checkpoint).as_posix(): [path.stat().st_size, _checksum(path)]
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }
    write_atomically(checkpoint / MANIFEST, json.dumps(entries, indent=1))


def delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint; without its manifest it is none, however far deleting gets."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def damage(checkpoint: Path) -> str:
    """How a checkpoint's files differ from those that were saved; empty if they do not."""
    try:
        for name, (size, checksum) in json.loads((checkpoint / MANIFEST).read_text()).items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size or _checksum(path) != checksum:
                return f"{name} does not have the content that was saved"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({str(error) or type(error).__name__})"
    return ""


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _abstract_model(config: Config) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))


def _current_config(workdir: Path, checkpoint: Path) -> Config:
    """The work directory's config, or the checkpoint's if there is no work directory."""
    return config_of(workdir if (workdir / "config.json").is_file() else checkpoint)


def _intact(checkpoint: Path) -> Path:
    """The checkpoint; ``UserError`` if it is corrupt."""
    if reason := damage(checkpoint):
        raise UserError(
            f"Checkpoint {checkpoint} is corrupt: {reason}. Choose another with --checkpoint."
        )
    return checkpoint
