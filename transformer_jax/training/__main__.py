"""The program train.py.

python train.py --config configs/demo.py --workdir runs/demo [--model.num-layers 2 ...]
"""

from __future__ import annotations

import logging
import signal
import sys
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from transformer_jax.cli import config_in_flags, parse_flags, run_program
from transformer_jax.config import Config, Processes


@dataclass(frozen=True)
class Arguments:
    """Train a Transformer. The same command run again resumes."""

    workdir: str
    """Folder of this run, made if it does not exist: config, tokenizer, checkpoints, metrics. Or a
    URL (s3://, gs://, ...)."""
    config: str = ""
    """A recipe in configs/ by its name, such as multi30k or, with an argument, table3:C-N2; a
    Python file like those, which is executed, so that you must trust it; or a work directory's
    config.json. Sets the defaults of all other flags. '': the paper's base model."""
    allow_changes: bool = False
    """Resume with other values of batch.*, optimizer.*, dropout, label smoothing, R-Drop, dtype,
    matmul_precision, remat or start_from, or of steps where the learning rate depends on them."""
    compilation_cache: str = "auto"
    """Folder where compiled functions are kept between runs. off: they are not. auto:
    JAX_COMPILATION_CACHE_DIR, or else transformer_jax/compiled in the user's cache folder
    (XDG_CACHE_HOME or ~/.cache)."""
    processes: Annotated[Processes, tyro.conf.arg(name="")] = field(default_factory=Processes)
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status: 0, 1 (training failed), 2 (wrong input), 128 + a
    signal's number.
    """
    return run_program(lambda: _train(sys.argv[1:] if argv is None else argv))


def _train(argv: list[str]) -> int:
    arguments = parse_flags(Arguments, argv, defaults=config_in_flags(argv))
    # JAX is imported only after the flags are checked, so that --help and errors come at once.
    from transformer_jax.compilation_cache import keep_compiled
    from transformer_jax.distributed import is_first, start

    start(arguments.processes)
    keep_compiled(arguments.compilation_cache)
    if not is_first():  # the first process speaks for all
        logging.getLogger("transformer_jax").setLevel(logging.WARNING)
    from transformer_jax.training.loop import TrainingError, train

    try:
        summary = train(
            arguments.settings, arguments.workdir, allow_changes=arguments.allow_changes
        )
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the first step; later Ctrl-C saves a checkpoint and returns
        print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        raise
    return 128 + signal.Signals[summary["stopped_by"]] if summary["stopped_by"] else 0


if __name__ == "__main__":
    sys.exit(main())
