"""Draw the positional encoding (section 3.5) or the learning rate (section 5.3).

python -m transformer_jax.pictures positions --output positions.svg
python -m transformer_jax.pictures schedule --config demo --output schedule.svg
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import tyro

from transformer_jax.cli import PICTURES, check_output, run_program
from transformer_jax.config import Config
from transformer_jax.config_checks import Positive, Rule, Section
from transformer_jax.config_io import load_config_file


@dataclass(frozen=True)
class Positions(Section):
    """Draw the sinusoids that are added to the embeddings."""

    output: str
    """File to write: .svg, .png or .pdf."""
    d_model: Positive = 512
    """Dimensions of a position's vector."""
    length: Positive = 100
    """Positions, from 0."""
    layout: Literal["interleaved", "split"] = "interleaved"
    """Sines and cosines in turn, as in the paper, or all sines first (model.positions)."""

    def rules(self) -> Iterator[Rule]:
        """Each frequency has a sine and a cosine."""
        yield "d_model", self.d_model % 2 == 0, "an even number"


@dataclass(frozen=True)
class Schedule(Section):
    """Draw the learning rate of each step: a curve for each config, d_model and warm-up."""

    output: str
    """File to write: .svg, .png or .pdf."""
    config: tuple[str, ...] = ()
    """Recipes or config files. Default: the paper's base model."""
    d_model: tuple[int, ...] = ()
    """Values of model.d_model. Default: the config's."""
    warmup_steps: tuple[int, ...] = ()
    """Values of optimizer.warmup_steps. Default: the config's."""
    steps: Positive | None = None
    """Steps to draw. Default: the config's training.steps."""

    def rules(self) -> Iterator[Rule]:
        """Ranges of the values."""
        for name in ("d_model", "warmup_steps"):
            yield name, min(getattr(self, name), default=1) > 0, "positive numbers"


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status, as ``run_program`` has it."""
    return run_program(lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    task = tyro.cli(
        Positions | Schedule,  # type: ignore[arg-type]
        prog="python -m transformer_jax.pictures",
        args=argv,
        description="Draw the positional encoding or the learning rate.",
    )
    check_output(task.output, endings=PICTURES)
    # here, so that flags are checked before JAX and matplotlib are loaded
    from transformer_jax.model.positions import sinusoidal_positions
    from transformer_jax.pictures.drawing import positions_picture, save_picture, schedule_picture

    if isinstance(task, Positions):
        table_LD = sinusoidal_positions(task.length, task.d_model, layout=task.layout)
        figure = positions_picture(table_LD)
    else:
        figure = schedule_picture(_curves(task))
    save_picture(figure, task.output)


def _curves(task: Schedule) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    from transformer_jax.training.optimizer import learning_rate_schedule

    curves = {}
    configs = {f"{name}: ": load_config_file(name) for name in task.config}
    for name, config in (configs or {"": Config()}).items():
        widths = task.d_model or [config.model.d_model]
        warmups = task.warmup_steps or [config.optimizer.warmup_steps]
        last = task.steps or config.training.steps
        steps = np.unique([*np.linspace(1, last, 1000, dtype=int), *np.minimum(warmups, last)])
        for d_model, warmup_steps in product(widths, warmups):
            optimizer = dataclasses.replace(config.optimizer, warmup_steps=warmup_steps)
            schedule = learning_rate_schedule(optimizer, d_model, config.training.steps)
            label = f"{name}d_model {d_model}, warm-up {warmup_steps:,}"
            curves[label] = steps, np.asarray(schedule(steps - 1))
    return curves


if __name__ == "__main__":
    sys.exit(main())
