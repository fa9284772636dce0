"""What training remembers besides the state of the model and the optimizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Totals so far and the best evaluation; each checkpoint holds it as progress.json."""

    corpus: str = ""  # fingerprint of the training corpus
    train_seconds: float = 0.0  # without evaluation
    source_tokens: int = 0
    target_tokens: int = 0
    evaluations: int = 0
    evaluation_due: bool = False  # a signal or an error came before it had ended
    selected: list[Any] = field(default_factory=list)  # see ``early_stopping.selection``
    since_best: int = 0  # evaluations since the best one
    best_step: int | None = None
    best_dev_loss: float | None = None
    best_dev_bleu: float | None = None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        """From the content of progress.json, which also says what kind of checkpoint it is."""
        names = {each.name for each in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    @property
    def best(self) -> dict[str, Any]:
        """The fields about the best evaluation that are known."""
        values = dataclasses.asdict(self)
        return {
            name: value
            for name, value in values.items()
            if name.startswith("best_") and value is not None
        }
