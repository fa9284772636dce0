"""A trained model read from disk: the choice among its checkpoints, their parameters and their
mean.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from transformer_jax.checkpoint_files import (
    MANIFEST,
    DamagedError,
    checkpoint_name,
    complete_steps,
    is_regular,
    progress_of,
    verify,
)
from transformer_jax.config import Config
from transformer_jax.config_io import load_config_file
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def load_model(
    workdir: str | Path, *, average: int | None = None, checkpoint: str | int | None = None
) -> tuple[Config, Transformer, Tokenizer]:
    """A trained model from a work directory, or from one checkpoint's folder; from a URL by way of
    a copy.

    Args:
      average: mean of the parameters of this many checkpoints, the chosen one and the regular ones
        before it (section 6.1). None: with ``best`` or a step the chosen one alone, otherwise as
        many of the run's ``training.average`` as there are.
      checkpoint: ``last`` (damaged ones are passed over with a warning), ``best`` (on dev), or a
        step. None: the last; where ``training.patience`` ended the run, the best. Of one
        checkpoint's folder: None, ``last``, or its own step.

    Raises UserError if there is no such checkpoint, if it is damaged, or if there are fewer than
    ``average``.
    """
    workdir = local_workdir(workdir)
    chosen = choose_checkpoints(workdir, average=average, checkpoint=checkpoint)
    # How to decode may have changed since the checkpoint was saved.
    config = dataclasses.replace(
        _config_of(chosen[0]), decoding=_config_now(chosen[0], workdir).decoding
    )
    graph = nnx.split(
        nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0))), nnx.Param
    )[0]
    return (
        config,
        nnx.merge(graph, jax.tree.map(jnp.asarray, load_parameters(chosen))),
        Tokenizer.load(chosen[0]),
    )


def choose_checkpoints(
    workdir: Path, *, average: int | None = None, checkpoint: str | int | None = None
) -> list[Path]:
    """The folders of the checkpoints whose mean ``load_model`` takes, newest first; they are whole.
    Raises as it does.
    """
    if average is not None and average < 1:
        raise UserError(f"average is {average}; expected at least 1.")
    if (workdir / MANIFEST).exists():
        if checkpoint not in (None, "last") and str(checkpoint).zfill(8) != workdir.name:
            raise UserError(
                f"checkpoint is {checkpoint!r}, but {str(workdir)!r} is the folder of one checkpoint; expected last, or the "
                "run's own folder."
            )
        paths = [workdir]
    else:
        paths = _candidates(workdir, "last" if checkpoint is None else checkpoint)
    of_the_run = checkpoint in (None, "last")
    whole = _whole(paths, skip_damaged=of_the_run and len(paths) > 1)
    newest = next(whole, None)
    if (
        checkpoint is None
        and newest not in (None, workdir)
        and (best := _best_of_ended_run(newest)) is not None
    ):
        paths = _candidates(workdir, best)
        whole = _whole(paths, skip_damaged=len(paths) > 1)
        newest = next(whole, None)
    if newest is None:
        raise UserError(
            f"All {len(paths)} checkpoints in {paths[0].parent} are damaged; expected at least one that is whole."
        )
    wanted = average or (_config_now(newest, workdir).training.average if of_the_run else 1)
    chosen = [newest, *islice(whole, wanted - 1)]
    if average is not None and len(chosen) < average:
        raise UserError(
            f"average is {average}; expected at most {len(chosen)}, the number of checkpoints up to the chosen one."
        )
    return chosen


def load_parameters(paths: Sequence[Path]) -> Any:
    """The mean of the parameters (with ``optimizer.ema_decay``: of their moving averages) in these
    checkpoints' folders, a nested dict of NumPy arrays.
    """
    model = _config_of(paths[0]).model
    abstract = nnx.eval_shape(lambda: nnx.state(Transformer(model, rngs=nnx.Rngs(0)), nnx.Param))
    # restored as NumPy arrays
    shapes = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), nnx.to_pure_dict(abstract))

    def load(path: Path) -> Any:
        which = "ema" if _config_of(path).optimizer.ema_decay > 0 else "parameters"
        return ocp.load_checkpointables(path / "state", {which: shapes})[which]

    parameters = mean_parameters(map(load, paths))
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(parameters)):
        raise UserError(
            f"The parameters in {', '.join(map(str, paths))} are not all finite numbers: training diverged, or they were saved "
            "by something else. Expected a checkpoint from before."
        )
    return parameters


def _config_of(folder: Path) -> Config:
    return load_config_file(folder / "config.json")


def _config_now(checkpoint: Path, workdir: Path) -> Config:
    """The work directory's config, or the checkpoint's where there is no such directory."""
    return _config_of(workdir if (workdir / "config.json").is_file() else checkpoint)


def mean_parameters(trees: Iterable[Any]) -> Any:
    """Mean of trees of NumPy arrays, taken one at a time."""
    total, count = None, 0
    for tree in trees:
        total, count = (tree if total is None else jax.tree.map(np.add, total, tree)), count + 1
    return jax.tree.map(lambda x: x / np.float32(count), total)


def patience_is_over(progress: dict[str, Any], config: Config) -> bool:
    """Whether dev has not got better for as long as ``training.patience`` says, at a checkpoint
    with this progress.
    """
    return 0 < config.training.patience <= progress.get("since_best", 0)


def _best_of_ended_run(newest: Path) -> int | None:
    """The step of the best checkpoint on dev, if patience ended the run at this one and the best is
    there.
    """
    progress = progress_of(newest)
    best = progress.get("best_step") if patience_is_over(progress, _config_of(newest)) else None
    return best if best in complete_steps(newest.parent) else None


def _candidates(workdir: Path, checkpoint: str | int) -> list[Path]:
    """The chosen checkpoint and those before it, newest first."""
    folder = workdir / "checkpoints"
    steps = complete_steps(folder) if folder.is_dir() else []
    if not steps:
        raise UserError(
            f"{str(workdir)!r} holds no checkpoint; expected a work directory written by train.py --workdir, "
            "or one of the folders in its checkpoints/."
        )
    listed = ", ".join(map(str, steps))
    step: int | None
    if checkpoint == "last":
        step = steps[-1]
    elif checkpoint == "best":
        newest = next(
            _whole([folder / checkpoint_name(step) for step in reversed(steps)], skip_damaged=True),
            None,
        )
        # With none whole, loading the newest will tell what is wrong with it.
        step = steps[-1] if newest is None else progress_of(newest).get("best_step")
        if step not in steps:
            why = (
                "nothing was evaluated on dev"
                if step is None
                else f"that of step {step} could not be saved"
            )
            raise UserError(
                f"There is no best checkpoint: {why}. Expected last, or one of {listed}."
            )
    else:
        step = int(checkpoint) if str(checkpoint).isdigit() else None
    if step not in steps:
        raise UserError(
            f"checkpoint is {checkpoint!r}; expected last, best, or one of the steps {listed}."
        )
    before = [folder / checkpoint_name(s) for s in reversed(steps) if s < step]
    return [folder / checkpoint_name(step), *filter(is_regular, before)]


def _whole(paths: list[Path], *, skip_damaged: bool) -> Iterator[Path]:
    """Those of ``paths`` that are whole; a damaged one is an error, or passed over."""
    for path in paths:
        try:
            verify(path)
        except DamagedError as error:
            if not skip_damaged:
                raise UserError(
                    f"Checkpoint {path} is damaged: {error}. Choose another with --checkpoint."
                ) from None
            log.warning(
                "Checkpoint %s is damaged (%s); going on with the one before it.", path, error
            )
        else:
            yield path
