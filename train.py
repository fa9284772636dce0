"""Train a Transformer: python train.py --config configs/demo.py --workdir runs/demo [--model.num-layers 2 ...]"""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from transformer_jax.config import Config, Processes
from transformer_jax.config_files import config_in_flags
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """Train a Transformer. The same command run again resumes. The config file sets the defaults of all other flags."""

    workdir: str
    """Folder of this run: config, tokenizer, checkpoints, metrics; made if it does not exist. Or a URL (s3://, gs://, ...)."""
    config: str = ""
    """Config file, as in configs/, or a work directory's config.json; without one: the paper's base model."""
    allow_other_batches: bool = False
    """Resume although fields of `batch` differ from what the run had so far."""
    processes: Annotated[Processes, tyro.conf.arg(name="")] = field(default_factory=Processes)
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status: 0, 1 (training failed), 2 (wrong input), 128 + a signal's number."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        path, config = config_in_flags(argv)
        arguments = tyro.cli(Arguments, args=argv, prog="train.py", default=Arguments(tyro.MISSING, path, settings=config))
        logging.basicConfig(stream=sys.stderr, format="%(message)s", force=True)
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax's; what goes wrong in a save is reported here
        logging.getLogger("transformer_jax").setLevel(logging.INFO)
        # After the flags, so that --help answers at once.
        from transformer_jax.processes import is_first, start

        start(arguments.processes)
        if not is_first():  # which speaks for all
            logging.getLogger("transformer_jax").setLevel(logging.WARNING)
        from transformer_jax.training.loop import TrainingError, train

        try:
            summary = train(arguments.settings, arguments.workdir, other_batches=arguments.allow_other_batches)
        except TrainingError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    except BrokenPipeError:  # nobody reads the output, as in train.py --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 128 + signal.Signals[summary["stopped_by"]] if summary["stopped_by"] else 0


if __name__ == "__main__":
    sys.exit(main())
