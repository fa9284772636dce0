"""What ``train_speed.py`` asks of every engine."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# As in transformer_jax.special_ids; engines other than ours do not import the package.
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
NAMES = ("ours", "torch_eager", "torch_compile")
PRODUCTS = 20  # matrix products timed together, so that launching them counts little


@dataclass(frozen=True)
class Job:
    """What all engines are given, besides the batches in ``batches.npz``."""

    device: str  # cpu or gpu
    vocab_size: int
    d_model: int
    d_ff: int
    num_heads: int
    num_layers: int
    dtype: str  # float32 or bfloat16
    steps: int  # a turn
    threads: int
    product_size: int  # of the square matrices whose product shows what the device can do
    dropout: float = 0.1
    label_smoothing: float = 0.1
    norm_epsilon: float = 1e-6
    warmup_steps: int = 4000

    @classmethod
    def read(cls, folder: Path) -> Job:
        """As ``write`` left it."""
        return cls(**json.loads((folder / "job.json").read_text()))

    def write(self, folder: Path) -> None:
        """For the engines' processes."""
        (folder / "job.json").write_text(json.dumps(dataclasses.asdict(self)))


class Turns:
    """An engine that trains: a turn is so many steps over the batches, from the first one on.

    The very first step is timed apart: it compiles.
    """

    first_step_seconds: float | None = None

    def __init__(
        self,
        job: Job,
        step: Callable[[Any], Any],
        batches: list[Any],
        read: Callable[[list[Any]], list[float]],
    ):
        """``step`` takes a batch and returns a loss that ``read``, which waits for the device,
        makes a number of.
        """
        self._job, self._step, self._batches, self._read = job, step, batches, read

    def __call__(self) -> list[float]:
        """The loss of each step, a mean over its real target tokens."""
        first: list[float] = []
        if self.first_step_seconds is None:
            begin = time.perf_counter()
            first = self._read([self._step(self._batches[0])])
            self.first_step_seconds = time.perf_counter() - begin
        return first + self._read(
            [self._step(self._batches[i % len(self._batches)]) for i in range(self._job.steps)]
        )


def best_rate(product: Callable[[], None], size: int) -> float:
    """FLOP/s of ``product``, which computes and waits for ``PRODUCTS`` products of square matrices,
    at its best of five.
    """
    seconds = []
    for _ in range(6):  # the first is not counted
        begin = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - begin)
    return PRODUCTS * 2 * size**3 / min(seconds[1:])
