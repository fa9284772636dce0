"""Figures of the positional encoding (paper section 3.5) and of the learning rate (section 5.3).

    python examples/figures.py

writes positions.svg (the sinusoids) and schedule.svg (the learning rate for two model widths and
two warmup lengths) and prints the file names.
"""

from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

import transformer_jax as tj


def positions() -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    table_LD = tj.sinusoidal_positions(100, 128)
    image = axes.imshow(table_LD, vmin=-1, vmax=1, cmap="RdBu", aspect="auto")
    axes.set(xlabel="dimension", ylabel="position", title="interleaved sines and cosines")
    figure.colorbar(image)
    return figure


def schedule() -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, 20_001)
    for d_model, warmup_steps in [(512, 4000), (512, 8000), (256, 4000)]:
        settings = tj.OptimizerConfig(warmup_steps=warmup_steps)
        rate = tj.learning_rate_schedule(settings, d_model)  # counts from 0, as optax does
        axes.plot(steps, rate(steps - 1), label=f"d_model {d_model}, {warmup_steps:,} warmup steps")
    axes.set(xlabel="step", ylabel="learning rate")
    axes.legend()
    return figure


def main(folder: Path = Path()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for figure in (positions, schedule):
        file = folder / f"{figure.__name__}.svg"
        figure().savefig(file)
        print(file)


if __name__ == "__main__":
    raise SystemExit(tj.run_program(lambda: tyro.cli(main)))
