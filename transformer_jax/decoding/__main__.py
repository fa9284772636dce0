"""The program decode.py: one line out for each line in, and nothing else on stdout."""

from __future__ import annotations

import sys

from transformer_jax.cli import run_program


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status: 0, 2 (wrong input), 130 (Ctrl-C) or 141 (nobody
    reads the output).
    """

    def work() -> None:
        from transformer_jax.decoding.program import decode  # here, so that Ctrl-C is quiet before

        decode(sys.argv[1:] if argv is None else argv)

    return run_program(work)


if __name__ == "__main__":
    sys.exit(main())
