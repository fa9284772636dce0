"""Training progress outside the train state: totals, best evaluation, early stopping."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformer_jax.errors import UserError, short_repr

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Totals and best evaluation so far, saved in each checkpoint's manifest."""

    corpus: str = ""  # fingerprint of the training corpus
    train_seconds: float = 0.0  # excluding evaluation
    tokens: int = 0  # source and target tokens, excluding padding
    selected: str = ""  # metric and dev set for selecting the best step
    since_best: int = 0  # number of evaluations since the best one
    best_step: int | None = None
    best: dict[str, float] = field(default_factory=dict)  # metrics at best_step

    @classmethod
    def parse(cls, fields: Any, name: str) -> Progress:
        """Parse the fields in a manifest. ``name`` is the manifest's file name in messages."""
        if not isinstance(fields, dict):
            raise UserError(f"{name}: progress is {short_repr(fields)}; expected a JSON object.")
        if differing := sorted(fields.keys() ^ vars(cls()).keys()):
            raise UserError(
                f"{name}: unknown or missing fields of progress: {', '.join(differing)}. Resume "
                "with the version of transformer_jax that wrote the checkpoint."
            )
        return cls(**fields)

    def early_stopping_triggered(self, patience: int) -> bool:
        """Return True after ``patience`` evaluations in a row without improvement; 0: never."""
        return 0 < patience <= self.since_best

    def record_evaluation(
        self, metrics: dict[str, Any], score: Callable[[dict[str, Any]], float], *, step: int
    ) -> None:
        """Record an evaluation's metrics. The evaluation with the highest ``score`` is the best."""
        best_score = score(self.best) if self.best else -math.inf
        if score(metrics) > best_score:
            self.best_step = step
            self.best = metrics
            self.since_best = 0
        else:
            self.since_best += 1

    def reset_best_if_criterion_changed(self, selected: str) -> None:
        """Reset the best evaluation if later evaluations cannot be compared with it."""
        if self.selected != selected:
            logger.info("The dev set or training.select_by has changed; resetting the best result.")
            self.best_step = None
            self.best = {}
            self.since_best = 0
            self.selected = selected
