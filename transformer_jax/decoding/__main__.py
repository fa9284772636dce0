"""The program decode.py: one line out for each line in, and nothing else on stdout."""

from __future__ import annotations

import sys

from transformer_jax.cli import run_program


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status: 0, 2 (wrong input), 130 (Ctrl-C) or 141 (nobody
    reads the output).
    """
    return run_program(lambda: _decode(sys.argv[1:] if argv is None else argv))


def _decode(argv: list[str]) -> None:
    # Imports stand where they are needed: --help and wrong flags are answered before JAX is loaded,
    # and Ctrl-C is quiet from the start.
    from transformer_jax.decoding.flags import checked_flags

    arguments, config = checked_flags(argv)
    from transformer_jax.decoding.job import run_job

    run_job(arguments, config)


if __name__ == "__main__":
    sys.exit(main())
