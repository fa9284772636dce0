"""The program train.py: python train.py --config configs/demo.py --workdir runs/demo
[--model.num-layers 2 ...]
"""

from __future__ import annotations

import logging
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from transformer_jax.cli import run_program
from transformer_jax.config import Config, Processes
from transformer_jax.config_io import config_in_flags


@dataclass(frozen=True)
class Arguments:
    """Train a Transformer. The same command run again resumes. The config file sets the defaults of
    all other flags.
    """

    workdir: str
    """Folder of this run: config, tokenizer, checkpoints, metrics; made if it does not exist. Or a
    URL (s3://, gs://, ...).
    """
    config: str = ""
    """Config file, as in configs/, or a work directory's config.json; without one: the paper's base
    model.
    """
    allow_changes: bool = False
    """Resume although batch, optimizer, dropout, label smoothing, R-Drop, dtype, remat, start_from
    or (where the learning rate decays to its end) steps are not what the run had so far.
    """
    processes: Annotated[Processes, tyro.conf.arg(name="")] = field(default_factory=Processes)
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status: 0, 1 (training failed), 2 (wrong input), 128 + a
    signal's number.
    """
    return run_program(lambda: _train(sys.argv[1:] if argv is None else argv))


def _train(argv: list[str]) -> int:
    path, config = config_in_flags(argv)
    default = Arguments(tyro.MISSING, path, settings=config)
    arguments = tyro.cli(Arguments, prog=Path(sys.argv[0]).name, args=argv, default=default)
    # After the flags, so that --help answers at once.
    from transformer_jax.distributed import is_first, start

    start(arguments.processes)
    if not is_first():  # which speaks for all
        logging.getLogger("transformer_jax").setLevel(logging.WARNING)
    from transformer_jax.training.loop import TrainingError, train

    try:
        summary = train(
            arguments.settings, arguments.workdir, allow_changes=arguments.allow_changes
        )
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the first step; from then on it is a signal that saves
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        raise
    return 128 + signal.Signals[summary["stopped_by"]] if summary["stopped_by"] else 0


if __name__ == "__main__":
    sys.exit(main())
