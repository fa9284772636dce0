"""The program decode.py: one line out for each line in, and nothing else on stdout."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from transformer_jax.cli import run_program


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status: 0, 2 (wrong input), 130 (Ctrl-C) or 141 (nobody
    reads the output).
    """
    status = run_program(lambda: _decode(argv))
    signal.setitimer(signal.ITIMER_REAL, 0)  # see _insist_on_ctrl_c
    return status


def _decode(argv: list[str] | None) -> None:
    # Imports stand where they are needed: --help and wrong flags are answered before JAX is loaded,
    # and Ctrl-C is quiet from the start.
    from transformer_jax.decoding.flags import parse_flags

    arguments, config = parse_flags(sys.argv[1:] if argv is None else argv, Path(sys.argv[0]).name)
    from transformer_jax.decoding.job import run_job

    run_job(arguments, config)


def run() -> None:
    """``main`` as a process of its own."""
    _insist_on_ctrl_c()
    sys.exit(main())


def _insist_on_ctrl_c() -> None:
    """Python drops what callbacks of its garbage collector raise, and JAX has such a callback: then
    Ctrl-C comes once more.
    """

    def interrupt(*_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 1)
        raise KeyboardInterrupt

    # not where a shell has it ignored
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        for number in (signal.SIGINT, signal.SIGALRM):
            signal.signal(number, interrupt)


if __name__ == "__main__":
    run()
