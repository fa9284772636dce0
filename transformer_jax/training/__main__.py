"""Command line of train.py.

python train.py --config configs/demo.py --workdir runs/demo [--model.num-layers 2 ...]
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from transformer_jax.cli import config_in_flags, parse_flags, run_program
from transformer_jax.settings.changes import changeable_settings
from transformer_jax.settings.config import Config, Processes
from transformer_jax.storage.files import check_multiprocess

_ALLOW_CHANGES = (
    f"Allow a resumed run to change {changeable_settings()}. A change of training.steps needs this "
    "flag only if the learning rates depend on it."
)


@dataclass(frozen=True)
class Arguments:
    """Train a Transformer. Run the same command again to resume."""

    workdir: str = tyro.MISSING
    """Work directory for config, tokenizer, checkpoints and metrics, created if missing. A folder
    or a URL (s3://, gs://, ...)."""
    config: str = ""
    """Name of a recipe in configs/, such as multi30k or, with an argument, table3:C-N2; a Python
    recipe file (which is executed, so use only files that you trust); or a work directory's
    config.json. Sets the defaults of all other flags. '': the paper's base model."""
    allow_changes: Annotated[bool, tyro.conf.arg(help=_ALLOW_CHANGES)] = False
    processes: Annotated[Processes, tyro.conf.arg(name="")] = Processes()
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status.

    The status is 0, 1 if training failed, 2 on invalid input, or 128 + the signal number.
    """
    if argv is None:
        _use_huge_pages()
    return run_program(lambda: _train(argv))


def _use_huge_pages() -> None:
    """Restart Python with huge pages in glibc's malloc, unless its settings are given.

    XLA allocates buffers anew in every step. On a CPU, Linux takes up to a fifth of a step's time
    to make their small pages.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _train(argv: list[str] | None) -> int:
    arguments = parse_flags(Arguments, argv, defaults=config_in_flags(argv))
    # JAX is imported only after flags are checked, so --help and errors appear immediately.
    from transformer_jax.devices.compilation_cache import enable_compilation_cache
    from transformer_jax.devices.distributed import is_first, lost_contact, start

    multiprocess = arguments.processes.distributed or (arguments.processes.num_processes or 1) > 1
    check_multiprocess(arguments.workdir, multiprocess=multiprocess)
    start(arguments.processes)
    enable_compilation_cache()
    if not is_first():  # only the first process logs
        logging.getLogger("transformer_jax").setLevel(logging.WARNING)
    # Orbax writes arrays in tasks of asyncio, which would print a traceback for each task that
    # fails on a full disk. Training reports the failed save once.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    from transformer_jax.training.loop import TrainingError, train

    try:
        summary = train(
            arguments.settings, arguments.workdir, allow_changes=arguments.allow_changes
        )
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        if lost_contact(error.__cause__):
            os._exit(1)  # a normal exit of JAX waits for the other processes
        return 1
    return 128 + signal.Signals[summary["stopped_by"]] if summary["stopped_by"] else 0


if __name__ == "__main__":
    sys.exit(main())
