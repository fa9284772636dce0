"""Figures of the positional encoding (paper section 3.5) and of the learning rate (section 5.3).

    python examples/figures.py

writes positions.svg (the sinusoids) and schedule.svg (the learning rate for two model widths and
two warmup lengths) and prints the file names. Both are matplotlib figures that you can modify.
"""

from pathlib import Path

import numpy as np
import tyro

import transformer_jax as tj
from transformer_jax.figures import positions_picture, save_picture, schedule_picture


def main(folder: Path = Path()) -> None:
    positions = positions_picture(tj.sinusoidal_positions(100, 128))
    positions.axes[0].set_title("interleaved sines and cosines", fontsize=9)

    steps, curves = np.arange(1, 20_001), {}
    for d_model, warmup_steps in [(512, 4000), (512, 8000), (256, 4000)]:
        settings = tj.OptimizerConfig(warmup_steps=warmup_steps)
        rate = tj.learning_rate_schedule(settings, d_model)  # counts from 0, as optax does
        name = f"d_model {d_model}, {warmup_steps:,} warmup steps"
        curves[name] = steps, np.asarray(rate(steps - 1))

    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in {"positions": positions, "schedule": schedule_picture(curves)}.items():
        save_picture(figure, folder / f"{name}.svg")
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    tyro.cli(main)
