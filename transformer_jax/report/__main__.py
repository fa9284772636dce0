"""Write a page about training runs, finished or not: curves, figures, translations, settings.

python -m transformer_jax.report --workdir runs/demo [runs/other ...] --output report.html
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformer_jax.cli import check_output, parse_flags, run_program
from transformer_jax.errors import UserError
from transformer_jax.storage import write_atomically


@dataclass(frozen=True)
class Arguments:
    """Write a page about training runs, finished or not: curves, figures, translations, settings.

    Run it again at any time, also while a run is going (docs/training.md).
    """

    workdir: tuple[str, ...]
    """Work directories, or their URLs. Runs with the same name are told apart by their paths."""
    output: str
    """The page to write (.html): one file, which needs no network."""
    samples: int = 8
    """Lines of the dev set that each run translates, on the CPU. 0: none, and no model is loaded
    except for --text.
    """
    text: tuple[str, ...] = ()
    """Sentences whose attention is drawn. Default: the first of the samples."""


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status, as ``run_program`` has it."""
    return run_program(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> None:
    a = parse_flags(Arguments, argv)
    check_output(a.output, endings=[".html"])
    if a.samples < 0:
        raise UserError(f"samples is {a.samples}; expected 0 or more.")
    # A run that is going has the accelerator's memory.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # here, so that flags are checked before matplotlib is loaded
    from transformer_jax.report.page import page
    from transformer_jax.report.runs import read_run
    from transformer_jax.report.samples import Samples, take_samples

    runs = [read_run(name, location) for name, location in _names(a.workdir).items()]
    wanted = a.samples or a.text
    samples = take_samples(runs, a.samples, texts=a.text) if wanted else Samples()
    write_atomically(Path(a.output), page(runs, samples))


def _names(workdirs: Sequence[str]) -> dict[str, str]:
    """Work directories by the last parts of their names, or by the whole if these are the same."""
    short = {Path(workdir).absolute().name: workdir for workdir in workdirs}
    return short if len(short) == len(workdirs) else {workdir: workdir for workdir in workdirs}


if __name__ == "__main__":
    sys.exit(main())
