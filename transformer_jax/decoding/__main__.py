"""decode.py: write one output line for each input line, and nothing else to stdout."""

from __future__ import annotations

import sys

from transformer_jax.cli import run_program


def main(argv: list[str] | None = None) -> int:
    """Run decode.py. Returns the exit status: 0, 2 (invalid input), 130 (Ctrl-C) or 141 (closed
    output pipe).
    """

    def work() -> None:
        from transformer_jax.decoding.program import decode  # lazy, so an early Ctrl-C is quiet

        decode(sys.argv[1:] if argv is None else argv)

    return run_program(work)


if __name__ == "__main__":
    sys.exit(main())
