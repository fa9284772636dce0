"""Entry point of decode.py, which writes only translations to stdout, one line per input line."""

from __future__ import annotations

import sys

from transformer_jax.cli import run_program


def main(argv: list[str] | None = None) -> int:
    """Run decode.py. Returns the exit status: 0, 2 (invalid input), 130 (Ctrl-C) or 141 (closed
    output pipe).
    """

    def work() -> None:
        # Import lazily, so that Ctrl-C during a slow import exits without a traceback.
        from transformer_jax.translation.program import decode

        decode(argv)

    return run_program(work)


if __name__ == "__main__":
    sys.exit(main())
