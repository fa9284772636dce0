"""Write a training report: curves, results, translations, attention, settings.

python -m transformer_jax.report --workdir runs/demo [runs/other ...] --output report.html
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from transformer_jax import UserError, parse_flags, run_program
from transformer_jax.errors import needs_extra
from transformer_jax.storage.files import write_atomically


@dataclass(frozen=True)
class Arguments:
    """Write an HTML report on training runs: curves, results, translations, settings.

    Works at any time, even during training (docs/training.md).
    """

    workdir: tuple[str, ...]
    """Work directories or their URLs."""
    output: str
    """Self-contained HTML file to write."""
    samples: int = 8
    """Number of dev set lines to translate with each run's model, on the CPU. With 0 and without
    --text, no model is loaded.
    """
    text: tuple[str, ...] = ()
    """Sentences for attention maps. Default: the first sample."""


def main(argv: list[str] | None = None) -> int:
    """Run the program. Returns the exit status (see ``run_program``)."""
    return run_program(lambda: _run(parse_flags(Arguments, argv)))


def _run(a: Arguments) -> None:
    if not a.workdir:
        raise UserError("--workdir is empty; expected one or more work directories.")
    if a.samples < 0:
        raise UserError(f"--samples is {a.samples}; expected 0 or more.")
    # A training run may be using the accelerator's memory.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with needs_extra("report"):
        from transformer_jax.report.page import page
    from transformer_jax.report.runs import read_run, take_samples

    runs = [read_run(workdir) for workdir in a.workdir]
    if a.samples or a.text:
        for run in runs:
            take_samples(run, a.samples, a.text)
    write_atomically(Path(a.output), page(runs))


if __name__ == "__main__":
    sys.exit(main())
