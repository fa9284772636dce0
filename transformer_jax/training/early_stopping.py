"""Early stopping: which evaluation on the dev set is the best, and when to stop waiting for a
better one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from typing import Any

from transformer_jax.config import Config
from transformer_jax.data.corpus import Corpus
from transformer_jax.training.progress import Progress

log = logging.getLogger(__name__)


def early_stopping_triggered(progress: Progress, config: Config) -> bool:
    """Whether ``training.patience`` evaluations in a row were no better than the best."""
    return 0 < config.training.patience <= progress.since_best


def note_evaluation(
    progress: Progress, figures: dict[str, Any], config: Config, *, step: int
) -> bool:
    """Take an evaluation's figures into ``progress``; returns whether it is the best so far by
    ``training.select_by``.
    """
    is_best = {}
    for name, sign in (("dev_loss", -1), ("dev_bleu", 1)):
        if name in figures:
            best = getattr(progress, f"best_{name}")
            is_best[name] = sign * figures[name] > (-math.inf if best is None else sign * best)
            if is_best[name]:
                setattr(progress, f"best_{name}", figures[name])
    selected = is_best.get(f"dev_{config.training.select_by}")
    if selected:
        progress.best_step, progress.since_best = step, 0
    elif selected is not None:  # else BLEU was not due
        progress.since_best += 1
    return bool(selected)


def selection(config: Config, dev_corpus: Corpus | None) -> list[Any]:
    """What the best evaluation is the best of: results on another dev set, or of another search,
    do not compare.
    """
    training = config.training
    dev = None if dev_corpus is None else dev_corpus.fingerprint
    if training.select_by == "loss":
        return [dev, "loss", training.label_smoothing]
    # These two do not change translations of dev.
    search = dataclasses.asdict(dataclasses.replace(config.decoding, batch_size=1, shortlist=""))
    settings = training.bleu_sentences, training.bleu_tokenize, search
    return json.loads(json.dumps([dev, "bleu", *settings]))


def forget_other_best(progress: Progress, selected: list[Any]) -> None:
    """Forget the best evaluation so far if it does not compare with those to come."""
    if progress.selected != selected:
        log.info("The dev set or how it is evaluated has changed: the best so far is forgotten.")
        progress.best_step = progress.best_dev_loss = progress.best_dev_bleu = None
        progress.since_best, progress.selected = 0, selected
