"""What training remembers besides the state of the model and the optimizer: totals, the best
evaluation on the dev set, and with it when early stopping triggers.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformer_jax.config import Config
from transformer_jax.data.corpus import Corpus

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """Totals so far and the best evaluation; part of each checkpoint's manifest."""

    corpus: str = ""  # fingerprint of the training corpus
    train_seconds: float = 0.0  # without evaluation
    source_tokens: int = 0
    target_tokens: int = 0
    selected: list[Any] = field(default_factory=list)  # see ``selection``
    since_best: int = 0  # evaluations since the best one
    best_step: int | None = None
    best_dev_loss: float | None = None
    best_dev_bleu: float | None = None

    def early_stopping_triggered(self, config: Config) -> bool:
        """Whether ``training.patience`` evaluations in a row were no better than the best."""
        return 0 < config.training.patience <= self.since_best

    def note_evaluation(self, figures: dict[str, Any], config: Config, *, step: int) -> bool:
        """Take in an evaluation's figures; returns whether it is the best so far by
        ``training.select_by``.
        """
        is_best = {}
        for name, sign in (("dev_loss", -1), ("dev_bleu", 1)):
            if name in figures:
                best = getattr(self, f"best_{name}")
                is_best[name] = sign * figures[name] > (-math.inf if best is None else sign * best)
                if is_best[name]:
                    setattr(self, f"best_{name}", figures[name])
        selected = is_best.get(f"dev_{config.training.select_by}")
        if selected:
            self.best_step, self.since_best = step, 0
        elif selected is not None:  # else BLEU was not due
            self.since_best += 1
        return bool(selected)

    def forget_other_best(self, selected: list[Any]) -> None:
        """Forget the best evaluation so far if it does not compare with those to come."""
        if self.selected != selected:
            log.info(
                "The dev set or how it is evaluated has changed: the best so far is forgotten."
            )
            self.best_step = self.best_dev_loss = self.best_dev_bleu = None
            self.since_best, self.selected = 0, selected


def selection(config: Config, corpora: Mapping[str, Corpus]) -> list[Any]:
    """What the best evaluation is the best of: results on another dev set, or of another search,
    do not compare.
    """
    training = config.training
    dev = corpora["dev"].fingerprint if "dev" in corpora else None
    if training.select_by == "loss":
        return [dev, "loss", training.label_smoothing]
    # These two do not change translations of dev.
    search = dataclasses.asdict(dataclasses.replace(config.decoding, batch_size=1))
    settings = training.bleu_sentences, training.bleu_tokenize, search
    return json.loads(json.dumps([dev, "bleu", *settings]))
