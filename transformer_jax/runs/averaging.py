"""Retention and averaging: the checkpoints that a run keeps, and those that its model averages.

Steps are listed newest first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax.runs.checkpoint_folder import checkpoint_name, read_parameters
from transformer_jax.runs.manifest import Manifest
from transformer_jax.settings.config import TrainingConfig
from transformer_jax.storage.files import AnyPath

logger = logging.getLogger(__name__)


def retained_steps(
    checkpoints: AnyPath, steps: Sequence[int], best_step: int | None, training: TrainingConfig
) -> set[int]:
    """Return the steps whose checkpoints to keep, of those in a ``checkpoints/`` folder.

    These are the newest one, the newest ``keep_checkpoints`` scheduled ones, and those that can be
    averaged for the model.
    """
    scheduled_steps, candidates = _candidates(checkpoints, steps, best_step, training)
    return {*scheduled_steps[: training.keep_checkpoints]}.union(*candidates)


def choose_average(
    checkpoints: AnyPath,
    steps: Sequence[int],
    best_step: int | None,
    training: TrainingConfig,
    *,
    stopped_early: bool,
    dev_loss: Callable[[Any], float] | None,
) -> tuple[list[int], Any]:
    """Choose the steps to average for a run's model. Returns them and their average.

    ``training.average`` sets how many; ``auto`` selects the number with the lowest dev loss, and a
    fixed number is compared with it.
    """
    _, candidates = _candidates(checkpoints, steps, best_step, training)
    if training.average != "auto":
        candidates = candidates[-1:] if stopped_early else candidates[:1]
    elif dev_loss is None:
        logger.info("data.dev is not set, so training.average = auto uses the last checkpoint.")
        candidates = [steps[:1]]
    num_averages = sum(map(len, candidates))
    if num_averages == 1:
        dev_loss = None  # nothing to compare
    best: _Average | None = None
    for candidate in candidates:
        for count, parameters in enumerate(load_averages(checkpoints, candidate), start=1):
            loss = min(math.inf, dev_loss(parameters)) if dev_loss else math.inf  # NaN is the worst
            average = _Average(candidate[:count], loss, parameters)
            if best is None or average.loss < best.loss:
                best = average
    assert best is not None
    if training.average == "auto":
        return list(best.steps), best.parameters
    # The last average is of the fixed number of checkpoints, or of all if there are fewer.
    if best.loss < average.loss:
        logger.info(
            "On the dev set, the %s is better (loss %.4f) than the average of %d (%.4f); run "
            "again with --training.average auto to use it.",
            *(describe_steps(best.steps), best.loss, len(average.steps), average.loss),
        )
    return list(average.steps), average.parameters


class _Average(NamedTuple):
    """Average of the checkpoints of some steps, newest first."""

    steps: Sequence[int]
    loss: float
    """On the dev set; infinite if NaN or not computed."""
    parameters: Any


def describe_steps(steps: Sequence[int]) -> str:
    """Describe averaged checkpoints (newest first) for a message; none: an imported model."""
    if len(steps) < 2:
        return f"checkpoint {steps[0]}" if steps else "imported model"
    return f"average of {len(steps)} checkpoints, {steps[-1]} to {steps[0]}"


def load_averages(checkpoints: AnyPath, steps: Sequence[int]) -> Iterator[Any]:
    """Yield the average of the first n steps' checkpoints, for n = 1, 2, and so on.

    Each checkpoint is verified and read once.
    """
    first = total = None
    for count, step in enumerate(steps, start=1):
        checkpoint = Manifest(checkpoints / checkpoint_name(step))
        checkpoint.verify()
        loaded = read_parameters(checkpoint)
        first = loaded if first is None else first
        total = loaded if total is None else jax.tree.map(np.add, total, loaded)
        yield jax.tree.map(partial(_mean, count), first, loaded, total)


def _mean(count: int, first: np.ndarray, last: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return the mean, without rounding if the parameter is frozen."""
    return first if np.array_equal(first, last) else total / np.float32(count)


def _candidates(
    checkpoints: AnyPath, steps: Sequence[int], best_step: int | None, training: TrainingConfig
) -> tuple[list[int], list[Sequence[int]]]:
    """Return the scheduled steps, and the steps to average up to the newest and the best one.

    Averages skip checkpoints saved only for an interruption or an evaluation, so interruptions do
    not change a run's result. The interval is the one with which a checkpoint was saved.
    """

    def is_scheduled(step: int) -> bool:
        config = Manifest(checkpoints / checkpoint_name(step)).config
        return step % config.training.checkpoint_every == 0

    scheduled_steps = [step for step in steps if is_scheduled(step)]
    limit = training.keep_checkpoints if training.average == "auto" else training.average
    ends = [step for step in steps if step in (steps[0], best_step)]
    return scheduled_steps, [
        [end, *(step for step in scheduled_steps if step < end)][:limit] for end in ends
    ]
